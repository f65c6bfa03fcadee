"""Messages between an agent and its controller that concern no single worker: the agent's lease,
the end of the run, and the state that its workers hold of lost ranks."""

from __future__ import annotations

import msgspec

from outlast.transport.message_base import Body
from outlast.transport.worker_page import OwnTimeRecord


class AgentHello(Body, frozen=True):
    """Registration of an agent. `lease_s`: it kills its workers if it cannot renew in time."""

    host: str
    address: str
    capacity: int  # maximum number of concurrent workers
    lease_s: float
    workers: tuple[str, ...] = ()  # already alive here (after a reconnection)
    unseated: tuple[str, ...] = ()  # those of them to which no Seat and no Prepare was passed on
    domain: str = ""  # failure domain of its node


class Renew(Body, frozen=True):
    """Renewal of the agent's lease. `beats`: worker -> (n, step, state, loss), from the pages.
    `blocked`: workers that cannot answer: the process runs, but the interpreter is blocked.
    `answers`: number of Renewed that the agent has received on this connection. `own_times`: of
    each worker, the records since the last renewal (worker_page.OwnTimeRecord)."""

    answers: int = 0
    beats: dict[str, tuple[int, int, str, float]] = msgspec.field(default_factory=dict)
    blocked: tuple[str, ...] = msgspec.field(name="held", default=())
    own_times: dict[str, tuple[OwnTimeRecord, ...]] = msgspec.field(default_factory=dict)


class Renewed(Body, frozen=True):
    """Confirmation of a renewal; the lease expires after `lease_s` without another renewal."""

    lease_s: float


RELEASED = "released"  # outcome for one node, which leaves the run


class RunOutcome(Body, frozen=True):
    """End of the run, to all agents; with RELEASED, of one node alone. `cause`: one line, "" for a
    run that is done."""

    outcome: str
    exit_code: int
    cause: str = ""


class StopRequest(Body, frozen=True):
    """Request of an agent's user or scheduler to end the run so that it can be resumed."""

    reason: str


class PartnerSlotsRequest(Body, frozen=True, tag="PartnerAsk"):
    """Request to an agent for the slots of lost ranks before phase n+1 that its workers hold, from
    generation `since` on."""

    seats: tuple[int, ...]
    n: int
    since: int


class PartnerSlots(Body, frozen=True, tag="PartnerIs"):
    """Answer to PartnerAsk: seat -> "kind:n" -> generation in which it was received, and slot."""

    n: int
    since: int
    slots: dict[int, dict[str, tuple[int, bytes]]]
