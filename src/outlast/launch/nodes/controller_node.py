"""The controller's node of a run of several nodes: it gathers the others."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from outlast.controller.inputs import EndRun
from outlast.launch import run_directory
from outlast.launch.controller_shell import NodeListener
from outlast.launch.nodes import node_facts
from outlast.launch.nodes.node_meeting import NONCE_BYTES, NodeMeeting, NodeSeat, RunPlace
from outlast.launch.run_directory import RunDir
from outlast.launch.torchrun_arguments import RunPlan
from outlast.transport.node_link import RunOutcome, run_token


class ControllerNode:
    """All nodes of a run, as its controller's node has them.

    `plan`: with this host's address as MASTER_ADDR. `token`: of this run, for frames and workers.
    """

    def __init__(
        self,
        plan: RunPlan,
        address: str,
        key: bytes,
        meeting: NodeMeeting,
        seats: list[NodeSeat],
        lock_fd: int,
    ) -> None:
        self.plan = replace(plan, master_addr=address)
        self.listener = NodeListener(
            address,
            tuple(seat.host for seat in seats),
            tuple(seat.hello.domain for seat in seats),
        )
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.token = run_token(key, self._nonce)
        self._meeting, self._seats, self._lock_fd = meeting, seats, lock_fd
        self._is_over = False

    def begin(
        self,
        run_dir: RunDir,
        address: tuple[str, int],
        master_port: int,
        on_stop: Callable[[str], None],
    ) -> None:
        """Let the other nodes start their agents. `on_stop` gets their requests to end the run."""
        self._meeting.on_stop = on_stop
        place = RunPlace(
            run_dir.job.run, run_dir.job.term, address, self.plan.master_addr, master_port
        )
        self._meeting.accept(self._seats, place, self._nonce)

    async def end(self, end: EndRun) -> None:
        """Send the end of the run to all nodes, once."""
        if self._is_over:
            return
        self._is_over = True
        cause = end.cause.detail if end.cause else ""
        await self._meeting.announce(
            RunOutcome(outcome=end.outcome, exit_code=end.exit_code, cause=cause)
        )

    def release(self) -> None:
        """Release this host's lock."""
        run_directory.unlock(self._lock_fd)


async def gather_nodes(
    plan: RunPlan, run_dir: RunDir, note: Callable[[str], None]
) -> ControllerNode:
    """Wait until all nodes are there. Raises ConfigError or RunDirError; nothing was started."""
    identity = node_facts.identify(plan)._replace(node_rank=0)
    lock_fd = run_directory.lock_host(Path(plan.run_dir), socket.gethostname())
    try:
        meeting = NodeMeeting(identity, run_dir.path, plan.node, note)
        note(
            f"waiting for {plan.node.total} nodes at {identity.endpoint[0]}:{identity.endpoint[1]}"
            f" for at most {plan.limits.hello_s:g} s"
        )
        seats = await meeting.gather(plan.limits.hello_s)
        node_facts.choose_interface(meeting.address)
    except BaseException:
        run_directory.unlock(lock_fd)
        raise
    places = (
        f"{seat.host} in {seat.hello.domain}" if seat.hello.domain else seat.host for seat in seats
    )
    note(f"all nodes are there: {', '.join(places)}")
    return ControllerNode(plan, meeting.address, identity.key, meeting, seats, lock_fd)
