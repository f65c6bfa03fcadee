"""Inputs and actions of the controller, and entries of its journal."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from outlast import events
from outlast.controller.audit.audit_records import CopyBar, CorruptionStrike
from outlast.transport import messages


class Succession(NamedTuple):
    """Takeover: hosts of the new and of the former controller, and when that one last answered."""

    host: str
    before: str
    silent_ns: int


class BeginTerm(msgspec.Struct, frozen=True, kw_only=True):
    """Start of the controller. `journal`: entries of earlier terms of this job, oldest first."""

    t_ns: int
    run: str
    term: int
    journal: tuple[JournalEntry, ...] = ()
    checkpoint: messages.Checkpointed | None = None  # the newest complete one, if any
    succession: Succession | None = None  # of a takeover; None: the job is started


class Received(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A frame arrived: authenticated, of this run; term, incarnation and order are checked here."""

    t_ns: int
    envelope: messages.MessageEnvelope


class AgentLost(msgspec.Struct, frozen=True, kw_only=True):
    """Broken connection to an agent. Its workers count as lost only when its lease expires."""

    t_ns: int
    agent: str
    incarnation: int


class StopRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user or the scheduler to end the run so that it can be resumed."""

    t_ns: int
    reason: str


class SaveRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user or a script for a checkpoint at once; the run continues."""

    t_ns: int
    reason: str


class SchedulerChecked(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of the scheduler about hosts of the run, all of them: nodes that are to drain."""

    t_ns: int
    check: str
    found: tuple[events.Warned, ...]


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Expiry of the timer that Wake set."""

    t_ns: int


class LauncherStalled(msgspec.Struct, frozen=True, kw_only=True):
    """Stall of the controller for `gap_ns` until now (stopped, suspended, a blocked write): all
    deadlines are extended. Precedes the inputs that were missed meanwhile."""

    t_ns: int
    gap_ns: int


class CheckpointFound(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to Verify: the newest checkpoint without damage."""

    t_ns: int
    generation: int  # as in Verify
    checkpoint: messages.Checkpointed | None


Input = (
    BeginTerm
    | Received
    | AgentLost
    | StopRequested
    | SaveRequested
    | SchedulerChecked
    | Tick
    | LauncherStalled
    | CheckpointFound
)


class Send(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message to an agent; with `workers`, to be passed on to them."""

    agent: str
    workers: tuple[str, ...]
    body: messages.AnyBody


class AppendJournal(msgspec.Struct, frozen=True, kw_only=True):
    """Make `entry` durable before any later action of this list is carried out."""

    entry: JournalEntry


class Emit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Write an event of the run."""

    event: events.AnyEvent


class Wake(msgspec.Struct, frozen=True, kw_only=True):
    """Send a Tick at `t_ns` (replaces the earlier Wake)."""

    t_ns: int


class Verify(msgspec.Struct, frozen=True, kw_only=True):
    """Request to read checkpoints, newest first, and answer with the first whole one in
    CheckpointFound. No checkpoint is written meanwhile."""

    generation: int  # the newest: it has ended, or was not announced to any worker
    bars: tuple[CopyBar, ...] = ()  # copies that must be passed over
    from_disk: bool = False  # copies in memory are passed over


class EndRun(msgspec.Struct, frozen=True, kw_only=True):
    """End of the run. `outcome`: done | user_error | gave_up | interrupted."""

    outcome: str
    exit_code: int
    cause: events.Fault | None = None
    decision: str = ""  # rung and reason, where no journal has them
    n: int = 0  # phases that the run is known to have completed
    step: int = 0


Action = Send | AppendJournal | Emit | Wake | Verify | EndRun


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of journal entries, which a later term restores."""


class TermBegan(JournalEntry, frozen=True):
    """First entry of a term's segment: how many entries of each lower term it has read.
    `takes_over`: from a controller that may have failed; else the job was started again."""

    read: dict[int, int] = {}
    takes_over: bool = False


class DecisionMade(JournalEntry, frozen=True):
    """Decision, durable before generation `generation` is announced. `verdict`: commit, redo, or
    start (all ranks start, from a checkpoint if n > 0)."""

    generation: int
    n: int
    step: int
    verdict: str
    seats: tuple[str, ...]
    slots: dict[int, dict[str, bytes]] = {}  # seat -> slots of its lost worker
    agents: tuple[str, ...] = ()  # agent by seat: each must report before a later term decides
    joining: tuple[int, ...] = ()  # seats whose worker holds no state until Opened
    incident: int = 0
    copy: messages.Checkpointed | None = None  # from which shards without a replica are rebuilt
    absent: tuple[int, ...] = ()  # seats without a worker, while the others go on
    units: tuple[tuple[int, ...], ...] = ()  # of ranks that leave together; (): each is one


class Opened(JournalEntry, frozen=True):
    """Phases may run. `transfers`: (donor, joiner) by rank, whose state has arrived. `joined`:
    (rank, worker, agent) of those that have taken seats since the decision."""

    generation: int
    n: int
    transfers: tuple[tuple[int, int], ...] = ()
    joined: tuple[tuple[int, str, str], ...] = ()


class DrainRequested(JournalEntry, frozen=True):
    """The run drains at a request: a term that takes over goes on with that."""

    reason: str


class EndDecided(JournalEntry, frozen=True):
    """The run ends with this outcome: a term that takes over ends it."""

    outcome: str
    n: int
    step: int
    cause: events.Fault | None = None


class SharedValueStored(JournalEntry, frozen=True, tag="SharedKept"):
    """Journal entry: a shared value was made."""

    name: str
    value: bytes


class RecordStored(JournalEntry, frozen=True, tag="RecordKept"):
    """Results of a seat's set-up collectives, for joiners of later terms. `calls`: of Recorded, if
    they are more than those before."""

    seat: int
    record: bytes
    calls: bytes = b""


class ShardsHeld(JournalEntry, frozen=True):
    """The shards of the protected state that a rank holds; equal on replicas."""

    seat: int
    shards: bytes


class GroupsNoted(JournalEntry, frozen=True):
    """The groups that a rank's phases have used."""

    seat: int
    use: messages.GroupUse


class NodeJoined(JournalEntry, frozen=True):
    """A node has joined the run later: a later term knows that it may have workers."""

    agent: str
    domain: str


class FindingKey(NamedTuple):
    """Identity of a finding: check, symptom and device. A repeated finding has the same one."""

    host: str
    check: str
    symptom: str
    code: str
    device: str


class RankMigrated(JournalEntry, frozen=True, tag="Moved"):
    """Move for a finding, durable before its worker is given up: a later term must not repeat it,
    and counts it as a move of the hour."""

    worker: str
    finding: FindingKey
    t_ns: int


class FailedWorker(NamedTuple):
    """A worker that its own failure has ended. `failure`: the type of the exception, the exit code,
    the signal, or the kind of the fault."""

    failure: str
    seat: int
    worker: str
    t_ns: int


class RungTaken(JournalEntry, frozen=True):
    """Rung that a decision took for a class of failure, the rule of the policy, and the worker that
    its own failure has ended: a later term counts all in the budgets of the hour."""

    rung: str
    rule: str
    t_ns: int
    incident: int = 0
    failure: str = ""
    failed: FailedWorker | None = None


class AuditAgreedEntry(JournalEntry, frozen=True, tag="Agreed"):
    """Agreement of replicas on all of their state after phase n."""

    n: int
    step: int


class CopiesBarred(JournalEntry, frozen=True, tag="Barred"):
    """Bar on copies beyond phase `after_n` up to `generation`, since replicas differed."""

    after_n: int
    generation: int


class CorruptionFound(JournalEntry, frozen=True, tag="Corrupted"):
    """Wrong bits on a rank: a later term tells by it whether they come again on its device."""

    strike: CorruptionStrike


AnyEntry = (
    TermBegan
    | DecisionMade
    | Opened
    | DrainRequested
    | EndDecided
    | SharedValueStored
    | RecordStored
    | ShardsHeld
    | GroupsNoted
    | NodeJoined
    | RankMigrated
    | RungTaken
    | AuditAgreedEntry
    | CopiesBarred
    | CorruptionFound
)
