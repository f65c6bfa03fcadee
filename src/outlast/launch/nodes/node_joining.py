"""Way of a node into a run: it connects to the endpoint, and asks the meeting for its place.

While nobody answers there, the node looks for a controller that leads the run already: the run has
begun, and this node comes back into it, or comes in place of a lost one.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.errors import ConfigError, OutlastError, RunDirError, WireError
from outlast.launch.nodes.endpoint_listener import RETRY_S
from outlast.launch.nodes.node_facts import NodeIdentity, unresolved
from outlast.launch.nodes.own_directories import known_job, look_at
from outlast.launch.terms.term_records import TermBeat, TermLedger
from outlast.launch.terms.term_store import TermStore, open_term_store
from outlast.launch.torchrun_arguments import RunPlan
from outlast.transport.node_link import (
    AnyNodeMessage,
    ForeignTokenError,
    NodeAccepted,
    NodeChallenge,
    NodeHello,
    NodeLink,
    NodeRefused,
    NodeReply,
    TlsError,
)
from outlast.transport.socket_stream import SocketStream
from outlast.transport.tls import reason_of

CONNECT_S = 5.0  # of one attempt: an address without a host gives no answer
STORE_ANSWER = 0.25  # share of the lease
LOOKS = 16  # in a lease


class NewestBeat(NamedTuple):
    """Newest term, its owner's host, and its beat."""

    term: int
    host: str
    beat: TermBeat | None


def open_ledger(plan: RunPlan, run: str, home: str = "") -> TermLedger:
    """Return the terms of a run; `home`: see RunningJob. Raises ConfigError, StorageError."""
    return TermLedger(_open_store(plan, run, home), run)


def open_journal_copies(plan: RunPlan, run: str, home: str) -> TermStore:
    """Return the store of the copies of a run's journals. Raises ConfigError, StorageError."""
    return _open_store(plan, f"{run}-journal", home)


def _open_store(plan: RunPlan, name: str, home: str) -> TermStore:
    answer_s, folder = STORE_ANSWER * plan.limits.lease_s, Path(home) if home else None
    return open_term_store(plan.node.term_store, Path(plan.run_dir), name, answer_s, folder)


class LiveRun:
    """Watch of the newest term of the run in the plan's run directory, or in `home`."""

    def __init__(self, plan: RunPlan, home: Path | None = None) -> None:
        self._plan, self._home = plan, home
        self._newest: NewestBeat | None = None
        self._changed_s = 0.0  # when the newest beat was seen to change; 0: never
        self._since_s = 0.0  # when it was first seen

    async def look(self) -> tuple[str, int] | None:
        """Return where the controller lets nodes in; None without one that was alive within the
        last lease."""
        try:
            found = await asyncio.to_thread(self._read)
        except (OSError, OutlastError, msgspec.DecodeError):
            found = self._newest  # out of reach: as it was
        if found != self._newest:
            self._changed_s = time.monotonic() if self._newest else 0.0
            self._since_s = time.monotonic()
            self._newest = found
        beat = found.beat if found else None
        if beat is None or beat.outcome or not self._changed_s:
            return None
        is_fresh = time.monotonic() - self._changed_s < self._plan.limits.lease_s
        return beat.meeting if is_fresh else None

    async def await_beat(self) -> bool:
        """Return whether a controller is alive, after a watch of one lease at most."""
        lease_s = self._plan.limits.lease_s
        while await self.look() is None:
            beat = self._newest.beat if self._newest else None
            if self._newest is None or (beat and beat.outcome) or self.is_still:
                return False
            await asyncio.sleep(lease_s / LOOKS)
        return True

    @property
    def is_still(self) -> bool:
        """Return whether the newest beat has stood still for a lease."""
        return time.monotonic() - self._since_s >= self._plan.limits.lease_s

    def has_stood_still(self, term: int, beat: TermBeat | None) -> bool:
        """Return whether this beat was the newest one, unchanged for a lease."""
        newest = self._newest
        return newest is not None and (newest.term, newest.beat) == (term, beat) and self.is_still

    @property
    def host(self) -> str:
        """Return the host of the newest term's owner; "" if none is known."""
        return self._newest.host if self._newest else ""

    def _read(self) -> NewestBeat | None:
        job = known_job(Path(self._plan.run_dir), self._home)
        if job is None:
            return None
        ledger = open_ledger(self._plan, job.run, job.home)
        newest = ledger.newest(max(0, job.term - 2))
        if newest is None:
            return None
        return NewestBeat(newest.term, newest.host, ledger.read_beat(newest.term))


async def join(
    identity: NodeIdentity,
    run_dir: Path,
    timeout_s: float,
    note: Callable[[str], None],
    folders: Sequence[Path] = (),
    live: LiveRun | None = None,
) -> tuple[NodeLink, NodeAccepted]:
    """Take part in the meeting; return its connection, and this node's place in the run.
    `folders`: see NodeMeeting.

    `live`: where to look for a run that has begun. Raises ConfigError or RunDirError that names
    what is wrong on this node; nothing was started.
    """
    host, port = identity.endpoint
    attempts = _Attempts(identity, note, live)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                link = await attempts.connect()
                hello = identity.hello(look_at(identity.host, run_dir, folders))
                if answer := await _ask(link, hello):
                    break
                await attempts.closed(link)
    except TimeoutError:
        if isinstance(attempts.error, socket.gaierror):
            raise unresolved(identity.endpoint, timeout_s, attempts.error) from None
        raise ConfigError(
            f"{identity.host}: the endpoint {host}:{port} gave no answer within {timeout_s:g} s:"
            f" {attempts.error or 'it waits for other nodes'}; no other node leads a run in"
            f" {run_dir}; nothing was started"
        ) from None
    except TlsError as error:
        raise ConfigError(
            f"{identity.host}: no connection to the endpoint {host}:{port} by TLS: {error}; nothing"
            " was started; give all nodes certificates of one authority (--tls-cert, --tls-key,"
            " --tls-ca), or none"
        ) from None
    except ForeignTokenError:
        raise ConfigError(
            f"{identity.host}: the token is not that of the controller's node at {host}:{port};"
            " nothing was started; give the same token to all nodes"
        ) from None
    except WireError as error:
        raise ConfigError(
            f"{identity.host}: the endpoint {host}:{port} is another program's ({error}); nothing"
            " was started; choose another port"
        ) from None
    if isinstance(answer, NodeAccepted) and answer.hello_nonce == hello.nonce:
        return link, answer
    await link.close()
    if isinstance(answer, NodeRefused):
        kind = RunDirError if "run directory" in answer.reason else ConfigError
        raise kind(
            f"{identity.host} was refused by the run at {host}:{port}: {answer.reason}; nothing"
            " was started on this node"
        )
    raise ConfigError(
        f"{identity.host}: the answer of the endpoint {host}:{port} is not to this node's request;"
        " nothing was started"
    )


async def _ask(link: NodeLink, hello: NodeHello) -> AnyNodeMessage | None:
    """Return the answer to a Hello; close the connection if there is none."""
    link.send(hello)
    try:
        answer = await link.receive()
        if isinstance(answer, NodeChallenge):
            link.send(NodeReply(nonce=answer.nonce))
            answer = await link.receive()
        return answer
    except BaseException:
        await link.close()
        raise


class _Attempts:
    """Attempts to connect to the endpoint, which may open later, as its name may appear later, or
    change its address: it is resolved anew each time."""

    def __init__(
        self, identity: NodeIdentity, note: Callable[[str], None], live: LiveRun | None
    ) -> None:
        self._identity, self._note, self._live = identity, note, live
        self._is_noted = False
        self._running: tuple[str, int] | None = None  # meeting of a run that has begun
        self.error: OSError | None = None  # of the last attempt, if it failed

    async def closed(self, link: NodeLink) -> None:
        """Wait after a connection that ended without an answer: others crowded it out, the
        controller's node starts again, or the endpoint is another program's."""
        await link.close()
        await self._wait(ConnectionResetError("it closes connections without an answer"))

    async def _wait(self, error: OSError) -> None:
        if not self._is_noted:
            self._is_noted = True
            host, port = self._identity.endpoint
            reason = str(error) or f"no answer within {CONNECT_S:g} s"
            self._note(f"waiting for the endpoint {host}:{port}: {reason}")
        self.error = error
        await asyncio.sleep(RETRY_S)
        self._running = await self._live.look() if self._live else None

    async def connect(self) -> NodeLink:
        """Return a connection to the endpoint, or to the controller of a run that has begun."""
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    stream = await self._connect()
            except ssl.SSLError as error:  # a certificate or a program that does not fit
                raise TlsError(reason_of(error)) from error
            except OSError as error:
                await self._wait(error)
                continue
            self.error = None
            return NodeLink(stream, self._identity.key)

    async def _connect(self) -> SocketStream:
        """Return a connection, by TLS if the run uses it. Raises OSError, also ssl.SSLError."""
        loop, local = asyncio.get_running_loop(), self._identity.local_addr
        host, port = self._running or self._identity.endpoint
        found = await loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        stream = SocketStream(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            sock = stream.socket
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if local:
                sock.bind((local, 0))
            await loop.sock_connect(sock, found[0][4])
            leader = (self._live.host,) if self._running and self._live else ()
            if tls := self._identity.peer_tls(leader):
                tls.check(await stream.secure(tls.node.client, is_server=False))
        except BaseException:
            stream.abort()
            raise
        return stream
