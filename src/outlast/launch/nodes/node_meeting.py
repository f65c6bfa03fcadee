"""Meeting of the nodes of a run at its endpoint, before any worker starts.

Each node names its host and what must be equal on all nodes. The controller's node answers when all
are there and agree, and names every difference on the node that has it. The connections stay open:
at the end of the run they carry its outcome, and requests to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outlast.atomic_files import replace_file
from outlast.errors import ConfigError, RunDirError, WireError
from outlast.launch.nodes.failure_domains import DOMAIN, order_nodes
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_flags import NodeFlags
from outlast.transport.node_link import (
    AnyNodeMessage,
    ForeignTokenError,
    NodeAccepted,
    NodeHello,
    NodeLink,
    NodeRefused,
    NodeStop,
    RunOutcome,
)

STRANGERS_MAX = 64  # connections without a Hello
HELLO_S = 10.0
RETRY_S = 0.2
PROOF = "meeting"  # file of the run directory: shows that all nodes have the same one
NONCE_BYTES = 32


class NodeSeat(NamedTuple):
    """Node of a run: its host, and its connection; None on the controller's own node."""

    host: str
    link: NodeLink | None
    hello: NodeHello


class RunPlace(NamedTuple):
    """Run, term, and addresses of the controller's listener and of rank 0."""

    run: str
    term: int
    address: tuple[str, int]
    master_addr: str
    master_port: int


class NodeMeeting:
    """Meeting on the controller's node; `note` receives refusals as text."""

    def __init__(
        self,
        identity: NodeIdentity,
        run_dir: Path,
        nodes: NodeFlags,
        note: Callable[[str], None],
    ) -> None:
        self._identity, self._nodes, self._note = identity, nodes.total, note
        self._with_ranks = nodes.nodes
        self._run_dir = run_dir
        self._proof = secrets.token_hex(16)
        self._seats: dict[str, NodeSeat] = {}
        self._strangers = 0
        self._is_over = False
        self._refused: dict[str, str] = {}
        self._full = asyncio.Event()
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_stop: Callable[[str], None] = lambda _reason: None

    async def gather(self, timeout_s: float) -> list[NodeSeat]:
        """Return all nodes in the order of their ranks.

        Raises ConfigError if the endpoint cannot be opened, or nodes are missing after `timeout_s`.
        """
        host, port = self._identity.endpoint
        try:
            replace_file(self._run_dir / PROOF, self._proof.encode())
            self._server = await asyncio.start_server(self._serve, host, port, backlog=1024)
        except OSError as error:
            raise ConfigError(
                f"the endpoint {host}:{port} cannot be opened ({error.strerror}): another run or"
                " program has it; nothing was started; choose another port"
            ) from error
        own = self._identity.hello(self._proof)
        self._seats[own.host] = NodeSeat(own.host, None, own)
        self._check_full()
        try:
            async with asyncio.timeout(timeout_s):
                await self._full.wait()
        except TimeoutError:
            missing = self._missing(timeout_s)
            await self.refuse_all(f"only {len(self._seats)} of {self._nodes} nodes came in time")
            raise ConfigError(missing) from None
        finally:
            self._server.close()
        return self._ordered()

    def accept(self, seats: list[NodeSeat], place: RunPlace, run_nonce: bytes) -> None:
        """Let all nodes begin."""
        for node_rank, seat in enumerate(seats):
            if seat.link is None:
                continue
            seat.link.send(
                NodeAccepted(
                    node_rank=node_rank,
                    run=place.run,
                    term=place.term,
                    address=place.address,
                    master_addr=place.master_addr,
                    master_port=place.master_port,
                    hello_nonce=seat.hello.nonce,
                    run_nonce=run_nonce,
                )
            )

    async def announce(self, outcome: RunOutcome) -> None:
        """Send the end of the run to all nodes, and close the connections."""
        await self._end(outcome)

    async def refuse_all(self, reason: str) -> None:
        """Send a refusal to all nodes, and close the connections."""
        await self._end(NodeRefused(reason=reason))

    async def _end(self, message: AnyNodeMessage) -> None:
        self._is_over = True
        links = [seat.link for seat in self._seats.values() if seat.link]
        for link in links:
            link.send(message)
        await asyncio.gather(*(link.close() for link in links))
        for task in self._tasks:
            task.cancel()

    def _missing(self, timeout_s: float) -> str:
        refused = "".join(f"; {host} was refused: {why}" for host, why in self._refused.items())
        return (
            f"{len(self._seats)} of {self._nodes} nodes came to the endpoint within"
            f" {timeout_s:g} s: {', '.join(sorted(self._seats))}{refused}; nothing was started;"
            " start the same command on every node, or wait longer with --limit hello_s=SECONDS"
        )

    def _ordered(self) -> list[NodeSeat]:
        """Return the nodes by rank."""
        given = {seat.hello.node_rank: host for host, seat in self._seats.items()}
        given.pop(-1, None)
        domains = {host: seat.hello.domain for host, seat in self._seats.items()}
        hosts = order_nodes(domains, given, self._with_ranks)
        return [self._seats[host] for host in hosts]

    # --- one connection -------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = NodeLink(reader, writer, self._identity.key)
        if self._strangers >= STRANGERS_MAX or self._full.is_set():
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._strangers += 1
        try:
            hello, wrong = await self._hello(link)
        finally:
            self._strangers -= 1
        if hello and not wrong:
            self._seats[hello.host] = NodeSeat(hello.host, link, hello)
            self._check_full()
            await self._listen(hello.host, link)
        else:
            await self._refuse(hello, link, wrong)
        self._tasks.discard(task)

    async def _hello(self, link: NodeLink) -> tuple[NodeHello | None, str]:
        """Return a node's Hello, and why it does not fit; None for a stranger."""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await link.receive()
        except ForeignTokenError:
            return None, "its token is not that of this run"
        except (WireError, TimeoutError) as error:
            return None, str(error) or f"no message for {HELLO_S:g} s"
        if not isinstance(hello, NodeHello):
            return None, "its first message is no Hello"
        return hello, self._difference(hello)

    async def _refuse(self, hello: NodeHello | None, link: NodeLink, why: str) -> None:
        name = hello.host if hello else "a connection"
        if hello:
            self._refused[hello.host] = why
        self._note(f"{name} was refused at the endpoint: {why}")
        link.send(NodeRefused(reason=why))
        await link.close()

    def _difference(self, hello: NodeHello) -> str:
        """Return why a node does not fit; "" if it does."""
        ours = self._identity.facts
        for name in [*ours, *hello.facts]:
            here, there = ours.get(name, "missing"), hello.facts.get(name, "missing")
            if here != there:
                return f"its {name} is {there}, and that of the controller's node {here}"
        if hello.domain and not DOMAIN.fullmatch(hello.domain):
            return f"its failure domain {hello.domain[:80]!r} is not a path of names"
        if hello.directory != self._proof:
            return "its run directory is not the one of the controller's node"
        if hello.host in self._seats:
            return f"a node of host {hello.host} is there already"
        ranks = [seat.hello.node_rank for seat in self._seats.values()]
        if hello.node_rank >= self._nodes:
            return f"its node rank {hello.node_rank} is not below {self._nodes}"
        if hello.node_rank >= 0 and hello.node_rank in ranks:
            return f"node rank {hello.node_rank} is taken by another host"
        return ""

    async def _listen(self, host: str, link: NodeLink) -> None:
        """Serve an accepted node until its connection ends."""
        while True:
            try:
                message = await link.receive()
            except WireError as error:
                self._note(f"{host}: {error}")
                message = None
            if isinstance(message, NodeStop):
                self.on_stop(f"{message.reason} on {host}")
            elif message is None:
                break
        await link.close()
        if not self._full.is_set() and not self._is_over:
            self._note(f"{host} left before all nodes were there")
            del self._seats[host]

    def _check_full(self) -> None:
        if len(self._seats) == self._nodes:
            self._full.set()


async def join(
    identity: NodeIdentity, run_dir: Path, timeout_s: float
) -> tuple[NodeLink, NodeAccepted]:
    """Take part in the meeting; return the connection and this node's place in the run.

    Raises ConfigError or RunDirError that names what is wrong on this node; nothing was started.
    """
    host, port = identity.endpoint
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(deadline_s):
            link = await _connect(identity)
            hello = identity.hello(_read_proof(run_dir))
            answer = await _ask(link, hello)
    except TimeoutError:
        raise ConfigError(
            f"{identity.host}: the endpoint {host}:{port} gave no answer within {timeout_s:g} s:"
            " the controller's node is not there, or waits for other nodes; nothing was started"
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
        f"{identity.host}: the endpoint {host}:{port} closed the connection: it is another"
        " program's, or the run has all its nodes, or has ended; nothing was started"
    )


async def _ask(link: NodeLink, hello: NodeHello) -> AnyNodeMessage | None:
    """Return the answer to a Hello; close the connection if there is none."""
    link.send(hello)
    try:
        return await link.receive()
    except BaseException:
        await link.close()
        raise


async def _connect(identity: NodeIdentity) -> NodeLink:
    """Connect to the endpoint, which may open later."""
    host, port = identity.endpoint
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(RETRY_S)
            continue
        sock = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return NodeLink(reader, writer, identity.key)


def _read_proof(run_dir: Path) -> str:
    try:
        return (run_dir / PROOF).read_text(errors="replace")[:64]
    except OSError:
        return ""
