"""Node of a run that does not hold the controller: an agent and its workers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from outlast import events
from outlast.controller.inputs import EndRun
from outlast.controller.node_placement import RETURN_S
from outlast.errors import EXIT_GAVE_UP, EXIT_INTERRUPTED, WireError
from outlast.launch import preflight, run_directory
from outlast.launch.host.agent import Agent
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import WorkerPool
from outlast.launch.nodes import node_facts, node_joining
from outlast.launch.nodes.node_state import StateFile
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import Console, Display, DisplayRecord
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import EventClock, EventWriter
from outlast.transport.node_link import NodeAccepted, NodeLink, NodeStop, RunOutcome, run_token


def serve(plan: RunPlan, show: Callable[[Path], Display]) -> EndRun:
    """Take part in a run until it ends; return its end as the controller's node sent it.

    Raises ConfigError or RunDirError before anything is started. No process is left alive.
    """
    with run_directory.ignore_save_signal():
        preflight.check_node(plan)
        identity = node_facts.identify(plan)
        lock_fd = run_directory.lock_host(Path(plan.run_dir), identity.host)
        try:
            return asyncio.run(_serve(plan, identity, lock_fd, show))
        finally:
            run_directory.unlock(lock_fd)


async def _serve(
    plan: RunPlan, identity: node_facts.NodeIdentity, lock_fd: int, show: Callable[[Path], Display]
) -> EndRun:
    path, clock = Path(plan.run_dir), EventClock()
    display = show(path)

    def note(text: str) -> None:
        """Display a note before this node's first event."""
        display.event(events.Note(t_ns=clock.now_ns(), worker="", seat=-1, text=text))

    try:
        link, place = await node_joining.join(identity, path, plan.limits.hello_s, note)
    except BaseException:
        display.close()
        raise
    run_dir = run_directory.of_node(path, place.run, place.term, lock_fd)
    name = f"agent-{identity.host}-{place.term:06d}"
    record = DisplayRecord(EventWriter(run_dir.room("events"), name, clock), display)
    node_facts.choose_interface(link.address)
    plan = replace(plan, master_addr=place.master_addr, master_port=place.master_port)
    try:
        return await _AgentNode(plan, identity, run_dir, record, clock, link, place).run()
    finally:
        record.close()


class _AgentNode:
    """Parts of a running node."""

    def __init__(
        self,
        plan: RunPlan,
        identity: node_facts.NodeIdentity,
        run_dir: RunDir,
        record: DisplayRecord,
        clock: EventClock,
        link: NodeLink,
        place: NodeAccepted,
    ) -> None:
        token = run_token(identity.key, place.run_nonce)
        self._host, self._run_dir, self._link = identity.host, run_dir, link
        self._record = record
        self._over: asyncio.Future[EndRun] = asyncio.get_running_loop().create_future()
        self._stops = 0
        self._timer: asyncio.TimerHandle
        become_subreaper()
        self._crew = WorkerPool(plan, run_dir, token, identity.host, clock, record.note)
        self._agent = Agent(self._crew, place.address, token, lambda _worker: None)

    async def run(self) -> EndRun:
        """Serve until the run ends; all started processes are dead when this returns or raises."""
        console = Console(self._crew, self._record.display)
        serving = asyncio.create_task(self._agent.run())
        helpers = [asyncio.create_task(part) for part in (self._listen(), console.run())]
        state = StateFile(self._host, self._run_dir.job.run, self._crew.plan.limits.lease_s)
        helpers.append(asyncio.create_task(state.keep(lambda: self._agent.silence_s)))
        self._look()
        try:
            with self._signals():
                await asyncio.wait({serving, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not self._over.done():
                serving.result()  # raises the agent's error
            return await self._over
        finally:
            self._timer.cancel()
            self._agent.release_workers()
            for task in (serving, *helpers):
                task.cancel()
            await self._crew.close()
            console.look()
            await self._link.close()

    async def _listen(self) -> None:
        """Wait for the outcome, or for the end of the controller's process."""
        try:
            message = await self._link.receive()
        except WireError as error:
            message = None
            self._record.note(f"{self._host}: {error}")
        if isinstance(message, RunOutcome):
            cause = self._fault("requested", message.cause) if message.cause else None
            self._end(EndRun(outcome=message.outcome, exit_code=message.exit_code, cause=cause))
        else:
            self._give_up("the controller's node has ended without an outcome")

    def _look(self) -> None:
        """End this node if the controller is silent for long after its lease."""
        limit_s = self._crew.plan.limits.lease_s + RETURN_S
        rest_s = limit_s - self._agent.silence_s
        if rest_s > 0:
            self._timer = asyncio.get_running_loop().call_later(rest_s, self._look)
        else:
            self._give_up(f"the controller's node has not answered for {limit_s:g} s")

    def _give_up(self, why: str) -> None:
        detail = (
            f"{self._host}: {why}; the workers of this node were killed, what was checkpointed is"
            f" kept; resume with the same command on all nodes (--run-dir {self._run_dir.path})"
        )
        self._record.note(detail)
        fault = self._fault("agent_lost", detail)
        self._end(EndRun(outcome="gave_up", exit_code=EXIT_GAVE_UP, cause=fault))

    def _fault(self, kind: events.FaultKind, detail: str) -> events.Fault:
        return events.Fault(kind=kind, detail=detail, host=self._host, t_ns=self._record.now_ns())

    def _end(self, end: EndRun) -> None:
        if not self._over.done():
            self._over.set_result(end)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass requests to stop on to the controller's node; end this node at the second one."""
        loop = asyncio.get_running_loop()
        numbers = [
            number
            for number in (signal.Signals[name] for name in self._crew.plan.stop_signals)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in numbers:
            loop.add_signal_handler(number, self._on_request, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_request(self, number: signal.Signals) -> None:
        self._stops += 1
        if self._stops == 1:
            self._link.send(NodeStop(reason=f"{number.name} to the agent"))
            return
        fault = self._fault("requested", f"{number.name} to the agent of {self._host}, again")
        self._end(EndRun(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=fault))
