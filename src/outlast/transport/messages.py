"""Messages between workers, agents and the controller.

`channel` sends them as frames; `docs/protocol.md` lists senders, receivers and order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.events import Fault, Warned
from outlast.transport.agent_messages import RELEASED as RELEASED
from outlast.transport.agent_messages import (
    AgentHello,
    PartnerSlots,
    PartnerSlotsRequest,
    Renew,
    Renewed,
    RunOutcome,
    StopRequest,
)
from outlast.transport.group_messages import GroupsUsed as GroupsUsed
from outlast.transport.group_messages import GroupUse as GroupUse
from outlast.transport.hang_messages import HangFound, RanksObserved, Suspect, Trace, Traced
from outlast.transport.message_base import Body
from outlast.transport.rendezvous_messages import HostMeets, Meet, Met, Put, RendezvousValue
from outlast.transport.rendezvous_messages import MeetEntry as MeetEntry


class WorkerHello(Body, frozen=True, tag="Hello"):
    """Report of a worker that has reached `outlast.init()`; a spare now waits for a seat."""

    pid: int
    fingerprint: dict[str, str]
    address: str  # host:port of this worker's gloo listener
    devices: int = 0  # visible GPUs
    hot: bool = False  # its script promises to keep no rank: it may be prepared without a seat


class StateProtected(Body, frozen=True, tag="Protected"):
    """Digest of the protected state's schema, which must be equal on all ranks of a pipeline's
    `stages` (() without one). `shards`: this rank's part of it, equal on its replicas."""

    schema: str
    summary: str
    shards: bytes = b""
    stages: tuple[int, ...] = ()


class Recorded(Body, frozen=True):
    """Results of this seat's set-up collectives in generation 1, for later joiners (opaque)."""

    seat: int
    record: bytes
    calls: bytes = b""  # functions that step, and their arguments, for hot spares (opaque)


class Status(Body, frozen=True):
    """Answer to Close, or the first report of a failure (then `fault` is set).

    `n` is the number of phases that this worker has completed or is completing. `state`:
    idle      between phases, or its state is restored: before phase n+1
    running   in an attempt at phase n+1, has not voted and no longer can
    prepared  voted yes on phase n+1, received no answer, nothing changed
    applying  phase n is committed, and this worker is completing it
    torn      phase n+1 is committed, but this worker failed while applying it
    broken    its state cannot be restored; the worker must be replaced
    finished  the script has left its loop; no phase follows
    joining   a joiner whose state has not been swapped in: never a donor

    `result`: phase n's return value on this rank, if small; equal ones replace a lost worker's.
    `copy`: newest in memory. `redoable`: phase n can be taken back; `copy` is the state before it.
    `unreachable`: addresses of hosts that have not answered this worker in time. `needs`: why no
    rank may leave. `calls`: collectives of phases that need all members of their groups, `use`.
    `tables`: lines of the script with small sums, and whether each element has always come from one
    rank. `slots`: own state of ranks of the first unit while others are absent, since these may
    come back to their places in the script.
    """

    generation: int
    n: int
    step: int
    state: str
    fault: Fault | None = None
    result: bytes = b""
    shared: bool = False  # the result is equal on all ranks by construction (internal phases)
    copy: Checkpointed | None = None
    redoable: bool = False
    unreachable: tuple[str, ...] = ()
    needs: str = ""
    calls: str = ""
    use: GroupUse = GroupUse()
    tables: dict[str, bool] = msgspec.field(default_factory=dict)
    slots: dict[str, bytes] = msgspec.field(default_factory=dict)


class WorkerReady(Body, frozen=True, tag="Ready"):
    """Report of a worker before phase n+1 that can connect: a survivor has restored or applied its
    state, a joiner has built its model. Generation 0: a spare is hot, for the ranks of `fits`."""

    generation: int
    n: int
    fits: tuple[int, ...] = ()  # (): all ranks


class Joined(Body, frozen=True):
    """Report of a worker whose groups of this generation are built and transfers are complete:
    `sent` and `received` map the other seat to (digest, bytes, seconds)."""

    generation: int
    sent: dict[int, tuple[str, int, float]] = msgspec.field(default_factory=dict)
    received: dict[int, tuple[str, int, float]] = msgspec.field(default_factory=dict)


class SharedValueRequest(Body, frozen=True, tag="SharedAsk"):
    """Request of `session.shared(name)`; the answer is SharedIs, or SharedMake for one rank."""

    name: str


class SharedValueMade(Body, frozen=True, tag="SharedMade"):
    """Shared value that a rank created on request."""

    name: str
    value: bytes


class Checkpointed(Body, frozen=True):
    """Report of a restorable copy (sent by rank 0, or its deputy). `tier`: "memory": each rank's
    keeper holds its part of the copy named `path`; "disk": that directory is complete and durable.
    """

    n: int
    step: int
    path: str
    tier: str = "disk"
    blocking_s: float = 0.0  # wait of training; 0: not measured (first-time preparations)
    flush_s: float = 0.0  # time from the copy until durable
    drag_s: float = 0.0  # total slowdown of the steps during the flush
    step_s: float = 0.0  # duration of a step without concurrent writes; 0: unknown


class SaveFailed(Body, frozen=True):
    """Report of a failed checkpoint (sent by rank 0, or its deputy); older ones are unaffected."""

    n: int
    step: int
    error: str


class SaveEvery(Body, frozen=True):
    """Request to seat 0 to propose these intervals at the next save (steps; 0: none)."""

    memory: int
    disk: int


class Finished(Body, frozen=True):
    """Report of an ended script; the worker runs until Stop and may still be a donor. `exit_code`:
    with which the script asked to end."""

    n: int
    step: int = 0
    exit_code: int = 0


class NoticeSignal(Body, frozen=True):
    """Report of a signal of --notice-signal that a worker has received; for its agent."""

    signal: int


class Audited(Body, frozen=True):
    """Digests, by kind, of the state that must be equal on all replicas after phase n.

    `replica_set`: equal on ranks that are replicas of each other. `part` of `parts`: 0 of 1 is all
    of the state, and its sender waits for AuditAgreed; 0 of 2 is what votes compare, 1 of 2 the
    rest. `again`: how often the vote on phase n+1 has shown a difference; its sender waits, too.
    """

    generation: int
    n: int
    step: int
    replica_set: bytes
    kinds: dict[str, bytes]
    part: int = 0
    parts: int = 1
    again: int = 0
    since_n: int = -1  # what votes compare was equal after this phase; -1: not all compared yet
    since_step: int = -1
    device: str = ""  # of this rank; "": none or unknown
    has_equal_gradients: bool = False  # votes have found all gradients equal before
    repeats: bool = False  # contributions differ, and did so when they were computed again


class AuditNamed(Body, frozen=True):
    """Answer to AuditAsk: kind -> name -> digest, of the audit of phase n."""

    generation: int
    n: int
    names: dict[str, dict[str, bytes]]


class Seat(Body, frozen=True):
    """Request to take a seat. `slots`: the seat's rank-specific states by "kind:n" (see
    worker_page.py), empty at a start. `record`: results of the seat's set-up collectives."""

    generation: int
    seat: int
    world: int
    n: int
    first: bool  # True: all workers start now; set-up collectives are real
    slots: dict[str, bytes] = msgspec.field(default_factory=dict)
    record: bytes = b""
    checkpoint: Checkpointed | None = None  # with first: load this before phase n+1
    local_rank: int = -1  # set by the agent: device to use; -1: unchanged


class Prepare(Body, frozen=True):
    """Request to a warm spare to run its script until that depends on the rank."""

    world: int
    record: bytes  # the same for all ranks that the spare may take
    calls: bytes  # of any rank
    stand_in: int = -1  # rank for which it builds device meshes; -1: it waits there for a seat


class Close(Body, frozen=True):
    """Request to sever the connections of an ended generation; the answer is Status."""

    generation: int
    reason: str


class Decide(Body, frozen=True):
    """Verdict on the last phase: workers that prepared phase n apply it (commit), workers that ran
    phase n+1 restore their state (redo), those that completed it take it back to `copy`, from which
    shards without a replica come. All are then before phase n+1."""

    generation: int  # the new one
    n: int
    verdict: str  # commit | redo
    copy: Checkpointed | None = None


class Connect(Body, frozen=True):
    """Request to build all groups of this generation, then transfer state: (donor, joiner seat).
    Seats of `rebuilt` read theirs from `copy`, and whole workers compare their own with it.
    Ranks of one of `partners` hold each other's own state; an agent gets the sets of its ranks.
    `absent` ranks have no worker: `units` of ranks that leave together; (): each is one. `deputies`
    (absent rank, deputy) save their parts, for which agents of deputies get `slots`, by absent
    rank: what it would come back with of its own."""

    generation: int
    n: int
    transfers: tuple[tuple[int, int], ...]
    timeout_s: float
    copy: Checkpointed | None = None
    rebuilt: tuple[int, ...] = ()
    partners: tuple[tuple[int, ...], ...] = ()
    absent: tuple[int, ...] = ()
    units: tuple[tuple[int, ...], ...] = ()
    deputies: tuple[tuple[int, int], ...] = ()
    slots: dict[int, dict[str, bytes]] = msgspec.field(default_factory=dict)


class Open(Body, frozen=True):
    """Request to swap in the state and run phase n+1: all joined with equal digests. With `ask`,
    all ranks first make a checkpoint; then the script continues ("save") or ends ("drain").
    `step`: committed steps at phase n."""

    generation: int
    n: int
    step: int = 0
    ask: Literal["", "save", "drain"] = ""


class Leave(Body, frozen=True):
    """Request to a worker of a planned move: answer Status before its next phase, in place of
    beginning it."""

    generation: int


class AuditRequest(Body, frozen=True, tag="AuditAsk"):
    """Request for AuditNamed: replicas differ in these kinds after phase n."""

    generation: int
    n: int
    kinds: tuple[str, ...]


class AuditAgreed(Body, frozen=True):
    """Report that all replicas are equal after phase n: the vote on the next phase may begin.

    `again`: as in Audited; of gradients alone they may differ once. `without`: kinds that differ by
    design, which votes leave out from here on.
    """

    generation: int
    n: int
    again: int = 0
    without: tuple[str, ...] = ()


class SharedValueMake(Body, frozen=True, tag="SharedMake"):
    """Request to create a shared value."""

    name: str


class SharedValueReply(Body, frozen=True, tag="SharedIs"):
    """Shared value, for all ranks."""

    name: str
    value: bytes


class Stop(Body, frozen=True):
    """Request to end now. `ok`: the run is done."""

    ok: bool
    reason: str


class Spawn(Body, frozen=True):
    """Request to start a worker."""

    worker: str
    seat: int  # -1: a spare
    joins: bool = False  # the job runs already


class Spawned(Body, frozen=True):
    """Report of a started worker."""

    worker: str
    pid: int


class Kill(Body, frozen=True):
    """Request to kill a worker."""

    worker: str
    reason: str


class WorkerLostReport(Body, frozen=True, tag="Lost"):
    """Report of a worker whose family is dead and reaped. `slots` as in Seat; `n`, `step`, `state`:
    the page's last heartbeat."""

    worker: str
    fault: Fault
    n: int
    state: str
    slots: dict[str, bytes] = msgspec.field(default_factory=dict)
    step: int = 0


class NodeChecked(Body, frozen=True, tag="Checked"):
    """Unhealthy findings of the agent's newest node check, all of them, with the device's worker.
    `completed`: checks that ran to completion; their earlier findings are resolved if missing."""

    found: tuple[Warned, ...]
    completed: tuple[str, ...] = msgspec.field(name="told", default=())


WorkerBody = (
    WorkerHello | StateProtected | Recorded | Status | WorkerReady | Joined | Put | Meet
    | HostMeets | SharedValueRequest | SharedValueMade | Checkpointed | SaveFailed | Finished
    | Traced | NoticeSignal | Audited | AuditNamed | GroupsUsed
)  # fmt: skip
ControllerBody = (
    Seat | Prepare | Close | Decide | Connect | RendezvousValue | Met | Open | SharedValueMake
    | SharedValueReply | SaveEvery | AuditRequest | AuditAgreed | Leave | Stop
)  # fmt: skip
AgentBody = (
    AgentHello | Renew | Renewed | Spawn | Spawned | Kill | WorkerLostReport | Suspect | Trace
    | NodeChecked | RunOutcome | StopRequest | PartnerSlotsRequest | PartnerSlots
    | RanksObserved | HangFound
)  # fmt: skip
AnyBody = WorkerBody | ControllerBody | AgentBody


class MessageEnvelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Message with its origin and addressee. A receiver drops messages of another run, an older
    term, or an agent's earlier incarnation, and reports them in the events."""

    run: str
    term: int
    agent: str
    incarnation: int
    worker: str = ""  # that sends; "": the agent, or the controller
    to: tuple[str, ...] = ()  # workers to which the agent passes it on; (): itself
    seq: int  # per sender, from 1; a repeated number is a duplicate
    body: AnyBody
