"""Frames between workers, agents and the controller.

`channel` writes them to a stream; `docs/protocol.md` lists senders, receivers and order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.events import Fault, Warned


class Body(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all message bodies."""


# --- a worker speaks ------------------------------------------------------------------------


class WorkerHello(Body, frozen=True, tag="Hello"):
    """The worker reached `outlast.init()`. A spare now waits for a seat."""

    pid: int
    fingerprint: dict[str, str]
    address: str  # host:port of this worker's gloo listener
    devices: int = 0  # GPUs that it sees


class StateProtected(Body, frozen=True, tag="Protected"):
    """Digest of the protected state's schema, which must be equal on all ranks.

    `shards`: what this rank holds of it, equal on ranks that are each other's replicas.
    """

    schema: str
    summary: str
    shards: bytes = b""


class Recorded(Body, frozen=True):
    """Set-up results of generation 1 on this seat, for later joiners (opaque bytes)."""

    seat: int
    record: bytes


class Status(Body, frozen=True):
    """The answer to Close, or the first word about a failure (then `fault` is set).

    `n` is the number of phases that this worker has completed, or is completing. `state`:
    idle      between phases, or its attempt is put back: stands before phase n+1
    running   in an attempt at phase n+1 that has not voted and now cannot
    prepared  voted yes on phase n+1, never got the answer, nothing changed
    applying  the vote on phase n was won: this worker is completing it, and will stand behind it
    torn      phase n+1 committed, but this worker failed while applying it
    broken    an attempt cannot be put back here; the worker must be replaced
    finished  the script has left its loop; no phase will follow
    joining   a joiner whose state has not been swapped in: never a donor, whatever it has heard

    `result`: what phase n returned here, where it is small. One that all survivors share is also
    what a worker would have returned that was lost between the vote and its return.
    """

    generation: int
    n: int
    step: int
    state: str
    fault: Fault | None = None
    result: bytes = b""
    shared: bool = False  # the result is equal on all ranks by its making (one of our own phases)


class WorkerReady(Body, frozen=True, tag="Ready"):
    """The worker stands before phase n+1 and can connect: a survivor has put back or applied,
    a joiner has built its model; its dry steps follow."""

    generation: int
    n: int


class Joined(Body, frozen=True):
    """The worker's groups of this generation stand; transfers it takes part in have ended.

    `sent` and `received` map the other seat to (digest, bytes, seconds).
    """

    generation: int
    sent: dict[int, tuple[str, int, float]] = {}
    received: dict[int, tuple[str, int, float]] = {}


class Put(Body, frozen=True):
    """Publish a rendezvous value for this generation (generation 0: for the job's life)."""

    generation: int
    key: str
    value: bytes


class SharedValueRequest(Body, frozen=True, tag="SharedAsk"):
    """`session.shared(name)`: answered by SharedIs, or by SharedMake for exactly one asker."""

    name: str


class SharedValueMade(Body, frozen=True, tag="SharedMade"):
    """The shared value that a rank made on request."""

    name: str
    value: bytes


class Checkpointed(Body, frozen=True):
    """All ranks can begin again from here (sent by seat 0). `tier`: "memory", every rank's keeper
    holds its part of the copy named `path`; "disk", the directory `path` is complete and durable.
    """

    n: int
    step: int
    path: str
    tier: str = "disk"
    blocking_s: float = 0.0  # what training waited for it; 0: no measure, it was prepared as well
    flush_s: float = 0.0  # from the copy until it was durable
    drag_s: float = 0.0  # by how much all steps meanwhile were slower
    step_s: float = 0.0  # a step's time while nothing is written; 0: unknown


class SaveFailed(Body, frozen=True):
    """A checkpoint could not be made (sent by seat 0); training and older ones are untouched."""

    n: int
    step: int
    error: str


class SaveEvery(Body, frozen=True):
    """To seat 0: propose these intervals at the next save (steps; 0: none)."""

    memory: int
    disk: int


class Finished(Body, frozen=True):
    """The script has ended; the worker lingers until Stop, and may still be a donor."""

    n: int
    step: int = 0


class Audited(Body, frozen=True):
    """Digests of what this worker's replicas must hold alike after phase n: one for each kind.

    `replica_set`: equal on ranks that are each other's replicas. `part`: which of `parts` equal
    parts of the state was digested; 0 of 1 is all of it, and its sender waits for AuditAgreed.
    """

    generation: int
    n: int
    step: int
    replica_set: bytes
    kinds: dict[str, bytes]
    part: int = 0
    parts: int = 1


class AuditNamed(Body, frozen=True):
    """The answer to AuditAsk: kind -> name -> digest, of the audit of phase n."""

    generation: int
    n: int
    names: dict[str, dict[str, bytes]]


class Traced(Body, frozen=True):
    """The answer to the Trace of `folder`, for the agent: the file is there, or why it is not."""

    folder: str
    error: str = ""


# --- the controller speaks -------------------------------------------------------------------


class Seat(Body, frozen=True):
    """Take a seat. `slots`: the seat's rank-specific states, keyed "kind:n" (see worker_page.py);
    empty when everybody starts. `record` is what the seat's set-up collectives returned."""

    generation: int
    seat: int
    world: int
    n: int
    first: bool  # True: everybody starts now; set-up collectives are real
    slots: dict[str, bytes] = {}
    record: bytes = b""
    checkpoint: Checkpointed | None = None  # with first: load this before phase n+1
    local_rank: int = -1  # set by the agent: the device to use now; -1: the one from birth


class Close(Body, frozen=True):
    """Generation `generation` is over: sever, answer with Status."""

    generation: int
    reason: str


class Decide(Body, frozen=True):
    """All stand before phase n+1 when this is done: who prepared phase n applies it (commit),
    who ran phase n+1 puts it back (redo)."""

    generation: int  # the new one
    n: int
    verdict: str  # commit | redo
    seats: tuple[str, ...]  # worker by seat


class Connect(Body, frozen=True):
    """Build all groups of this generation; then move state: (donor seat, joiner seat)."""

    generation: int
    n: int
    seats: tuple[str, ...]
    addresses: tuple[str, ...]  # gloo listener by seat
    transfers: tuple[tuple[int, int], ...]
    timeout_s: float


class RendezvousValue(Body, frozen=True, tag="Got"):
    """A rendezvous value, forwarded to every member."""

    generation: int
    key: str
    value: bytes


class Open(Body, frozen=True):
    """All joined and every digest agrees: swap in, run phase n+1. With `ask` the next phase is a
    checkpoint, made by every rank here; then the script goes on ("save") or ends ("drain")."""

    generation: int
    n: int
    ask: Literal["", "save", "drain"] = ""


class AuditRequest(Body, frozen=True, tag="AuditAsk"):
    """Replicas differ in these kinds after phase n: name what they consist of (AuditNamed)."""

    generation: int
    n: int
    kinds: tuple[str, ...]


class AuditAgreed(Body, frozen=True):
    """The replicas hold the same after phase n: the next phase may be voted on."""

    generation: int
    n: int


class SharedValueMake(Body, frozen=True, tag="SharedMake"):
    """Request to make a shared value."""

    name: str


class SharedValueReply(Body, frozen=True, tag="SharedIs"):
    """The shared value, for all ranks."""

    name: str
    value: bytes


class Stop(Body, frozen=True):
    """End now. `ok`: the run is done."""

    ok: bool
    reason: str


# --- an agent speaks -------------------------------------------------------------------------


class AgentHello(Body, frozen=True):
    """An agent offers its host. `lease_s`: it kills its workers if it cannot renew in time."""

    host: str
    address: str
    capacity: int  # how many workers it will run at once
    lease_s: float
    workers: tuple[str, ...] = ()  # alive here already (a controller came back)


class Renew(Body, frozen=True):
    """Renewal of the agent's lease. `beats`: worker -> (n, step, state, loss), from the pages.
    `blocked`: workers that cannot answer now: their process runs, their interpreter does not."""

    beats: dict[str, tuple[int, int, str, float]] = {}
    blocked: tuple[str, ...] = msgspec.field(name="held", default=())


class Renewed(Body, frozen=True):
    """The lease is renewed; it expires after `lease_s` without another renewal."""

    lease_s: float


class Spawn(Body, frozen=True):
    """Request to start a worker."""

    worker: str
    seat: int  # -1: a spare


class Spawned(Body, frozen=True):
    """A worker was started."""

    worker: str
    pid: int


class Kill(Body, frozen=True):
    """Request to kill a worker."""

    worker: str
    reason: str


class WorkerLostReport(Body, frozen=True, tag="Lost"):
    """The worker and its whole session are dead and reaped. `slots` as in Seat; `n`, `step`,
    `state` are the page's last word."""

    worker: str
    fault: Fault
    n: int
    state: str
    slots: dict[str, bytes] = {}
    step: int = 0


class Trace(Body, frozen=True):
    """To a worker: write what the flight recorder has to `traces/FOLDER` of the run directory, as
    `rank_SEAT@HOST.json`, unless `until_ns` (CLOCK_MONOTONIC) has passed."""

    folder: str
    host: str
    until_ns: int


class Suspect(Body, frozen=True):
    """The agent's watch judged this worker hung or stopped; the controller will have it killed."""

    worker: str
    fault: Fault


class NodeChecked(Body, frozen=True, tag="Checked"):
    """All unhealthy findings of the agent's newest node check, each with the worker that has the
    device. `completed`: checks that ran to completion; their earlier findings that are missing
    now are over."""

    found: tuple[Warned, ...]
    completed: tuple[str, ...] = msgspec.field(name="told", default=())


WorkerBody = (
    WorkerHello | StateProtected | Recorded | Status | WorkerReady | Joined | Put
    | SharedValueRequest | SharedValueMade | Checkpointed | SaveFailed | Finished | Traced
    | Audited | AuditNamed
)  # fmt: skip
ControllerBody = (
    Seat | Close | Decide | Connect | RendezvousValue | Open | SharedValueMake | SharedValueReply
    | SaveEvery | AuditRequest | AuditAgreed | Stop
)  # fmt: skip
AgentBody = (
    AgentHello | Renew | Renewed | Spawn | Spawned | Kill | WorkerLostReport | Suspect | Trace
    | NodeChecked
)  # fmt: skip
AnyBody = WorkerBody | ControllerBody | AgentBody


class MessageEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """Origin and addressee of a frame. A receiver drops frames of another run, of an older term,
    and of an agent's earlier incarnation, and reports it in the events."""

    run: str
    term: int
    agent: str
    incarnation: int
    worker: str  # the worker that speaks or is spoken to; "" for agent frames
    seq: int  # by sender, from 1; a repeated number is a duplicate
    body: AnyBody
