"""Shell of the pure controller: sockets, the journal and the clock."""

from __future__ import annotations

import asyncio
import errno
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from outlast import events
from outlast.checkpoint.format.manifests import SavePoint
from outlast.controller import inputs
from outlast.controller.audit.audit_records import is_barred
from outlast.controller.lifecycle.journal_segments import count_entries, join_segments
from outlast.controller.member_tables import AgentRecord, NodePlacement
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.state_machine import apply_all, initial
from outlast.errors import GaveUpError, OutlastError, RunDirError
from outlast.launch.agent_listener import LOOPBACK, AgentListener, NodeListener
from outlast.launch.nodes.run_hang_watch import RunHangWatch
from outlast.launch.notices import drain_requests
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import DisplayRecord
from outlast.launch.run_journal import read_segments
from outlast.launch.stall_watch import StallWatch
from outlast.launch.start_point import CheckpointSearch, SearchResult, search
from outlast.launch.terms.held_actions import END_S, HeldActions
from outlast.launch.terms.lease_grants import LeasedAgents, LeaseGrants
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.segment_files import SegmentWriter
from outlast.transport import messages

RETRY_S = 1.0  # between attempts to write the journal to a full disk
_entry_encoder = msgspec.msgpack.Encoder()


def _take_each(payloads: Sequence[bytes], taken: list[bytes]) -> Iterator[bytes]:
    """Yield payloads; `taken`: those after which another one, or the end, was requested."""
    for payload in payloads:
        yield payload
        taken.append(payload)


class RunningNodes(NamedTuple):
    """Nodes of a running run. `agents`: None while a later term still waits for them."""

    placement: NodePlacement
    agents: Mapping[str, AgentRecord] | None


class ControllerShell:
    """Shell of the controller: passes inputs to `handle` and executes the returned actions."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        token: bytes,
        record: DisplayRecord,
        checkpoint: messages.Checkpointed | None,
        origins: CheckpointSearch,
        committed: Callable[[], None] = lambda: None,
        nodes: NodeListener = LOOPBACK,
    ) -> None:
        job = run_dir.job
        self.job, self._nodes = job, nodes
        self._record = record
        self._checkpoint = checkpoint
        self._origins = origins
        self._committed = committed  # called for each checkpoint on disk
        self._journal_dir = run_dir.room("journal")
        self._segments = read_segments(self._journal_dir, record.note)
        self.earlier = join_segments(self._segments)
        self._journal = SegmentWriter(self._journal_dir, f"term{job.term:06d}", durable=True)
        policy = SavePolicy(
            memory=plan.snapshot_every,
            disk=plan.checkpoint_every,
            durable=any(target.every is None for target in plan.durable),
            stop=plan.on_save_failure == "stop",
        )
        self._state = initial(
            plan.world,
            plan.spares,
            plan.limits,
            policy,
            plan.migrate_on,
            NodePlacement(
                agents=nodes.hosts,
                ranks_per_node=plan.ranks_per_host,
                domains=nodes.domains,
                shares_keepers=plan.keeps_copies,
            ),
            plan.policy,
        )
        self._inputs: list[inputs.Input] = []  # of the next turn
        self._held: HeldActions | None = None  # with several nodes
        self._grants: LeaseGrants | None = None
        self._copy: Callable[[list[bytes]], None] = lambda _: None
        self.on_stop: Callable[[str], None] = lambda _reason: None  # at the request of an agent
        self._closed = False
        self._closing = threading.Event()
        self._was_full = False
        self._drains: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._stalls = StallWatch(self._loop, record.now_ns, self._stalled)
        self.ended: asyncio.Future[inputs.EndRun] = self._loop.create_future()
        self._agents = AgentListener(job, nodes, token, self)
        self.address = self._agents.address
        self._hangs = RunHangWatch(
            plan.limits,
            lambda: self._state,
            lambda agent, body: self._agents.send(inputs.Send(agent=agent, workers=(), body=body)),
            record.now_ns,
        )

    def is_barred(self, place: SavePoint) -> bool:
        """Return whether an audit has barred this checkpoint; thread-safe."""
        return is_barred(self._state.audit.bars, place.n, place.directory)

    def guard(
        self,
        confirm: Callable[[Callable[[], None]], None],
        grants: LeaseGrants,
        copy: Callable[[list[bytes]], None] = lambda _: None,
    ) -> None:
        """Let what cannot be taken back wait for `confirm`, as TermGuard.confirm does, and answers
        to renewals for `grants`. `copy` gets the journal's entries once they are durable, in a
        thread."""
        self._copy = copy
        self._held = HeldActions(confirm, self._do, self.ended, self._write)
        self._grants = grants
        read, takes_over = count_entries(self._segments), bool(self._nodes.before)
        self._append([inputs.TermBegan(read=read, takes_over=takes_over)])

    def begin(self) -> None:
        """Accept connections and begin the term."""
        self._agents.listen()
        is_start, run_dir = not self._nodes.before, self._journal_dir.parent
        self._drains = drain_requests.begin(run_dir, self._on_notices, self.note, is_start=is_start)
        self._stalls.begin()
        now_ns, nodes, change = self._now_ns(), self._nodes, None
        if nodes.before:
            silent_ns = now_ns - int(nodes.silent_s * 1e9)
            change = inputs.Succession(nodes.host, nodes.before, silent_ns)
        self._feed(
            inputs.BeginTerm(
                t_ns=now_ns,
                run=self.job.run,
                term=self.job.term,
                journal=self.earlier,
                checkpoint=self._checkpoint,
                succession=change,
            )
        )

    def stop(self, reason: str) -> None:
        """End the run at the request of a user or scheduler; it can be resumed."""
        self._feed(inputs.StopRequested(t_ns=self._now_ns(), reason=reason))

    def save(self, reason: str) -> None:
        """Save a checkpoint at the request of a user or script."""
        self._feed(inputs.SaveRequested(t_ns=self._now_ns(), reason=reason))

    def announce(self, end: inputs.EndRun) -> None:
        """Send the end of the run to all agents."""
        cause, code = end.cause.detail if end.cause else "", end.exit_code
        body = messages.RunOutcome(outcome=end.outcome, exit_code=code, cause=cause)
        for name in self._agents.agents:
            self._agents.send(inputs.Send(agent=name, workers=(), body=body))

    def close(self) -> None:
        """Close timers, connections and the journal, in any state of the run."""
        self._closed = True  # ignore further inputs
        self._closing.set()
        for drains in self._drains:
            drains.cancel()
        self._stalls.close()
        if self._timer:
            self._timer.cancel()
        self._agents.close()
        if self._held:
            self._held.close(self._journal.close)
        else:
            self._journal.close()

    # --- turns ----------------------------------------------------------------------------

    def _feed(self, event: inputs.Input) -> None:
        """Queue an input for the next turn, which handles all that arrive until then."""
        if not self._inputs and not self._closed:
            self._loop.call_soon(self._turn)
        self._inputs.append(event)

    def _now_ns(self) -> int:
        """Return the time of the next turn: its first input's."""
        if not self._inputs:
            self._stalls.look()
            self._excuse_held()
        return self._inputs[0].t_ns if self._inputs else self._record.now_ns()

    def _turn(self) -> None:
        batch, self._inputs = self._inputs, []
        if self._closed or self.ended.done():
            return
        try:
            entries: list[inputs.JournalEntry] = []  # durable before the next other action
            for action in apply_all(self._state, batch):
                if isinstance(action, inputs.AppendJournal):
                    entries.append(action.entry)
                    continue
                self._append(entries)
                self._do_or_hold(action)
            self._append(entries)
        except OutlastError as error:
            self._broke(error)
        except Exception as error:  # noqa: BLE001 - raised by the task that awaits `ended`
            self._broke(self._own_fault(error))

    def _do_or_hold(self, action: inputs.Action) -> None:
        """Do an action; with several nodes, as soon as that is safe."""
        if self._held is None or self._grants is None:
            self._do(action)
        elif isinstance(action, inputs.Send) and isinstance(action.body, messages.Renewed):
            self._grants.answer(action.agent, partial(self._agents.send, action))
        else:
            self._held.do(action)

    def nodes(self) -> RunningNodes:
        """Return the nodes of the run, and the agents that have come in this term."""
        is_taking_over = self._state.mode == "awaiting"
        agents = None if is_taking_over else self._state.members.agents
        return RunningNodes(self._state.placement, agents)

    def leased_agents(self) -> LeasedAgents:
        """Return the agents that have leases of this term."""
        state = self._state
        names = [agent.name for agent in state.members.agents.values() if not agent.lapsed]
        return LeasedAgents(names, state.term.number > 0 and state.mode != "awaiting")

    def _do(self, action: inputs.Action) -> None:
        if self._closed:
            return
        if isinstance(action, inputs.Send):
            self._agents.send(action)
        elif isinstance(action, inputs.Emit):
            self._record.emit(action.event)
            if isinstance(action.event, events.GenerationOpened):
                # The records of all ranks stay: full collections in an incident pass over them.
                gc.freeze()
        elif isinstance(action, inputs.Wake):
            self._arm(action.t_ns)
        elif isinstance(action, inputs.Verify):
            origins = self._origins._replace(keepers=()) if action.from_disk else self._origins
            search(origins, self._loop, lambda result: self._found(action, result), action.bars)
        elif isinstance(action, inputs.EndRun) and not self.ended.done():
            self.ended.set_result(action)

    def _found(self, request: inputs.Verify, result: SearchResult) -> None:
        for damage in result.damaged:
            self._record.note(damage)
        if result.error:
            self._broke(result.error)
            return
        self._feed(
            inputs.CheckpointFound(
                t_ns=self._now_ns(),
                generation=request.generation,
                checkpoint=result.checkpoint,
            )
        )

    def _broke(self, error: OutlastError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def _own_fault(self, error: Exception) -> GaveUpError:
        """Write the traceback of an error in the controller to a file, and end the run."""
        path = self._journal_dir.parent / f"controller-error-{self.job.term}.log"
        text = "".join(traceback.format_exception(error))
        try:
            path.write_text(text, encoding="utf-8")
        except OSError:
            sys.stderr.write(text)
        return GaveUpError(
            f"the controller itself failed ({type(error).__name__}: {error}); all workers were"
            f" stopped, what was committed and checkpointed is kept; please report {path},"
            f" and resume with: outlast run --run-dir {self._journal_dir.parent} ..."
        )

    def _append(self, entries: list[inputs.JournalEntry]) -> None:
        """Make entries durable before what follows, and empty the list."""
        if not entries:
            return
        if self._held:
            self._held.append(entries)
        else:
            self._write(entries)
        entries.clear()

    def _write(self, entries: Sequence[inputs.JournalEntry]) -> None:
        """Make entries durable. With several nodes a thread does it, and waits while the disk is
        full."""
        rest = encoded = list(map(_entry_encoder.encode, entries))
        end_s = time.monotonic() + (END_S if self._held else 0.0)
        while True:
            taken: list[bytes] = []
            try:
                self._journal.append_all(_take_each(rest, taken))
                self._copy(encoded)
                return
            except OSError as error:
                if all(isinstance(entry, inputs.EndDecided) for entry in entries):
                    return  # the run ends also where that cannot be written
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT) and len(taken) < len(rest)
                if not is_full or time.monotonic() > end_s:
                    raise RunDirError(
                        f"the journal in {self._journal_dir} cannot be written ({error.strerror}):"
                        " no decision can be made durable, so none is taken; everything decided"
                        " before is kept; make room and start again with the same --run-dir"
                    ) from error
                self._note_full(error)
                rest = rest[len(taken) :]
                if self._closing.wait(RETRY_S):
                    return  # nothing behind these entries was done, nor is it

    def _note_full(self, error: OSError) -> None:
        """Note once, from the thread, that decisions wait."""
        if not self._was_full:
            self._was_full = True
            text = f"the journal in {self._journal_dir} cannot be written ({error.strerror})"
            self._loop.call_soon_threadsafe(
                self._record.note, f"{text}; training goes on, decisions wait until it has room"
            )

    # --- time -----------------------------------------------------------------------------

    def _arm(self, due_ns: int) -> None:
        if self._timer:
            self._timer.cancel()
        delay_s = max(0.0, (due_ns - self._record.now_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._now_ns()  # what extends deadlines comes first
        self._feed(inputs.Tick(t_ns=self._record.now_ns()))  # not before the time it was set for

    def _excuse_held(self) -> None:
        """Extend all deadlines while orders wait for the store: nobody has received them."""
        gap_ns = int(self._held.excuse_s() * 1e9) if self._held else 0
        if gap_ns:
            self._feed(inputs.LauncherStalled(t_ns=self._record.now_ns(), gap_ns=gap_ns))

    def _stalled(self, now_ns: int, gap_ns: int) -> None:
        """Report a stall of this launcher to the controller, before any other input."""
        self._record.note(f"launcher stalled for {gap_ns / 1e9:.1f} s; deadlines extended")
        self._feed(inputs.LauncherStalled(t_ns=now_ns, gap_ns=gap_ns))

    # --- agents ---------------------------------------------------------------------------

    def on_frame(self, frame: messages.MessageEnvelope) -> None:
        """Handle an authentic frame of this run."""
        if frame.worker:
            if isinstance(frame.body, messages.Checkpointed) and frame.body.tier == "disk":
                self._committed()
        else:
            if self._grants:
                self._grants.received(frame.agent, frame.body)
            if isinstance(frame.body, messages.StopRequest):
                self.on_stop(f"{frame.body.reason} on {frame.agent}")
                return
            if isinstance(frame.body, messages.RanksObserved):
                self._hangs.observed(frame.agent, frame.body)
                return
            if isinstance(frame.body, messages.Renew):
                self._record.display.beats(frame.body.beats)
        self._feed(inputs.Received(t_ns=self._now_ns(), envelope=frame))

    def _on_notices(self, check: str, found: tuple[events.Warned, ...]) -> None:
        self._feed(inputs.SchedulerChecked(t_ns=self._now_ns(), check=check, found=found))

    def on_agent_lost(self, agent: str, incarnation: int) -> None:
        """Handle the end of an agent's connection."""
        self._feed(inputs.AgentLost(t_ns=self._now_ns(), agent=agent, incarnation=incarnation))

    def note(self, text: str) -> None:
        """Note refused connections."""
        self._record.note(text)
