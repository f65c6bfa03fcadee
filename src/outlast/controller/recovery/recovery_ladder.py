"""Recovery ladder: the first rung of the policy that works, with its reason.

The order is data (recovery_policy). A rung returns the reason if it cannot be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from outlast.controller.inputs import FailedWorker
from outlast.controller.recovery.rank_units import fewest_leaving
from outlast.controller.recovery.recovery_policy import (
    DEFAULT,
    FROM_A_COPY,
    Means,
    RecoveryPolicy,
    Rung,
    numbered,
    repeated,
    spent_budget,
    unmet,
)
from outlast.controller.recovery.root_fault import failed_worker
from outlast.events import Fault


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the choice, when every worker has answered or been reaped."""

    cause: Fault | None  # the most specific fault so far
    lost: tuple[int, ...] = ()  # seats without a worker
    planned: tuple[int, ...] = ()  # seats that were given up to be moved
    move: str = "notice"  # class of their moves
    stateless: tuple[int, ...] = ()  # those among them whose own state is lost
    unreplicated: tuple[int, ...] = ()  # seats whose shards no survivor holds
    cut: str = ""  # hosts that do not reach each other
    is_cut_for_good: bool = False  # it has not healed in time
    copy_step: int = -1  # of the copy in memory from which those shards can be rebuilt; -1: none
    no_copy: str = ""  # why there is none
    donors: int = 0  # survivors that hold their part of the state
    diverged: bool = False  # replicas differ without a majority
    spares: int = 0  # warm, and fit
    cold: int = 0  # spares that are still starting
    respawns: int = 0  # workers that may still be started
    attempts: int = 0  # generations without progress that ended in the commonest fault
    attempts_all: int = 0  # generations without progress that ended in any fault
    attempts_max: int = 3
    restarts: int = 0  # restarts in a row without progress
    world: int = 1
    steps_lost: int = 0  # that some rank has completed, and a rollback or a restart would redo
    checkpoint_n: int = 0
    in_memory: bool = False  # keepers hold that checkpoint
    back: tuple[int, ...] = ()  # those of `lost` that were absent, and can come back
    no_shrink: str = ""  # why ranks may not leave
    units: tuple[tuple[int, ...], ...] = ()  # of lost ranks, with all ranks that leave with them
    parted: tuple[int, ...] = ()  # those of `lost` that were healthy, and leave with their unit
    rooms: int = 0  # workers for which there is room
    disk_n: int = 0  # of the newest checkpoint on disk
    disk_steps_lost: int = 0  # as `steps_lost`, from that one
    means: Means = Means()


class RecoveryChoice(msgspec.Struct, frozen=True):
    """The chosen rung of the recovery ladder, the reason, and the rule of the policy. `from_disk`:
    a restart that leaves out copies in memory. `leaving`: ranks that leave. `failure`: its class,
    and `failed`: the worker that it has ended, which count in the policy's budgets; "" for a return
    of ranks."""

    rung: Rung | Literal["regrow"]
    reason: str
    rule: str = ""
    from_disk: bool = False
    leaving: tuple[int, ...] = ()
    failure: str = ""
    failed: FailedWorker | None = None


class _Course(NamedTuple):
    """Reason why earlier rungs were not taken, and whether one of them keeps survivors.
    `skips_memory`: the policy restarts from disk, whatever is in memory. `shrinks`: it lets ranks
    leave, `has_respawned`: behind the start of new workers in their place."""

    why_not: str
    keeps_survivors: bool = True
    skips_memory: bool = False
    shrinks: bool = False
    has_respawned: bool = False


def choose(situation: Situation, policy: RecoveryPolicy = DEFAULT) -> RecoveryChoice:
    """Return the first rung of the policy that can be taken; its last one, `stop`, always can."""
    if why := _exhausted(situation):
        return RecoveryChoice("stop", why, "limits of the run")
    if situation.back and situation.back == situation.lost and situation.donors:
        reason = f"{_ranks(situation.back)} can come back: warm spares are there"
        return RecoveryChoice("regrow", reason, "no failure")
    failure = policy.failure_class(situation.cause, situation.move if situation.planned else "")
    if why := spent_budget(policy, situation.means, failure):
        why += _cause_suffix(situation)
        return RecoveryChoice("stop", why, f"policy {policy.name}, {failure}, budget")
    rules = DEFAULT.default if failure == "request" else policy.rules(failure)
    skips_memory = all(rule.rung != "rollback" for rule in rules)
    course = _Course(
        _state_problem(situation),
        keeps_survivors=False,
        skips_memory=skips_memory,
        shrinks=any(rule.rung == "shrink" for rule in rules),
    )
    for number, rule in numbered(rules, failure):
        rung, why_not = rule.rung, course.why_not
        from_disk = rung == "restart" and skips_memory
        steps = situation.disk_steps_lost if from_disk else situation.steps_lost
        steps = steps if rung in FROM_A_COPY else 0
        if why := unmet(policy, rule, situation.means, len(situation.lost), steps, situation.world):
            why_not = f"{why_not}; {why}" if why_not else why
        else:
            reason, possible = _RUNGS[rung](situation, course)
            failed = None
            if possible and rung not in ("retry", "stop"):
                failed = failed_worker(situation.cause, situation.means.now_ns)
            if why := repeated(policy, situation.means, failed):
                why += _cause_suffix(situation)
                return RecoveryChoice("stop", why, f"policy {policy.name}, {failure}, repeats_max")
            if possible:
                place = f"rung {number} of {len(rules)}"
                source = f"policy {policy.name}" if failure != "request" else "no failure"
                rule_text = f"{source}, {failure}, {place}"
                leaving = _leaving(situation, course) if rung == "shrink" else ()
                return RecoveryChoice(rung, reason, rule_text, from_disk, leaving, failure, failed)
            why_not = reason or why_not
        keeps = course.keeps_survivors or rung not in FROM_A_COPY
        course = course._replace(
            why_not=why_not,
            keeps_survivors=keeps,
            has_respawned=course.has_respawned or rung == "respawn",
        )
    raise AssertionError(f"the rules of {failure} do not end in a rung that can always be taken")


def _exhausted(situation: Situation) -> str:
    """Return why no rung can help; "" if one may."""
    if (cause := situation.cause) is not None and cause.repeats:
        return cause.detail
    if cause is not None and cause.kind == "contract":
        return f"{cause.detail}: a retry would fail the same way"
    if situation.is_cut_for_good:
        return (
            f"{situation.cut}, and no other hosts have spares or room for the ranks of one of them;"
            " repair the network, and resume on all nodes with: outlast run --resume RUN_DIR"
        )
    if situation.attempts >= situation.attempts_max:
        return (
            f"{situation.attempts} generations ended in the same fault, and no phase was completed"
            f" between them{_cause_suffix(situation)}"
        )
    if situation.attempts_all >= _KINDS_OF_TROUBLE * situation.attempts_max:
        return (
            f"{situation.attempts_all} generations failed, each with another fault, and no phase"
            f" was completed between them{_cause_suffix(situation)}"
        )
    return ""


def _state_problem(situation: Situation) -> str:
    """Return why survivors cannot go on as they are, or give lost ranks their state."""
    if situation.diverged:
        return f"no rank is known to hold the right state{_cause_suffix(situation)}"
    if not situation.donors:
        return "no worker is left that holds the whole state"
    return _missing_state(situation) if situation.lost or situation.unreplicated else ""


def _retry(situation: Situation, _: _Course) -> tuple[str, bool]:
    if situation.lost or _state_problem(situation):
        return "", False
    return f"every worker is alive{_cause_suffix(situation)}: the phase is retried", True


def _migrate(situation: Situation, _: _Course) -> tuple[str, bool]:
    lost = situation.lost
    possible = situation.donors and len(lost) <= situation.spares
    if (
        not lost
        or not possible
        or _missing_state(situation)
        or not set(lost) <= set(situation.planned)
    ):
        return "", False
    to = "a warm spare" if len(lost) == 1 else "warm spares"
    return f"{_ranks(lost)} moved to {to}{_cause_suffix(situation)}", True


def _replace(situation: Situation, _: _Course) -> tuple[str, bool]:
    lost = situation.lost
    if not lost or not situation.donors or _missing_state(situation):
        return "", False
    if len(lost) > situation.spares + situation.cold:
        return "", False
    starting = len(lost) - situation.spares
    which = "warm spares take over" if starting <= 0 else "starting spares take over"
    return f"{_ranks(lost)} lost{_cause_suffix(situation)}: {which}", True


def _respawn(situation: Situation, course: _Course) -> tuple[str, bool]:
    if not situation.lost or not situation.donors or _missing_state(situation):
        return "", False
    missing = max(0, len(situation.lost) - situation.spares - situation.cold)
    if missing > situation.respawns:
        return _no_budget(missing, situation), False
    if course.shrinks and not situation.no_shrink and missing > situation.rooms:
        return f"{missing} worker(s) are missing, and no host has room", False
    return (
        f"{_ranks(situation.lost)} lost{_cause_suffix(situation)}: {situation.spares} warm"
        f" spare(s), {situation.cold} starting, so {missing} worker(s) are started anew",
        True,
    )


def _leaving(situation: Situation, course: _Course) -> tuple[int, ...]:
    """Return the ranks that leave: lost ones that nobody can take at once, with their units."""

    def takers(freed: int) -> int:
        rooms = situation.rooms + freed
        fresh = min(situation.respawns, rooms) if course.has_respawned else 0
        return situation.spares + situation.cold + fresh

    units = situation.units or tuple((seat,) for seat in situation.lost)
    return fewest_leaving(units, situation.lost, situation.stateless, takers)


def _shrink(situation: Situation, course: _Course) -> tuple[str, bool]:
    why_not = course.why_not
    if not situation.lost or not situation.donors or situation.diverged:
        return "", False
    if situation.no_shrink:
        return f"{why_not}{why_not and '; '}{situation.no_shrink}", False
    if not (leaving := _leaving(situation, course)):
        return "", False
    lost = tuple(seat for seat in situation.lost if seat not in situation.parted)
    missing = tuple(seat for seat in leaving if seat in lost)
    together = ""
    if healthy := tuple(seat for seat in leaving if seat not in lost):
        units = (unit for unit in situation.units if not set(unit).isdisjoint(healthy))
        parts = " and ".join(map(_ranks, units))
        together = f" {parts} leave together (healthy: {_ranks(healthy)}), which need each other;"
    return (
        f"{_ranks(lost)} lost{_cause_suffix(situation)}, and nobody can take"
        f" {_ranks(missing)}:{together} the others go on",
        True,
    )


def _rebuild(situation: Situation, course: _Course) -> tuple[str, bool]:
    why_not = course.why_not
    if not situation.donors or situation.stateless or not situation.unreplicated:
        return "", False
    if situation.copy_step < 0:
        return f"{why_not}{situation.no_copy and '; '}{situation.no_copy}", False
    missing = len(situation.lost) - situation.spares - situation.cold
    if missing > situation.respawns:
        return _no_budget(missing, situation), False
    return (
        f"{why_not}: the copy of step {situation.copy_step} in keepers' memory has them; the other"
        " ranks stay",
        True,
    )


def _rollback(situation: Situation, course: _Course) -> tuple[str, bool]:
    return _begin_again(situation, course) if situation.in_memory else ("", False)


def _restart(situation: Situation, course: _Course) -> tuple[str, bool]:
    if not course.skips_memory:
        return ("", False) if situation.in_memory else _begin_again(situation, course)
    disk = msgspec.structs.replace(
        situation,
        checkpoint_n=situation.disk_n,
        steps_lost=situation.disk_steps_lost,
        in_memory=False,
    )
    return _begin_again(disk, course)


def _begin_again(situation: Situation, course: _Course) -> tuple[str, bool]:
    why_not = course.why_not or _loss(situation)
    is_whole = not _state_problem(situation)
    if is_whole and not situation.checkpoint_n and course.keeps_survivors:
        return "", False  # only workers are missing; a start would lose all steps as well
    if situation.diverged and not situation.checkpoint_n:
        return f"{why_not}; there is no copy from before the last agreement", False
    if situation.restarts >= situation.attempts_max:
        return (
            f"{situation.restarts} restarts in a row ended at the same place"
            f"{_cause_suffix(situation)}",
            False,
        )
    origin = "the beginning (there is no checkpoint)"
    if situation.checkpoint_n:
        kind = "copy in memory" if situation.in_memory else "checkpoint"
        origin = f"the {kind} at phase {situation.checkpoint_n}"
    return (
        f"{why_not}: all ranks start again from {origin}; steps that a rank has completed and all"
        f" redo: {situation.steps_lost}",
        True,
    )


def _loss(situation: Situation) -> str:
    what = f"{_ranks(situation.lost)} lost" if situation.lost else "every worker is alive"
    return f"{what}{_cause_suffix(situation)}"


def _stop(_: Situation, course: _Course) -> tuple[str, bool]:
    return course.why_not or "no other rung of the policy applies", True


_RUNGS: dict[Rung, Callable[[Situation, _Course], tuple[str, bool]]] = {
    "retry": _retry,
    "migrate": _migrate,
    "replace": _replace,
    "respawn": _respawn,
    "shrink": _shrink,
    "rebuild": _rebuild,
    "rollback": _rollback,
    "restart": _restart,
    "stop": _stop,
}

_KINDS_OF_TROUBLE = 4


def _cause_suffix(situation: Situation) -> str:
    return f" ({situation.cause.kind}: {situation.cause.detail})" if situation.cause else ""


def _missing_state(situation: Situation) -> str:
    """Return the state that no survivor can give to a replacement worker; "" if none."""
    if situation.stateless:
        ranks = _ranks(situation.stateless)
        return f"the own state of {ranks} is lost{_cause_suffix(situation)}"
    if situation.unreplicated:
        ranks = _ranks(situation.unreplicated)
        return f"no other rank holds the shards of {ranks}{_cause_suffix(situation)}"
    return ""


def _ranks(seats: tuple[int, ...]) -> str:
    return ("rank " if len(seats) == 1 else "ranks ") + ", ".join(map(str, seats))


def _no_budget(missing: int, situation: Situation) -> str:
    return (
        f"{missing} worker(s) are missing, no spare is warm, and only {situation.respawns} may"
        " still be started (limit respawns_max)"
    )
