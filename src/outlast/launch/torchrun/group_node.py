"""Node of a group: the ranks of a script that does not call ``outlast.init()``, on several nodes.

The node of the endpoint decides, as torchrun's agent does for one node: it starts all ranks, ends
them after the first failure of any, and starts them again while a restart is left. The other nodes
start and end their ranks for it, and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import NamedTuple

from outlast import events
from outlast.controller.inputs import EndRun
from outlast.errors import EXIT_GAVE_UP, EXIT_INTERRUPTED
from outlast.launch.host.keeper_pool import KeeperSite
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.launch.notices import notice_flags
from outlast.launch.run_directory import SAVE_REFUSED, SAVE_SIGNAL, RunDir
from outlast.launch.run_display import Console, DisplayRecord
from outlast.launch.timed_faults import TimedFaults
from outlast.launch.torchrun.group_hosts import BeatingLink, GroupHosts
from outlast.launch.torchrun.host_ranks import HostRanks
from outlast.launch.torchrun.rank_store import RankStore
from outlast.launch.torchrun.standstill_monitor import StandstillMonitor
from outlast.launch.torchrun.unmanaged_group import UnmanagedGroup
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import EventClock
from outlast.text_formatting import fault_text, rank_and_host, resume_hint
from outlast.transport.node_link import (
    EndRanks,
    GroupEnded,
    NodeLink,
    RankFailed,
    RanksEnded,
    SignalTaken,
    StartRanks,
    run_token,
)

Links = Sequence[tuple[str, NodeLink]]  # with hosts
GRACE_S = 15.0  # beyond `stop_s`: then this node ends without the others


class GroupSeat(NamedTuple):
    """This node of a group: its plan, host and address, the run's token, and all hosts by node
    rank."""

    plan: RunPlan
    host: str
    address: str
    token: bytes
    hosts: tuple[str, ...]

    @property
    def node(self) -> int:
        """Return GROUP_RANK."""
        return self.hosts.index(self.host)


class GroupNode:
    """Parts of a node of a group."""

    def __init__(
        self, seat: GroupSeat, run_dir: RunDir, record: DisplayRecord, clock: EventClock
    ) -> None:
        become_subreaper()
        self._seat, self._plan, self._run_dir = seat, seat.plan, run_dir
        self._record = record
        site = KeeperSite(seat.address, tuple((host, "") for host in seat.hosts))
        # Marks of processes are made of it, and nodes may share a machine.
        token = run_token(seat.token, seat.host.encode())
        self.crew = WorkerPool(seat.plan, run_dir, token, seat.host, clock, record.note, site)
        self._over: asyncio.Future[EndRun] = asyncio.get_running_loop().create_future()
        self._stops = 0
        self._standstill: StandstillMonitor

    async def lead(
        self,
        port: int | None,
        links: Links,
        replace: Callable[[Sequence[str]], Awaitable[Links]],
    ) -> EndRun:
        """Decide for all nodes until the run ends. `port`: MASTER_PORT, or None for a free one at
        each attempt; `replace` gathers nodes in place of lost ones. All started processes are dead
        when this returns or raises."""
        plan, lease_s = self._plan, self._plan.limits.lease_s

        def beating(links: Links) -> list[BeatingLink]:
            return [BeatingLink(host, link, lease_s, lambda: 0.0) for host, link in links]

        async def replace_lost(lost: Sequence[str]) -> list[BeatingLink]:
            return beating(await replace(lost))

        store = RankStore(self.crew.leaders) if plan.agent_store else None
        ranks = HostRanks(self.crew, self._record, lambda worker: mix(worker), self._seat.node)
        hosts = GroupHosts(
            ranks,
            store,
            plan.master_addr,
            port,
            beating(links),
            replace_lost,
        )
        group = UnmanagedGroup(plan, self._run_dir, hosts, self._record)
        self._standstill = StandstillMonitor(
            self.crew, self._record.note, group.give_up, lambda: True, hosts.still_elsewhere_s
        )

        def mix(worker: WorkerHandle) -> None:
            group.end_mixed(self._unexpected_session(worker))

        def take(number: signal.Signals, host: str) -> None:
            reason = f"{number.name} to the launcher of {host}"
            if number == signal.SIGTERM and host != self._seat.host and group.has_restarts:
                hosts.release(host, f"{reason}, which leaves the run")  # its host may shut down
                return
            self._record.note(f"{reason}: all ranks get it")
            group.stop(number, reason)

        hosts.on_signal = take
        end = self._failed("the launcher was cancelled")
        try:
            end = await self._play(
                group.run(is_started=False), lambda number: take(number, self._seat.host)
            )
        finally:
            note = f"the run has ended: {_in_words(end.cause) if end.cause else end.outcome}"
            ended = GroupEnded(outcome=end.outcome, exit_code=end.exit_code, note=note)
            await self.crew.close()
            hosts.close()
            await hosts.tell(ended)
            if store:
                store.close()
        return end

    async def follow(self, host: str, link: NodeLink) -> EndRun:
        """Start and end ranks for the node on `host` until the run ends. All started processes are
        dead when this returns or raises."""
        watch = self._standstill = StandstillMonitor(  # the deciding node reports
            self.crew, lambda _: None, lambda _: True, lambda: True, lambda: 0.0
        )
        lease_s = self._plan.limits.lease_s
        beating = BeatingLink(host, link, lease_s, lambda: watch.still_s)
        ranks = HostRanks(self.crew, self._record, lambda worker: fail(worker), self._seat.node)
        member = _Member(ranks, beating, self._record)

        def fail(worker: WorkerHandle) -> None:
            member.report(self._unexpected_session(worker))

        try:
            return await self._play(
                self._serve(member), lambda number: link.send(SignalTaken(signal=number))
            )
        finally:
            await self.crew.close()
            member.close()
            ranks.close()
            await beating.close()

    async def _serve(self, member: _Member) -> EndRun:
        ended = await member.serve()
        if ended is not None:
            self._record.note(ended.note)
            return EndRun(outcome=ended.outcome, exit_code=ended.exit_code)
        await member.end(signal.SIGTERM)
        return self._failed(
            f"the launcher of {member.host}, which decides for all nodes, has ended or gives no"
            f" sign of life; the ranks of {self._seat.host} were ended; on all nodes"
            f" {resume_hint(str(self._run_dir.path))}"
        )

    async def _play(
        self, running: Coroutine[None, None, EndRun], on_signal: Callable[[signal.Signals], None]
    ) -> EndRun:
        """Return the end of `running`, or that of a node that is to end at once."""
        console = Console(self.crew, self._record.display)
        faults = TimedFaults(self.crew, self._record)
        parts = (console.run(), faults.run(), self._standstill.run())
        helpers = [asyncio.create_task(part) for part in parts]
        task = asyncio.create_task(running)
        try:
            with self._signals(on_signal):
                await asyncio.wait({task, self._over}, return_when=asyncio.FIRST_COMPLETED)
            return self._over.result() if self._over.done() else task.result()
        except Exception as error:  # noqa: BLE001 - an error of this node ends the run
            return self._own_failure(error)
        finally:
            for each in (task, *helpers):
                each.cancel()
            await self.crew.kill_all("the launcher ends")
            console.look()
            faults.note_missed(plain=True)

    def _failed(self, detail: str) -> EndRun:
        fault = events.Fault(
            kind="agent_lost", detail=detail, host=self._seat.host, t_ns=self._record.now_ns()
        )
        return EndRun(outcome="gave_up", exit_code=EXIT_GAVE_UP, cause=fault)

    def _own_failure(self, error: Exception) -> EndRun:
        fault = events.Fault(
            kind="internal",
            detail=f"the launcher of {self._seat.host} itself failed ({type(error).__name__}:"
            f" {error}); its ranks were stopped; please report this",
            traceback="".join(traceback.format_exception(error)),
            host=self._seat.host,
            t_ns=self._record.now_ns(),
        )
        return EndRun(outcome="gave_up", exit_code=EXIT_GAVE_UP, cause=fault)

    def _unexpected_session(self, worker: WorkerHandle) -> events.Fault:
        return events.Fault(
            kind="mismatch",
            detail=f"rank {worker.seat} called outlast.init(), and the text of {self._plan.script}"
            " does not name outlast: its ranks were started as those of an unmodified script;"
            " write `import outlast` (or a comment with that name) into it",
            worker=worker.name,
            seat=worker.seat,
            host=self._seat.host,
            t_ns=self._record.now_ns(),
        )

    # --- signals --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self, on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = notice_flags.stop_numbers(self._plan.stop_signals)
        for number in numbers:
            loop.add_signal_handler(number, self._take_signal, number, on_signal)
        saves = SAVE_SIGNAL not in numbers
        if saves:  # not ignored: ranks would inherit that
            loop.add_signal_handler(SAVE_SIGNAL, self._record.note, SAVE_REFUSED)
        try:
            yield
        finally:
            for number in (*numbers, *([SAVE_SIGNAL] if saves else [])):
                loop.remove_signal_handler(number)
            if saves:
                signal.signal(SAVE_SIGNAL, signal.SIG_IGN)  # as it was before the loop

    def _take_signal(
        self, number: signal.Signals, on_signal: Callable[[signal.Signals], None]
    ) -> None:
        """End all ranks at the first signal, kill those of this host at the second."""
        self._stops += 1
        reason = f"{number.name} to the launcher of {self._seat.host}"
        if self._stops == 1:
            wait_s = self._plan.limits.stop_s + GRACE_S
            asyncio.get_running_loop().call_later(wait_s, self._give_in, reason)
            on_signal(number)
        else:
            self._record.note(f"{reason}, again: everything is killed")
            self._give_in(reason)

    def _give_in(self, reason: str) -> None:
        if not self._over.done():
            cause = events.Fault(kind="requested", detail=reason, t_ns=self._record.now_ns())
            self._over.set_result(
                EndRun(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=cause)
            )


def _in_words(fault: events.Fault) -> str:
    if fault.seat < 0 or fault.kind == "mismatch":
        return fault.detail
    return f"{rank_and_host(fault)} on {fault.host} {fault_text(fault)}"


class _Member:
    """Ranks of this host, started and ended by messages."""

    def __init__(self, ranks: HostRanks, beating: BeatingLink, record: DisplayRecord) -> None:
        self._ranks, self._beating, self._record = ranks, beating, record
        self._attempt = 0
        self._following: asyncio.Task[None] | None = None

    @property
    def host(self) -> str:
        """Return the host that decides."""
        return self._beating.host

    def report(self, fault: events.Fault) -> None:
        """Send a failure of this attempt."""
        self._beating.link.send(RankFailed(attempt=self._attempt, fault=fault))

    async def serve(self) -> GroupEnded | None:
        """Return the end of the run, or None if the connection has ended."""
        while message := await self._beating.receive():
            match message:
                case StartRanks():
                    self._attempt = message.attempt
                    if fault := await self._ranks.start(message.attempt, message.port):
                        self.report(fault)
                    else:
                        self._following = asyncio.create_task(self._follow())
                case EndRanks():
                    await self.end(signal.Signals(message.signal))
                    self._beating.link.send(RanksEnded(attempt=message.attempt))
                case GroupEnded():
                    return message
                case _:
                    pass
        return None

    async def end(self, number: signal.Signals) -> None:
        """End all ranks of this host."""
        self.close()
        await self._ranks.end(number)

    def close(self) -> None:
        """Report no further failures."""
        if self._following:
            self._following.cancel()

    async def _follow(self) -> None:
        try:
            while fault := await self._ranks.next_failure():
                self.report(fault)
        except Exception as error:  # noqa: BLE001 - the node that decides must learn of it
            detail = f"{type(error).__name__}: {error}"  # such as a process that survives SIGKILL
            self.report(events.Fault(kind="internal", detail=detail))
            return
        self._beating.link.send(RanksEnded(attempt=self._attempt))
