"""Meeting of the nodes of a run at its endpoint, before any worker starts.

Each node names its host and what must be equal on all nodes. The controller's node answers when all
are there and agree, and names every difference on the node that has it. Then the connections end;
those of a group stay, and the meeting opens again for nodes in place of lost ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from outlast.atomic_files import replace_file
from outlast.errors import ConfigError, WireError
from outlast.launch.nodes.endpoint_listener import EndpointListener
from outlast.launch.nodes.failure_domains import DOMAIN, order_nodes
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_flags import NodeFlags
from outlast.launch.nodes.own_directories import (
    PROOF,
    OwnDirectories,
    is_own,
    look_at,
    why_elsewhere,
    why_mixed,
)
from outlast.transport.node_link import (
    NodeAccepted,
    NodeHello,
    NodeLink,
    NodeRefused,
)


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
    home: str = ""  # see NodeAccepted


def difference(identity: NodeIdentity, hello: NodeHello) -> str:
    """Return how a node differs from the controller's, but for its directories; "" if not."""
    ours = identity.facts
    for name in [*ours, *hello.facts]:
        here, there = ours.get(name, "missing"), hello.facts.get(name, "missing")
        if here != there:
            return f"its {name} is {there}, and that of the controller's node {here}"
    if hello.domain and not DOMAIN.fullmatch(hello.domain):
        return f"its failure domain {hello.domain[:80]!r} is not a path of names"
    return ""


def _with_rank(seat: NodeSeat, node_rank: int) -> NodeSeat:
    return seat._replace(hello=replace(seat.hello, node_rank=node_rank))


class NodeMeeting:
    """Meeting on the controller's node; `note` receives refusals as text. `folders`: directories of
    durable storage, which all nodes must share. `own`: whether hosts can have run directories of
    their own."""

    def __init__(
        self,
        identity: NodeIdentity,
        run_dir: Path,
        nodes: NodeFlags,
        note: Callable[[str], None],
        folders: Sequence[Path] = (),
        own: OwnDirectories | None = None,
    ) -> None:
        self._identity, self._nodes, self._note = identity, nodes.total, note
        self._with_ranks = nodes.nodes
        self._run_dir, self._folders, self._own = run_dir, folders, own or OwnDirectories()
        self._proof = secrets.token_hex(16)
        self._seats: dict[str, NodeSeat] = {}
        self._members: set[str] = set()  # accepted hosts, whose connections others use
        self._ranks: dict[str, int] = {}  # node ranks of accepted hosts, also of lost ones
        self.listener = EndpointListener(identity, note, self._meet)
        self._is_over = False
        self._refused: dict[str, str] = {}
        self._full = asyncio.Event()

    @property
    def address(self) -> str:
        """Return this host's address at the endpoint; "" until it is open."""
        return self.listener.address

    @property
    def home(self) -> Path | None:
        """Return the shared directory of the run, if its hosts have run directories of their own;
        once the nodes are there."""
        others = [seat.hello for seat in self._seats.values() if seat.link]
        return self._own.home if others and is_own(self._proof, others[0]) else None

    async def gather(self, timeout_s: float) -> list[NodeSeat]:
        """Return all nodes in the order of their ranks.

        Raises ConfigError if the endpoint cannot be opened, or nodes are missing after `timeout_s`.
        """
        if not await self._fill(timeout_s):
            await self.refuse_all(f"only {len(self._seats)} of {self._nodes} nodes came in time")
            raise ConfigError(
                f"{self._missing(timeout_s)}; nothing was started; start the same command on every"
                " node, or wait longer with --limit hello_s=SECONDS"
            )
        return self._ordered()

    async def gather_again(self, lost: Iterable[str], timeout_s: float) -> list[NodeSeat]:
        """Return all nodes, once others or the same came in place of lost ones; raise as `gather`
        does. `accept` answers those that came."""
        for host in lost:
            self._seats.pop(host, None)
            self._members.discard(host)
        self._refused.clear()
        self._full.clear()
        self._is_over = False
        if not await self._fill(timeout_s):
            await self.refuse_all("the run has ended: too few nodes came in time")
            raise ConfigError(
                f"{self._missing(timeout_s)}; wait longer with --limit hello_s=SECONDS"
            )
        return self._ordered()

    async def _fill(self, timeout_s: float) -> bool:
        """Wait for all nodes; return whether they came. Raises ConfigError."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._open(timeout_s)
                host, folders = self._identity.host, self._folders
                own = self._identity.hello(look_at(host, self._run_dir, folders))
                self._seats[own.host] = NodeSeat(own.host, None, own)
                self._check_full()
                await self._full.wait()
        except TimeoutError:
            if not self._seats:
                raise self.listener.error(None, timeout_s) from None
            return False
        finally:
            self.listener.stop_listening()
        return True

    async def _open(self, timeout_s: float) -> None:
        try:
            for directory in (self._run_dir, *self._folders):
                replace_file(directory / PROOF, self._proof.encode())
        except OSError as error:
            raise self.listener.error(error, timeout_s) from error
        await self.listener.open(timeout_s)

    async def accept(
        self, seats: list[NodeSeat], place: RunPlace, run_nonce: bytes, *, keep: bool = False
    ) -> list[tuple[str, NodeLink]]:
        """Let all nodes begin that have not begun; return their connections, closed unless `keep`
        is set."""
        hosts = tuple(seat.host for seat in seats)
        domains = tuple(seat.hello.domain for seat in seats)
        links: list[tuple[str, NodeLink]] = []
        for node_rank, seat in enumerate(seats):
            self._ranks[seat.host] = node_rank
            self._seats[seat.host] = _with_rank(seat, node_rank)
            if seat.link is None or seat.host in self._members:
                continue
            links.append((seat.host, seat.link))
            seat.link.send(
                NodeAccepted(
                    hosts=hosts,
                    domains=domains,
                    run=place.run,
                    term=place.term,
                    address=place.address,
                    master_addr=place.master_addr,
                    master_port=place.master_port,
                    home=place.home,
                    hello_nonce=seat.hello.nonce,
                    run_nonce=run_nonce,
                )
            )
        if keep:
            self._members |= dict(links).keys()
        await self._end()
        return links

    async def refuse_all(self, reason: str) -> None:
        """Send a refusal to all nodes that have not begun, and close their connections."""
        for link in self._waiting():
            link.send(NodeRefused(reason=reason))
        await self._end()

    def _waiting(self) -> list[NodeLink]:
        seats = self._seats.values()
        return [seat.link for seat in seats if seat.link and seat.host not in self._members]

    async def _end(self) -> None:
        self._is_over = True
        for directory in self._folders:
            with contextlib.suppress(OSError):
                (directory / PROOF).unlink(missing_ok=True)
        self.listener.close()
        await asyncio.gather(*(link.close() for link in self._waiting()))

    def _missing(self, timeout_s: float) -> str:
        refused = "".join(f"; {host} was refused: {why}" for host, why in self._refused.items())
        return (
            f"{len(self._seats)} of {self._nodes} nodes came to the endpoint within"
            f" {timeout_s:g} s: {', '.join(sorted(self._seats))}{refused}"
        )

    def _ordered(self) -> list[NodeSeat]:
        """Return the nodes by rank."""
        given = {seat.hello.node_rank: host for host, seat in self._seats.items()}
        given.pop(-1, None)
        domains = {host: seat.hello.domain for host, seat in self._seats.items()}
        hosts = order_nodes(domains, given, self._with_ranks)
        return [self._seats[host] for host in hosts]

    # --- one connection -------------------------------------------------------------------

    async def _meet(self, hello: NodeHello, link: NodeLink) -> None:
        """Serve a node's connection until it ends."""
        if wrong := self._difference(hello):
            self._refused[hello.host] = wrong
            self._note(f"{hello.host} was refused at the endpoint: {wrong}")
            link.send(NodeRefused(reason=wrong))
            return
        seat = NodeSeat(hello.host, link, hello)
        if hello.node_rank < 0 and (rank := self._ranks.get(hello.host, -1)) not in self._taken():
            seat = _with_rank(seat, rank)  # as before
        self._seats[hello.host] = seat
        self._check_full()
        await self._listen(hello.host, link)

    def _difference(self, hello: NodeHello) -> str:
        """Return why a node does not fit; "" if it does."""
        if wrong := difference(self._identity, hello):
            return wrong
        others = [seat.hello for seat in self._seats.values() if seat.link]
        if wrong := why_elsewhere(self._proof, hello, self._folders, self._own, self._seats):
            return wrong
        if others and (wrong := why_mixed(hello, others[0], self._proof)):
            return wrong
        if self._full.is_set():
            return "the run has all its nodes"
        if hello.host in self._seats:
            return f"a node of host {hello.host} is there already"
        if hello.node_rank >= self._nodes:
            return f"its node rank {hello.node_rank} is not below {self._nodes}"
        if hello.node_rank >= 0 and hello.node_rank in self._taken():
            return f"node rank {hello.node_rank} is taken by another host"
        return ""

    def _taken(self) -> list[int]:
        return [seat.hello.node_rank for seat in self._seats.values()]

    async def _listen(self, host: str, link: NodeLink) -> None:
        """Notice that an accepted node leaves before the run begins."""
        try:
            await link.receive()
        except WireError as error:
            self._note(f"{host}: {error}")
        if not self._full.is_set() and not self._is_over:
            self._note(f"{host} left before all nodes were there")
            del self._seats[host]

    def _check_full(self) -> None:
        if len(self._seats) == self._nodes:
            self._full.set()
