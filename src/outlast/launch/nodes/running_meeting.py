"""Meeting of a run that has begun: nodes that come back, and nodes in place of lost ones.

| host of the node                        | answer                                             |
|-----------------------------------------|----------------------------------------------------|
| its agent is in touch                   | refused, unless that ends within a lease           |
| its agent was lost                      | accepted, as the next incarnation of the agent     |
| new, and fewer nodes than `--nnodes`    | accepted, as a spare node                          |
| new, and the run has all its nodes      | refused, unless one is lost within a lease         |

The caller has the lock of its host in the run directory: earlier agents of the host have ended with
all that they started.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from outlast.atomic_files import replace_file
from outlast.launch.controller_shell import RunningNodes
from outlast.launch.nodes.endpoint_listener import EndpointListener
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_meeting import RunPlace, difference
from outlast.launch.nodes.own_directories import (
    PROOF,
    OwnDirectories,
    read_proof,
    why_another_run,
    why_elsewhere,
)
from outlast.transport.node_link import NodeAccepted, NodeHello, NodeLink, NodeRefused

LOOK_S = 0.2
ALL_SHARE = OwnDirectories(None, "all nodes of this run share one")
ENTER_S = 30.0  # time of an accepted node until its agent has connected


class RunningMeeting:
    """Meeting of one term on its controller's node; `look` returns the present nodes.

    `folders`: the run directory, and those of durable storage, which must be the same on all nodes;
    with `own`, hosts have run directories of their own, and `folders` are those of durable storage.
    `fixed_hosts`: why no host can join that was not there at the start.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        folders: tuple[Path, ...],
        address: str,
        look: Callable[[], RunningNodes],
        note: Callable[[str], None],
        fixed_hosts: str = "",
        own: OwnDirectories | None = None,
    ) -> None:
        self._identity, self._folders, self._look, self._note = identity, folders, look, note
        self._listener = EndpointListener(identity, note, self._meet, "the running run")
        self.address = self._listener.bind(address)
        self._fixed_hosts, self._own = fixed_hosts, own
        self._storage = folders if own else folders[1:]
        self._entering: dict[str, float] = {}  # accepted hosts, and until when they count
        self._place: tuple[RunPlace, bytes]
        self._nodes_max = 0
        self._wait_s = 0.0

    async def serve(self, place: RunPlace, nonce: bytes, nodes_max: int, wait_s: float) -> None:
        """Let nodes come from now on. `nonce`: of the run's token; `wait_s`: longest wait for the
        loss of an agent in whose place a node comes."""
        self._place, self._nodes_max, self._wait_s = (place, nonce), nodes_max, wait_s
        await asyncio.to_thread(self._show_proofs)
        self._listener.listen()

    def close(self) -> None:
        """Close the listener and all connections."""
        self._listener.stop_listening()
        self._listener.close()

    async def _meet(self, hello: NodeHello, link: NodeLink) -> None:
        wrong = difference(self._identity, hello) or self._elsewhere(hello)
        if wrong := wrong or await self._await_room(hello):
            self._note(f"{hello.host} was refused by the running run: {wrong}")
            link.send(NodeRefused(reason=wrong))
        else:
            self._accept(link, hello)

    def _elsewhere(self, hello: NodeHello) -> str:
        """Return why a node's directories do not fit; "" if they do."""
        proof, run = read_proof(self._folders[0]), self._place[0].run
        hosts = self._look().placement.agents
        wrong = why_elsewhere(proof, hello, self._storage, self._own or ALL_SHARE, hosts)
        if not wrong and self._own and hello.run not in ("", run):
            return why_another_run(hello.run, run)
        return wrong

    def remove_proofs(self) -> None:
        """Remove the proofs in durable storage, at the end of the run."""
        for folder in self._storage:
            with contextlib.suppress(OSError):
                (folder / PROOF).unlink(missing_ok=True)

    def _show_proofs(self) -> None:
        """Write the proof into durable storage, where the first meeting removed it: that of the
        run directory, if all nodes share one."""
        proof = secrets.token_hex(16) if self._own else read_proof(self._folders[0])
        for folder in self._storage:
            try:
                replace_file(folder / PROOF, proof.encode())
            except OSError as error:
                self._note(
                    f"{folder / PROOF} cannot be written ({error.strerror}): no node can join later"
                )

    async def _await_room(self, hello: NodeHello) -> str:
        """Return why a node cannot take part, after a wait; "" when it can."""
        end_s = time.monotonic() + self._wait_s
        why = self._no_room(hello.host)
        while why and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)  # leases end in the controller's state
            why = self._no_room(hello.host)
        return why

    def _no_room(self, host: str) -> str:
        now_s = time.monotonic()
        agents = self._look().agents
        if agents is None:
            return "a controller that has just taken over still waits for the nodes of the run"
        self._entering = {
            name: end_s
            for name, end_s in self._entering.items()
            if end_s > now_s and not (name in agents and agents[name].connected)
        }
        known = agents.get(host)
        if host in self._entering or (known and known.connected and not known.lapsed):
            return f"an agent of host {host} takes part in it already"
        if self._fixed_hosts and host not in (names := self._look().placement.agents):
            return f"it was started on {', '.join(names)}: {self._fixed_hosts}"
        live = {name for name, agent in agents.items() if not agent.lapsed} | self._entering.keys()
        if known is None and len(live) >= self._nodes_max:
            return f"the run has all its nodes: {', '.join(sorted(live))}"
        return ""

    def _accept(self, link: NodeLink, hello: NodeHello) -> None:
        place, nonce = self._place
        placement, agents = self._look()
        known = (agents or {}).get(hello.host)
        placement = placement.with_node(hello.host, hello.domain)
        self._entering[hello.host] = time.monotonic() + ENTER_S
        what = "comes back into the run" if known else "joins the run as a spare node"
        self._note(f"{hello.host} {what}")
        link.send(
            NodeAccepted(
                hosts=placement.agents,
                domains=placement.domains,
                run=place.run,
                term=place.term,
                address=place.address,
                master_addr=place.master_addr,
                master_port=place.master_port,
                home=place.home,
                hello_nonce=hello.nonce,
                run_nonce=nonce,
                incarnation=known.incarnation + 1 if known else 1,
            )
        )
