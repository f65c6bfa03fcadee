"""The ladder: what broke and what is left -> the cheapest rung that works, with its reason.

The order of LADDER is the policy. A rung says why it cannot be taken, or takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from outlast.events import Fault

Rung = Literal["retry", "replace", "respawn", "restart", "stop"]


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that the choice depends on, when every worker has answered or been reaped."""

    cause: Fault | None  # the most telling fault so far
    lost: tuple[int, ...] = ()  # seats that nobody holds
    stateless: tuple[int, ...] = ()  # those among them whose own state is gone
    donors: int = 0  # survivors that hold the replicated state
    spares: int = 0  # warm, and fit
    respawns: int = 0  # workers that may still be started
    attempts: int = 0  # generations in a row that made no progress
    attempts_max: int = 3
    restarts: int = 0  # restarts in a row that did not pass the farthest phase
    world: int = 1
    steps_lost: int = 0  # what a restart would cost
    checkpoint_n: int = 0


class Choice(msgspec.Struct, frozen=True):
    rung: Rung
    reason: str


def choose(situation: Situation) -> Choice:
    """The first rung of the ladder that can be taken; `stop` always can."""
    why_not = ""
    for rung, take in LADDER:
        reason, possible = take(situation, why_not)
        if possible:
            return Choice(rung, reason)
        why_not = reason or why_not
    raise AssertionError("the ladder ends in a rung that can always be taken")


def _give_up(situation: Situation, _: str) -> tuple[str, bool]:
    if situation.cause is not None and situation.cause.kind == "contract":
        return f"{situation.cause.detail}: trying again would end the same way", True
    if situation.attempts < situation.attempts_max:
        return "", False
    return (
        f"{situation.attempts} generations in a row failed before they completed a phase"
        f"{_because(situation)}",
        True,
    )


def _retry(situation: Situation, _: str) -> tuple[str, bool]:
    if not situation.donors:
        return "no worker is left that holds the whole state", False
    if situation.lost:
        return "", False
    return f"every worker is alive{_because(situation)}: the phase is tried again", True


def _replace(situation: Situation, why_not: str) -> tuple[str, bool]:
    lost = situation.lost
    if not situation.donors:
        return why_not, False
    if situation.stateless:
        ranks = _ranks(situation.stateless)
        return f"nothing is left of the own state of {ranks}", False
    if len(lost) > situation.spares:
        return "", False
    return f"{_ranks(lost)} lost{_because(situation)}: warm spares take over", True


def _respawn(situation: Situation, why_not: str) -> tuple[str, bool]:
    if not situation.donors or situation.stateless:
        return why_not, False
    missing = len(situation.lost) - situation.spares
    if missing > situation.respawns:
        return _no_budget(missing, situation), False
    return (
        f"{_ranks(situation.lost)} lost{_because(situation)}: {situation.spares} warm spare(s),"
        f" so {missing} worker(s) are started anew",
        True,
    )


def _restart(situation: Situation, why_not: str) -> tuple[str, bool]:
    missing = situation.world - situation.spares
    if missing > situation.respawns:
        return _no_budget(missing, situation), False
    if situation.restarts >= situation.attempts_max:
        return (
            f"{situation.restarts} restarts in a row did not get beyond the same place"
            f"{_because(situation)}",
            False,
        )
    origin = (
        f"the checkpoint at phase {situation.checkpoint_n}"
        if situation.checkpoint_n
        else "the beginning (there is no checkpoint)"
    )
    return (
        f"{why_not}: everybody starts again from {origin}; {situation.steps_lost} committed"
        " step(s) lost, to be redone",
        True,
    )


def _stop(_: Situation, why_not: str) -> tuple[str, bool]:
    return why_not or "no rung of the ladder is left", True


LADDER: tuple[tuple[Rung, Callable[[Situation, str], tuple[str, bool]]], ...] = (
    ("stop", _give_up),
    ("retry", _retry),
    ("replace", _replace),
    ("respawn", _respawn),
    ("restart", _restart),
    ("stop", _stop),
)

_TELLING = (
    "contract", "mismatch", "torn", "storage", "hung", "stopped", "killed", "exited", "raised",
    "agent_lost", "transfer", "transport", "requested",
)  # fmt: skip


def most_telling(faults: tuple[Fault, ...]) -> Fault | None:
    """The fault that explains the others: a traceback first, a broken connection last."""
    order = [fault for fault in faults if fault.kind == "contract"] + [
        fault for fault in faults if fault.traceback and fault.kind in ("raised", "exited")
    ]
    if order:
        return order[0]
    return min(faults, key=lambda fault: _TELLING.index(fault.kind), default=None)


def is_user_error(cause: Fault | None) -> bool:
    """Whether the cause lies in the user's own code."""
    if cause is None:
        return False
    return cause.kind in ("contract", "raised") or (
        cause.kind == "exited" and bool(cause.traceback)
    )


def _because(situation: Situation) -> str:
    return f" ({situation.cause.kind}: {situation.cause.detail})" if situation.cause else ""


def _ranks(seats: tuple[int, ...]) -> str:
    return ("rank " if len(seats) == 1 else "ranks ") + ", ".join(map(str, seats))


def _no_budget(missing: int, situation: Situation) -> str:
    return (
        f"{missing} worker(s) are missing, no spare is warm, and only {situation.respawns} may"
        " still be started (limit respawns_max)"
    )
