"""Shell of the pure controller: sockets, the journal and the clock."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import SavePoint
from outlast.controller import inputs
from outlast.controller.audit.audit_records import is_barred
from outlast.controller.lifecycle.journal_segments import count_entries, join_segments
from outlast.controller.member_tables import NodePlacement
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.state_machine import apply_all, initial
from outlast.errors import GaveUpError, OutlastError, RunDirError
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import DisplayRecord
from outlast.launch.run_journal import read_segments
from outlast.launch.start_point import CheckpointSearch, SearchResult, search
from outlast.launch.terms.held_actions import HeldActions
from outlast.launch.terms.lease_grants import LeaseGrants
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.segment_files import SegmentWriter
from outlast.transport import messages
from outlast.transport.channel import Channel
from outlast.transport.stranger_table import Stranger, StrangerTable

STRANGERS_MAX = 64  # or the number of nodes
STRANGER_S = 5.0
BACKLOG = 1024
ACCEPTS_MAX = 64  # per turn of the loop
PAUSE_S = 1.0
BEAT_S = 0.25
STILL_S = 1.0  # a later beat means that this process stalled, not that peers were silent
_entry_encoder = msgspec.msgpack.Encoder()


class NodeListener(NamedTuple):
    """Address of the controller's listener, and the hosts of a run of several nodes by rank, with
    their failure domains."""

    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()


LOOPBACK = NodeListener()


class ControllerPeer(NamedTuple):
    """Current connection of an agent."""

    channel: Channel
    incarnation: int


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
        self.job = job
        self._token = token
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
                agents=nodes.hosts, ranks_per_node=plan.ranks_per_node, domains=nodes.domains
            ),
        )
        self._inputs: list[inputs.Input] = []  # of the next turn
        self._held: HeldActions | None = None  # with several nodes
        self._grants: LeaseGrants | None = None
        self.on_stop: Callable[[str], None] = lambda _reason: None  # at the request of an agent
        self._closed = False
        self._peers: dict[str, ControllerPeer] = {}
        most = max(STRANGERS_MAX, len(nodes.hosts))
        self._table = StrangerTable("the controller", most, STRANGER_S, record.note)
        self._strangers: dict[Channel, Stranger] = {}
        self._seqs: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._ran_ns = 0  # last time at which this launcher ran
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[inputs.EndRun] = self._loop.create_future()
        self._listener = socket.create_server(
            (nodes.address, 0), backlog=max(BACKLOG, len(nodes.hosts))
        )
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def is_barred(self, place: SavePoint) -> bool:
        """Return whether an audit has barred this checkpoint; thread-safe."""
        return is_barred(self._state.audit.bars, place.n, place.directory)

    def guard(self, confirm: Callable[[Callable[[], None]], None], lease_s: float) -> None:
        """Let what cannot be taken back wait for `confirm`, as TermGuard.confirm does."""
        self._held = HeldActions(confirm, self._do, self.ended)
        self._grants = LeaseGrants(lease_s, confirm)
        self._append([_entry_encoder.encode(inputs.TermBegan(read=count_entries(self._segments)))])

    def begin(self) -> None:
        """Accept connections and begin the term."""
        self._listen()
        self._beat()
        self._feed(
            inputs.BeginTerm(
                t_ns=self._now_ns(),
                run=self.job.run,
                term=self.job.term,
                journal=self.earlier,
                checkpoint=self._checkpoint,
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
        for name in self._peers:
            self._send(inputs.Send(agent=name, workers=(), body=body))

    def close(self) -> None:
        """Close timers, connections and the journal, in any state of the run."""
        self._closed = True  # ignore further inputs
        for timer in filter(None, (self._timer, self._pulse)):
            timer.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._table.close("the controller ends")
        for channel in [peer.channel for peer in self._peers.values()]:
            channel.close("the controller ends")
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
            self._look_up()
        return self._inputs[0].t_ns if self._inputs else self._record.now_ns()

    def _turn(self) -> None:
        batch, self._inputs = self._inputs, []
        if self._closed or self.ended.done():
            return
        try:
            entries: list[bytes] = []  # made durable before the next action of another kind
            for action in apply_all(self._state, batch):
                if isinstance(action, inputs.AppendJournal):
                    entries.append(_entry_encoder.encode(action.entry))
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
            self._grants.answer(action.agent, partial(self._send, action), self._leased_agents())
        else:
            self._held.do(action)

    def _leased_agents(self) -> list[str]:
        agents = self._state.members.agents if self._state.mode != "awaiting" else {}  # some away
        return [agent.name for agent in agents.values() if not agent.lapsed]

    def _do(self, action: inputs.Action) -> None:
        if self._closed:
            return
        if isinstance(action, inputs.Send):
            self._send(action)
        elif isinstance(action, inputs.Emit):
            self._record.emit(action.event)
        elif isinstance(action, inputs.Wake):
            self._arm(action.t_ns)
        elif isinstance(action, inputs.Verify):
            search(
                self._origins, self._loop, lambda result: self._found(action, result), action.bars
            )
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

    def _append(self, entries: list[bytes]) -> None:
        """Make entries durable, and empty the list."""
        try:
            if entries:
                self._journal.append_all(entries)
                entries.clear()
                if self._held:
                    self._held.appended()
        except OSError as error:
            raise RunDirError(
                f"the journal in {self._journal_dir} cannot be written ({error.strerror}): no"
                " decision can be made durable, so none is taken; everything decided before is"
                " kept; make room and start again with the same --run-dir"
            ) from error

    def _send(self, action: inputs.Send) -> None:
        peer = self._peers.get(action.agent)
        if peer is None:
            return  # the agent is disconnected: the controller waits for its lease to end
        seq = self._seqs[action.agent] = self._seqs.get(action.agent, 0) + 1
        peer.channel.send(
            messages.MessageEnvelope(
                run=self.job.run,
                term=self.job.term,
                agent=action.agent,
                incarnation=peer.incarnation,
                to=action.workers,
                seq=seq,
                body=action.body,
            )
        )

    # --- time -----------------------------------------------------------------------------

    def _arm(self, due_ns: int) -> None:
        if self._timer:
            self._timer.cancel()
        delay_s = max(0.0, (due_ns - self._record.now_ns()) / 1e9)
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._look_up()
        self._feed(inputs.Tick(t_ns=self._record.now_ns()))  # not before the time it was set for

    def _beat(self) -> None:
        """Run periodically, to distinguish a stall of this process from missing frames."""
        self._look_up()
        self._pulse = self._loop.call_later(BEAT_S, self._beat)

    def _look_up(self) -> None:
        """Report a stall of this launcher to the controller, before any other input."""
        now_ns = self._record.now_ns()
        gap_ns = now_ns - self._ran_ns if self._ran_ns else 0
        self._ran_ns = now_ns
        if gap_ns > (BEAT_S + STILL_S) * 1e9:
            self._record.note(f"launcher stalled for {gap_ns / 1e9:.1f} s; deadlines extended")
            self._feed(inputs.LauncherStalled(t_ns=now_ns, gap_ns=gap_ns))

    # --- connections ----------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._pause()
                return  # or the peer closed the connection before accept
            self._welcome(sock, peer[0])

    def _pause(self) -> None:
        """Accept nothing for a while: this process has no free descriptor."""
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_S, self._listen)

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _welcome(self, sock: socket.socket, address: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(
            sock,
            self._token,
            lambda frame: self._on_frame(channel, frame),
            lambda reason: self._on_closed(channel, reason),
            stranger=True,
        )
        self._strangers[channel] = stranger = Stranger(address, channel.close)
        self._table.add(stranger)

    def _on_frame(self, channel: Channel, frame: messages.MessageEnvelope) -> None:
        if frame.run != self.job.run:
            channel.close(f"it speaks of run {frame.run}, this is {self.job.run}")
            return
        if channel in self._strangers:
            self._table.admit(self._strangers.pop(channel))
            old = self._peers.get(frame.agent)
            self._peers[frame.agent] = ControllerPeer(channel, frame.incarnation)
            if old:
                old.channel.close(f"agent {frame.agent} came back on another connection")
        elif isinstance(frame.body, messages.AgentHello):
            self._peers[frame.agent] = ControllerPeer(channel, frame.incarnation)
            self._seqs[frame.agent] = 0  # a new incarnation starts at 0
        if self._grants:
            self._grants.received(frame.agent, frame.body)
        if isinstance(frame.body, messages.StopRequest):
            self.on_stop(f"{frame.body.reason} on {frame.agent}")
            return
        if isinstance(frame.body, messages.Renew):
            self._record.display.beats(frame.body.beats)
        elif isinstance(frame.body, messages.Checkpointed) and frame.body.tier == "disk":
            self._committed()
        self._feed(inputs.Received(t_ns=self._now_ns(), envelope=frame))

    def _on_closed(self, channel: Channel, reason: str) -> None:
        if stranger := self._strangers.pop(channel, None):
            if not self._closed:
                self._table.refuse(stranger, reason)
            return
        for agent, peer in list(self._peers.items()):
            if peer.channel is channel:
                del self._peers[agent]
                self._feed(
                    inputs.AgentLost(t_ns=self._now_ns(), agent=agent, incarnation=peer.incarnation)
                )
