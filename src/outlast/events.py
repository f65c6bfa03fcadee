"""Typed events of a run, the vocabulary of all planes.

Times are Unix nanoseconds (`t_ns`) of one clock a process that never goes backwards. `n` counts
completed phases since the job began, `step` committed steps (batches)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from outlast.faults import RECORDED as RECORDED
from outlast.faults import REQUESTS as REQUESTS
from outlast.faults import SENTINELS as SENTINELS
from outlast.faults import Fault as Fault
from outlast.faults import FaultKind as FaultKind

PhaseKind = Literal[
    "step",  # a batch, and an optimizer that steps
    "eval",  # `session.run` without a batch: nothing is trained
    "checkpoint",  # ours: a checkpoint is written
    "epoch",  # ours: the ranks agree on an epoch's length
    "draw",  # ours: the ranks agree that each has a batch
]


REHEARSAL = "rehearsal"  # the reason of attempts that are refused on purpose, before the first step


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all events."""

    t_ns: int


class RunStarted(Event, frozen=True):
    """A launcher acquired the run directory. `resumed_n` is -1 for a fresh job."""

    run: str
    term: int
    world: int
    spares: int
    script: str
    args: tuple[str, ...]
    resumed_n: int = -1
    resumed_step: int = -1
    policy: str = ""  # name and digest of the recovery policy


class WorkerSpawned(Event, frozen=True):
    """A launcher started a worker process."""

    worker: str
    seat: int  # -1: a spare
    pid: int
    host: str


class WorkerWarm(Event, frozen=True):
    """The worker waits inside `init()`: imports done, no seat yet (spares) or seat known."""

    worker: str


class WorkerSeated(Event, frozen=True):
    """A worker received a seat for a generation."""

    worker: str
    seat: int
    generation: int


class WorkerLost(Event, frozen=True):
    """A worker was lost by a fault; its seat needs another one."""

    worker: str
    seat: int
    fault: Fault


class Noticed(Event, frozen=True):
    """An incident begins. `how`: pidfd, peer, heartbeat, lease, report, check, notice."""

    incident: int
    generation: int
    how: str
    fault: Fault


class GenerationClosed(Event, frozen=True):
    """A generation ended with an incident; its collectives fail from here on."""

    incident: int
    generation: int


class Reported(Event, frozen=True):
    """A worker's answer to Close."""

    incident: int
    generation: int
    worker: str
    seat: int
    n: int
    state: str


class Decided(Event, frozen=True):
    """The controller's decision, with its reason in one sentence."""

    incident: int
    generation: int
    verdict: str  # commit | redo
    rung: str  # retry | migrate | replace | restart | stop | ...
    n: int
    step: int
    replaced: tuple[tuple[int, str, str], ...]  # (seat, old worker, new worker)
    reason: str
    absent: tuple[int, ...] = ()  # seats without a worker, while the others go on
    rule: str = ""  # of the policy, as in "policy exact, killed, rung 3 of 8"


class JoinerReady(Event, frozen=True):
    """A joiner has built its model; its dry steps follow."""

    incident: int
    worker: str
    seat: int


class Connected(Event, frozen=True):
    """All groups of the generation are built."""

    incident: int
    generation: int


class Transferred(Event, frozen=True):
    """A donor sent its state to a joiner; `seconds` and `size_bytes` of the transfer."""

    incident: int
    generation: int
    donor: int
    joiner: int
    size_bytes: int
    seconds: float
    digest: str


class GenerationOpened(Event, frozen=True):
    """A generation opened; training continues at phase `n`."""

    incident: int  # 0: the first one
    generation: int
    n: int


class PhaseDone(Event, frozen=True, omit_defaults=True):
    """One phase committed on one seat. All times are those of that worker: `t_begin_ns` is where
    the attempt that counted began, `t_vote_ns` the vote's answer, `t_ns` the return.

    `steps`: 1, in simulated runs steps of equal length. Refused attempts have own events."""

    worker: str
    seat: int
    generation: int
    n: int
    step: int
    kind: str  # a PhaseKind
    t_begin_ns: int
    t_vote_ns: int
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1


class AttemptRefused(Event, frozen=True):
    """One attempt at a phase was discarded on one seat, between `t_begin_ns` and `t_ns`."""

    worker: str
    seat: int
    generation: int
    n: int
    step: int
    kind: str
    t_begin_ns: int
    reason: str


class DrySteps(Event, frozen=True):
    """A joiner ran a phase's function alone, to build the same objects as the other ranks."""

    worker: str
    seat: int
    key: str
    t_begin_ns: int


class LoopBegun(Event, frozen=True):
    """A seat's worker entered the training loop; a bound is None where the script sets none."""

    worker: str
    seat: int
    until: int | None  # committed steps
    epochs: int | None
    length: int | None  # batches an epoch and rank, where the loader has a length

    @property
    def steps(self) -> int | None:
        """Committed steps at the loop's end, where that is known."""
        of_epochs = None
        if self.epochs is not None and self.length is not None:
            of_epochs = self.epochs * self.length
        known = [steps for steps in (self.until, of_epochs) if steps is not None]
        whole = self.epochs is None or of_epochs is not None  # else epochs may end it earlier
        return min(known) if known and whole else None


class Metrics(Event, frozen=True):
    """Metrics that the script reported for a committed step on one seat."""

    worker: str
    seat: int
    step: int
    values: dict[str, float]


class Note(Event, frozen=True):
    """A message for the owner: a large position, a lost result, a slow replay."""

    worker: str
    seat: int
    text: str
    level: Literal["info", "warning"] = "warning"


class MemoryCopied(Event, frozen=True):
    """Each rank's keeper holds its part of a version; ranks waited `seconds` (0: unknown)."""

    n: int
    step: int
    seconds: float


class PeersCopied(Event, frozen=True, omit_defaults=True):
    """Other keepers hold the seat's part of a version: `copies` of it, or of `strips` of parity.

    `seconds`: from the order to the last keeper's answer, of which t_ns is the receipt."""

    seat: int
    n: int
    step: int
    copies: int
    size_bytes: int
    seconds: float
    strips: int = 0
    error: str = ""  # of keepers that do not hold it

    @property
    def is_whole(self) -> bool:
        """Return whether the part survives the loss of its own keeper."""
        return self.copies >= max(1, self.strips)


class CheckpointSaved(Event, frozen=True):
    """A checkpoint is complete and durable."""

    n: int
    step: int
    path: str
    size_bytes: int
    seconds: float


class CheckpointFailed(Event, frozen=True):
    """A checkpoint could not be written; earlier ones are intact."""

    n: int
    step: int
    path: str
    error: str


class Drained(Event, frozen=True):
    """A checkpoint is complete in durable storage: each byte was read back there."""

    n: int
    step: int
    where: str
    size_bytes: int
    seconds: float


class DrainFailed(Event, frozen=True):
    """Durable storage could not be brought up to date; the upload is retried."""

    where: str
    error: str


class Scheduled(Event, frozen=True):
    """A new save schedule, and its reasons as lines of text. Intervals are committed steps between
    copies in memory and between checkpoints on disk (0: none)."""

    memory: int
    disk: int
    why: str


class Warned(Event, frozen=True, omit_defaults=True):
    """Finding of a node check or a sentinel, or a notice; with severity "healthy", its end."""

    host: str
    check: str
    symptom: str  # a records.Symptom
    severity: str  # a records.Severity
    code: str  # XID 79; "" where it has none
    device: str
    detail: str
    worker: str = ""  # that has the device; "": none or unknown
    within_s: float = 0.0  # of a notice: from t_ns to its deadline; 0: none
    lost_s: float = 0.0  # of a straggler: how long all ranks have waited for it so far

    @property
    def finding(self) -> str:
        """One line on the faulty part: `gpu: XID 79 on GPU 2`."""
        where = f" on {self.device}" if self.device else ""
        return f"{self.check}: {self.code or self.symptom}{where}"


class NodeReleased(Event, frozen=True):
    """A node has left the run for maintenance: it has no workers, and its launcher ends."""

    host: str


class BatchSkipped(Event, frozen=True):
    """All ranks left out the optimizer's step of a batch, the `row`-th in a row (--nan skip:K)."""

    worker: str
    seat: int
    step: int
    row: int
    detail: str


class ReplicasCompared(Event, frozen=True, omit_defaults=True):
    """Audit of phase n: `ranks` ranks are equal, except for the `minority`. `decides`: the
    `majority` is right, else the largest group. `since_step`: votes have compared the rest."""

    generation: int
    n: int
    step: int
    ranks: int
    part: int = 0
    parts: int = 1
    minority: tuple[int, ...] = ()
    majority: tuple[int, ...] = ()
    decides: bool = True
    tensors: tuple[str, ...] = ()
    since_step: int = -1


class FaultInjected(Event, frozen=True):
    """A `--fault` was injected."""

    worker: str
    seat: int
    spec: str
    n: int
    step: int


class ScriptUnmanaged(Event, frozen=True):
    """A worker ended, or the run was stopped, before any worker had called `outlast.init()`.

    From here on the ranks are restarted together, as under torchrun; no steps are known.
    """


class RunEnded(Event, frozen=True):
    """The last event of a launcher. `outcome`: done | user_error | gave_up | interrupted."""

    outcome: str
    exit_code: int
    n: int
    step: int
    cause: Fault | None = None


AnyEvent = (
    RunStarted | WorkerSpawned | WorkerWarm | WorkerSeated | WorkerLost | Noticed
    | GenerationClosed | Reported | Decided | JoinerReady | Connected | Transferred
    | GenerationOpened | PhaseDone | AttemptRefused | LoopBegun | DrySteps | Metrics | Note
    | MemoryCopied | PeersCopied | CheckpointSaved | CheckpointFailed | Drained | DrainFailed
    | Scheduled | Warned
    | NodeReleased | BatchSkipped | ReplicasCompared | FaultInjected | ScriptUnmanaged | RunEnded
)  # fmt: skip

encoder = msgspec.msgpack.Encoder()
decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
