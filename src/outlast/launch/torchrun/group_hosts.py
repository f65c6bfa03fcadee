"""Ranks of a group on all of its hosts, as one set: this host's, and those behind connections."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from outlast import events
from outlast.errors import EXIT_INTERRUPTED, ConfigError, WireError
from outlast.launch.host.worker_environment import free_port
from outlast.launch.torchrun.host_ranks import HostRanks
from outlast.launch.torchrun.rank_store import RankStore
from outlast.transport.node_link import (
    AnyNodeMessage,
    EndRanks,
    GroupEnded,
    NodeBeat,
    NodeLink,
    RankFailed,
    RanksEnded,
    SignalTaken,
    StartRanks,
)

BEATS = 4  # in a lease
UNREAD_MAX = 4096  # messages of a peer, or failures of a group, that nobody has taken yet
# Answers nodes in place of those of lost hosts; raises ConfigError if they do not come in time.
Replace = Callable[[Sequence[str]], Awaitable[Sequence["BeatingLink"]]]
END_S = 10.0  # beyond `stop_s`: for a host to answer that its ranks have ended


class BeatingLink:
    """Connection between two nodes of a group, which ends if the peer gives no sign of life for a
    lease, or sends UNREAD_MAX messages that are not taken: more than its ranks can cause. A stall
    of this process counts as one beat. `look` returns how long the ranks here have stood still."""

    def __init__(
        self, host: str, link: NodeLink, lease_s: float, look: Callable[[], float]
    ) -> None:
        self.host, self.link, self._look = host, link, look
        self.still_s = 0.0  # of the peer's ranks, as of its last beat
        self._period_s = lease_s / BEATS
        self._missed = 0
        self._received: asyncio.Queue[AnyNodeMessage | None] = asyncio.Queue(UNREAD_MAX + 1)
        self.end_reason = "has ended, or gives no sign of life"
        self._tasks = [asyncio.create_task(part) for part in (self._beat(), self._read())]

    async def receive(self) -> AnyNodeMessage | None:
        """Return the next message but beats, or None at the end of the connection."""
        return await self._received.get()

    async def _read(self) -> None:
        message: AnyNodeMessage | None = NodeBeat(still_s=0.0)
        while message:
            try:
                message = await self.link.receive()
            except WireError:
                message = None
            self._missed = 0
            if isinstance(message, NodeBeat):
                self.still_s = message.still_s
            elif message and self._received.qsize() >= UNREAD_MAX:
                self.end_reason = f"has sent {UNREAD_MAX} messages that were not taken in time"
                message = None
                await self.link.close(0.0)
            if not isinstance(message, NodeBeat):
                self._received.put_nowait(message)

    async def _beat(self) -> None:
        while self._missed <= BEATS:
            self.link.send(NodeBeat(still_s=self._look()))
            await asyncio.sleep(self._period_s)
            self._missed += 1
        await self.link.close(0.0)

    async def close(self) -> None:
        """Send what is queued, and end the connection."""
        for task in self._tasks:
            task.cancel()
        await self.link.close()


class GroupHosts:
    """Ranks on this host and on those of `links`. `on_signal` is called for a signal to another
    host's launcher; `port`: MASTER_PORT, or None for a free one at each attempt."""

    def __init__(
        self,
        ranks: HostRanks,
        store: RankStore | None,
        address: str,
        port: int | None,
        links: Sequence[BeatingLink] = (),
        replace: Replace | None = None,
    ) -> None:
        self._ranks, self._store = ranks, store
        self._address, self._port, self._replace = address, port, replace
        self._attempt, self.started_s = 0, ranks.started_s
        self._links: dict[str, BeatingLink] = {}  # by host
        self._lost: dict[str, events.Fault] = {}  # by host
        self._leaving: dict[str, events.Fault] = {}  # lost once its ranks have ended
        self._running: set[str] = set()  # hosts whose ranks have not ended; "" is this one
        self._changed = asyncio.Event()  # of `_running`
        self._failures: asyncio.Queue[events.Fault | Exception | str] = asyncio.Queue()
        self.on_signal: Callable[[signal.Signals, str], None] = lambda _number, _host: None
        self._following: dict[str, asyncio.Task[None]] = {}
        for link in links:
            self._add(link)
        self._local: asyncio.Task[None] | None = None
        if store:
            store.on_end = self.fail

    def fail(self, fault: events.Fault) -> None:
        """Add a failure of the group."""
        self._failures.put_nowait(fault)

    def _add(self, link: BeatingLink) -> None:
        self._links[link.host] = link
        self._following[link.host] = asyncio.create_task(self._follow(link))

    def adopt(self) -> None:
        """Take this host's ranks as those of attempt 0, which run already."""
        self._running = {""}
        self._local = asyncio.create_task(self._follow_local())

    async def start(self, attempt: int) -> events.Fault | None:
        """Start all ranks, with a new store; return a fault if that fails."""
        self._attempt, self.started_s = attempt, time.monotonic()
        self._running = {"", *self._links}  # before any wait: a host may be lost in it
        try:
            port = self._port or 0
            if self._store:
                port = await self._store.open(port)
            port = port or free_port(self._address)
        except (ConfigError, OSError) as error:
            return events.Fault(kind="exited", detail=str(error))
        for link in self._links.values():
            link.link.send(StartRanks(attempt=attempt, port=port))
        if fault := await self._ranks.start(attempt, port):
            return fault
        self._local = asyncio.create_task(self._follow_local())
        return None

    async def next_failure(self) -> events.Fault | None:
        """Return the next failure, or None once all ranks have ended; it may be cancelled."""
        while True:
            found = await self._failures.get()
            if isinstance(found, Exception):
                raise found
            if isinstance(found, events.Fault):
                return found
            if not self._running and self._failures.empty():
                return None

    async def end(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, and SIGKILL after ``stop_s``; return when all are dead, or
        their host is lost."""
        if self._local:
            self._local.cancel()
        for link in self._links.values():
            link.link.send(EndRanks(attempt=self._attempt, signal=number))
        begun_s = time.monotonic()
        await self._ranks.end(number)
        self._end_of("")
        while self._running:
            self._changed.clear()
            rest_s = begun_s + self._ranks.stop_s + END_S - time.monotonic()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, rest_s))
            except TimeoutError:
                for host in list(self._running):
                    self._lose(host, "did not end its ranks in time")
        while not self._failures.empty():
            if isinstance(error := self._failures.get_nowait(), Exception):
                raise error

    def end_hang(self, reason: str) -> bool:
        """End the attempt of a group that hangs; return False if no rank runs here."""
        return self._ranks.end_hang(reason)

    def still_elsewhere_s(self) -> float:
        """Return for how long the ranks of all other hosts have stood still."""
        return min((one.still_s for one in self._links.values()), default=math.inf)

    def release(self, host: str, reason: str) -> None:
        """Let a node end, and the attempt, unless its ranks have ended; another node can take its
        place."""
        fault = events.Fault(kind="agent_lost", detail=reason, host=host)
        self._leaving[host] = fault
        if host in self._running:
            self.fail(fault)

    def losses(self) -> list[events.Fault]:
        """Return the losses of hosts without a node in their place."""
        return [*(self._lost | self._leaving).values()]

    async def replace_lost(self) -> str:
        """Wait for nodes in place of lost ones, after the end of all ranks; return why the ranks
        cannot be started again, "" if they can. It may be cancelled."""
        while lost := [*self._lost, *self._leaving]:
            assert self._replace, "only other hosts are lost"
            for host in lost:
                await self._drop(host)
            if self._store:
                await self._store.free()
            try:
                links = await self._replace(lost)
            except ConfigError as error:
                names = " and ".join(dict.fromkeys(lost))
                return f"no node came in place of {names}: {error}"
            for host in lost:
                self._lost.pop(host, None)
            for link in links:
                self._add(link)
        while not self._failures.empty():
            self._failures.get_nowait()  # of the hosts that are replaced
        return ""

    async def _drop(self, host: str) -> None:
        """End the connection with a host that is lost, or leaves."""
        link = self._links.pop(host, None)
        if link is None:
            return
        self._following.pop(host).cancel()
        if fault := self._leaving.pop(host, None):
            self._lost[host] = fault
            note = f"{fault.detail}; the other nodes wait for one in its place"
            ended = GroupEnded(outcome="interrupted", exit_code=EXIT_INTERRUPTED, note=note)
            link.link.send(ended)
        await link.close()

    async def tell(self, end: GroupEnded) -> None:
        """Tell the other hosts how the run has ended, and close the connections."""
        for link in self._links.values():
            link.link.send(end)
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def close(self) -> None:
        """Follow no ranks any more."""
        for task in (*self._following.values(), *filter(None, [self._local])):
            task.cancel()
        self._ranks.close()

    # --- failures -------------------------------------------------------------------------

    async def _follow_local(self) -> None:
        try:
            while fault := await self._ranks.next_failure():
                self._failures.put_nowait(fault)
            self._end_of("")
        except Exception as error:  # noqa: BLE001 - raised again by `next_failure`
            self._failures.put_nowait(error)

    async def _follow(self, link: BeatingLink) -> None:
        while message := await link.receive():
            match message:
                case RankFailed() if message.attempt == self._attempt:
                    if self._failures.qsize() < UNREAD_MAX:  # the first ones have the cause
                        self._failures.put_nowait(message.fault)
                case RanksEnded() if message.attempt == self._attempt:
                    self._end_of(link.host)
                case SignalTaken():
                    self.on_signal(signal.Signals(message.signal), link.host)
                case _:
                    pass  # of an earlier attempt
        self._lose(link.host, link.end_reason)

    def _end_of(self, host: str) -> None:
        """Note that all ranks of a host have ended."""
        self._running.discard(host)
        self._failures.put_nowait(host)
        self._changed.set()

    def _lose(self, host: str, why: str) -> None:
        """Note a lost host: a failure, unless its ranks had ended."""
        if host in self._lost:
            return
        detail = f"the launcher of {host} {why}; its ranks end with it"
        self._lost[host] = events.Fault(kind="agent_lost", detail=detail, host=host)
        if host in self._running:
            self._failures.put_nowait(self._lost[host])
            self._end_of(host)
