"""Methods by which the parts of a worker reach each other.

| port | defined in | used by |
|---|---|---|
| `RecoveryOwner` | `phases/worker_recovery.py` | `WorkerRecovery` |
| `FaultTarget` | `injected_faults.py` | `InjectedFaults` |
| `AuditOwner` | `auditor.py` | `Auditor` |
| `CheckpointOwner` | `worker_checkpointing.py` | `RunCheckpointer` |

The parts are built one after the other and refer to each other, so each gets the worker as its port
and finds the other parts there when it calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.state_content import StateContent
from outlast.controller.fault_spec import FaultSpec, Where
from outlast.errors import CorruptionError, MismatchError, PhaseError, StorageError
from outlast.events import AnyEvent, Fault, FaultKind
from outlast.transport import messages
from outlast.transport.worker_page import Page
from outlast.worker.auditor import Auditor
from outlast.worker.batch_loop import BatchLoop
from outlast.worker.controller_link import ControllerLink, StandaloneControl
from outlast.worker.copied_shards import CopiedShards
from outlast.worker.groups import GroupRegistry, prove_groups, warn_if_untried
from outlast.worker.injected_faults import InjectedFaults
from outlast.worker.phases.absent_parts import AbsentParts
from outlast.worker.phases.phase_runner import PhaseRunner
from outlast.worker.phases.worker_recovery import Ticket, WorkerRecovery, partners_of
from outlast.worker.script.value_fingerprints import identities
from outlast.worker.sentinels.memory_sentinel import MemorySentinel
from outlast.worker.sentinels.neighbour_replay import NeighbourReplay
from outlast.worker.sentinels.nonfinite_exceptions import NonFiniteExceptions
from outlast.worker.state import bit_flips
from outlast.worker.state.audited_state import replica_set
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import PresenceReport, WorkerStatus

STUCK_S = 2.0
_NO_COPY = (CorruptionError, MismatchError, StorageError)


class WorkerPorts:
    """The ports of a worker process, which has these parts."""

    auditor: Auditor
    copies: CopiedShards
    faults: InjectedFaults
    groups: GroupRegistry
    recovery: WorkerRecovery
    absent_parts: AbsentParts
    link: ControllerLink | StandaloneControl
    status: WorkerStatus
    phases: PhaseRunner
    loop: BatchLoop
    timeline: WorkerEvents
    page: Page
    pid: int  # not that of the children that the script forks
    seat: int
    world: int
    local_rank: int
    device: torch.device

    def send(self, body: messages.WorkerBody) -> None:
        """Send a message to the controller. Raises WireError."""
        self.link.send(body)

    def try_send(self, body: messages.WorkerBody) -> None:
        """Send a message to the controller; drop it if the agent is lost."""
        self.link.try_send(body)

    def reach(self, where: Where) -> None:
        """Fire injected faults that are due at `where`."""
        self.faults.reach(where)

    def now_ns(self) -> int:
        """Return the time of the run's clock."""
        return self.timeline.now_ns()

    def note(self, text: str, *, warning: bool = True) -> None:
        """Add a note for the user to the run's events; only warnings are displayed."""
        self.timeline.note(text, warning=warning)

    def record(self, event: AnyEvent) -> None:
        """Add an event to the run's events."""
        self.timeline.emit(event)

    def report_trouble(self, error: BaseException) -> None:
        """Report a transport error, which ends this generation."""
        self.status.report_fault(self.fault("transport", str(error)[:2000]))

    def protected_state(self) -> ProtectedState:
        """Return the protected state. Raises PhaseError if there is none yet."""
        if self.phases.protected is None:
            raise PhaseError("session.protect(...) must come before the first phase")
        return self.phases.protected

    def watch(self, protected: ProtectedState) -> None:
        """Watch the protected state for injected faults, and for sentinels."""
        self.faults.watch_state(protected, lambda: self.loop.pending)
        self.phases.nonfinite.watch(protected, self.device)

    def report_schema(self, protected: ProtectedState) -> None:
        """Report a digest of the state's schema, and of the shards that this rank holds."""
        digest, summary = protected.schema()
        shards = replica_set(protected)
        stages = protected.pipeline.indices
        self.link.send(
            messages.StateProtected(schema=digest, summary=summary, shards=shards, stages=stages)
        )

    def replicated(self) -> Any:
        """Return the state for a joiner."""
        return self.protected_state().replicated()

    def copied(self, place: SavePoint, content: StateContent) -> None:
        """Record a copy of this rank's part."""
        self.copies.record(place, content)

    def rebuild(self, copy: messages.Checkpointed) -> tuple[Any, Ticket]:
        """Return this rank's lost state from a copy; wait for a replacement if it is not there."""
        walk = self.phases.joining.walk
        try:
            return self.copies.read(copy, walk.slot.copied if walk is not None else "")
        except _NO_COPY as error:
            self.phases.await_replacement(error, "broken", "unknown")

    def take_back(self, copy: messages.Checkpointed | None) -> None:
        """Put this rank back before its last step; wait for a replacement if that fails."""
        try:
            self.phases.step_redo.take_back(copy)
        except Exception as error:  # noqa: BLE001 - whatever it is, the state is half put back
            self.phases.await_replacement(error, "broken", "unknown")

    def compare(self, copy: messages.Checkpointed) -> None:
        """Compare this rank's shards with a copy; wait for a replacement if they differ."""
        try:
            self.copies.compare(copy)
        except _NO_COPY as error:
            self.phases.await_replacement(error, "broken", "unknown")

    def adopt(self, state: Any) -> None:
        """Take over a donor's state."""
        self.protected_state().adopt(state)

    def connect_partners(self, body: messages.Connect) -> None:
        """Exchange this rank's own state with its partners on other hosts, and take over the parts
        of absent ranks in saves. Raises GroupError."""
        self.absent_parts.learn(body)
        self.phases.nonfinite.connected([joiner for _, joiner in body.transfers])
        self.phases.slots.connect_partners(body.generation, partners_of(self.seat, body))

    def generation_opened(self, step: int) -> None:
        """Restore DDP's buckets, which a new generation has changed, and follow a change of the
        ranks that are present."""
        self.phases.slots.partners.opened()
        self.loop.follow_ranks(step)
        if self.phases.protected is not None:
            self.phases.protected.reducers.restore()
            if self.presence_report().is_first:
                self._note_bounded_schedules(self.phases.protected.schedules)

    def _note_bounded_schedules(self, schedules: Mapping[str, Any]) -> None:
        for name, schedule in schedules.items():
            if isinstance(total := getattr(schedule, "total_steps", None), int):
                self.timeline.note_once(
                    f"while ranks are absent an epoch has more steps: {name!r} raises beyond its"
                    f" total_steps={total}, and the job would then roll back; end the loop with"
                    " until=STEPS, or give it more"
                )

    def presence_report(self) -> PresenceReport:
        """Return what the controller needs to know before ranks leave or come back."""
        presence = self.groups.presence
        is_first = bool(presence.absent) and self.seat in presence.first_unit()
        use = presence.use(self.loop.ranks.sampler)
        needs, calls = self.loop.ranks.needs, presence.needs()
        return PresenceReport(needs, calls, use, presence.tables(), is_first)

    def hook_phases(self, replay_every: int) -> None:
        """Let phases call the parts that act before their votes, in disputes and at their ends."""
        runner, auditor = self.phases, self.auditor
        runner.replays.configure(replay_every, auditor.report_contributions)
        runner.before_vote, runner.on_dispute = auditor.before_vote, auditor.dispute
        runner.nonfinite.share = auditor.equal_gradients
        runner.on_complete = self._phase_completed

    def _phase_completed(self, kind: str) -> None:
        """Report digests that are due, and groups that no phase has used before."""
        self.auditor.completed(kind)
        presence = self.groups.presence
        if presence.has_news:
            presence.has_news = False
            use = presence.use(self.loop.ranks.sampler)
            if not use.is_plain(self.seat, self.world):
                self.send(messages.GroupsUsed(use=use))

    def refuses_save(self) -> bool:
        """Return whether no checkpoint is made, since nobody can write the parts of absent ranks;
        the first rank that is present reports that."""
        missing, status = self.absent_parts.without_deputy(), self.status
        if missing and self.absent_parts.is_first:
            ranks = ", ".join(map(str, missing))
            text = f"rank {ranks} is absent, and no other rank can write its part of a checkpoint"
            self.send(messages.SaveFailed(n=status.n, step=status.step, error=text))
        return bool(missing)

    def rehearsed(self) -> set[str]:
        """Return the keys of the functions that this worker has rehearsed."""
        return self.phases.joining.rehearsed_here

    @property
    def replays(self) -> NeighbourReplay:
        """Replays on other ranks."""
        return self.phases.replays

    @property
    def exceptions(self) -> NonFiniteExceptions:
        """Exceptions of the script behind numbers that are not finite."""
        return self.phases.nonfinite.exceptions

    @property
    def memory(self) -> MemorySentinel:
        """Sentinel of allocations."""
        return self.phases.memory

    def learn_rehearsed(self, keys: Iterable[str]) -> None:
        """Record the functions that another rank has rehearsed."""
        self.phases.joining.rehearsed_elsewhere.update(keys)

    def progress(self) -> tuple[int, int]:
        """Return the complete phases and steps of this worker."""
        return self.status.n, self.status.step

    def is_real(self) -> bool:
        """Return whether this is neither a dry run nor a rehearsal."""
        return self.phases.is_real

    def trust_torch(self) -> None:
        """Warn once per job of an untested torch; test its groups once per host."""
        if self.seat == 0:
            warn_if_untried(torch.__version__)
        if self.local_rank == 0 and self.world > 1:
            prove_groups()

    def is_in_phase(self) -> bool:
        """Return whether a phase is under way."""
        return self.phases.attempt is not None

    def cut_connections(self) -> None:
        """Cut the connections to all other ranks."""
        self.groups.cut()

    def slow_down(self, factor: float) -> None:
        """Make this rank's own part of the step under way `factor` times as long."""
        self.groups.times.delay(factor)

    def flip_bit(self, spec: FaultSpec) -> None:
        """Flip one bit of the first replicated tensor whose name matches, or of its gradient."""
        bit_flips.flip(self.protected_state(), spec)

    def publish(self, body: messages.Put | messages.Meet) -> None:
        """Publish a rendezvous value."""
        self.link.send(body)

    def look_for_stuck(self, generation: int) -> None:
        """Report this worker as lost if a collective of a closed generation has not ended."""
        if stuck := self.groups.stuck(generation):
            self.status.report_loss(
                "broken",
                self.fault(
                    "transport",
                    f"{stuck} collective(s) of generation {generation} did not end within"
                    f" {STUCK_S:.0f} s after their connections were cut: this process waits in"
                    " gloo and cannot be put back",
                ),
            )

    def collective_started(self, _name: str) -> None:
        """Record a collective of the script; may raise StepRefused."""
        self.status.collective()

    def identities(self) -> set[int]:
        """Return the identities of all protected objects."""
        return identities(self.protected_state())

    def fault(self, kind: FaultKind, detail: str, trace: str = "") -> Fault:
        """Return a fault of this worker, at its place and time."""
        return self.status.fault(kind, detail, trace, self.recovery.seat, self.timeline.now_ns())
