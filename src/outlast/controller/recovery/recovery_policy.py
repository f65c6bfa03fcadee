"""Recovery policy: the rungs of each class of failure, their conditions and budgets, as data.

`DEFAULT` is the ladder without `--policy`. launch/policies reads files and presets.
"""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import msgspec

from outlast.controller.inputs import FailedWorker
from outlast.events import Fault

Rung = Literal[
    "retry",
    "migrate",
    "replace",
    "respawn",
    "shrink",
    "rebuild",
    "rollback",
    "restart",
    "stop",
]
RUNGS: tuple[Rung, ...] = get_args(Rung)
FROM_A_COPY: tuple[Rung, ...] = ("rollback", "restart")  # every worker is replaced
NOTICE = "notice"  # a planned move: a notice, or a finding of a node check
STRAGGLER = "straggler"  # a planned move: all ranks wait for a slow one
PLANNED = (NOTICE, STRAGGLER)
# Classes of failure: kinds of faults, and planned moves.
FAILURES = (
    *("killed", "exited", "hung", "stopped", "raised", "transport", "unsettled", "torn"),
    *("diverged", "nonfinite", "oom", "unknown", "mismatch", "transfer", "storage"),
    *("agent_lost", "controller_lost"),
    *PLANNED,
)
# Exit codes by which frameworks name a failure: 16 and 17 of Megatron's rerun state machine
# (megatron/core/rerun_state_machine.py), 93 of NVIDIA's resiliency extension.
EXIT_CLASSES = {16: "resume_to_disambiguate", 17: "failed_validation", 93: "no_restart"}
_FINAL = ("failed_validation", "no_restart")  # the process asks that nothing is started again
REPEATS_MAX = 5
_ANY_RANK = 4  # times as many repeats, where ranks differ: devices fail alike in large jobs
HOUR_S = 3600.0
HOUR_NS = 3600 * 10**9


class RungRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rung, and the conditions under which it is taken; None: none."""

    rung: Rung
    spares_min: int | None = None  # warm spares at hand
    lost_max: int | None = None  # ranks lost at once
    steps_lost_max: int | None = None  # committed steps that all ranks redo
    cost_max_usd: float | None = None  # of these steps, at the policy's price
    remaining_min_s: float | None = None  # until the policy's deadline

    @property
    def is_conditional(self) -> bool:
        """Return whether the rule has conditions."""
        return self != RungRule(rung=self.rung)

    def is_behind(self, other: RungRule) -> bool:
        """Return whether another rule of the rung is met wherever this one is: then this one is
        never reached behind it."""
        if self.rung != other.rung:
            return False
        for name in RungRule.__struct_fields__[1:]:
            ours, theirs = getattr(self, name), getattr(other, name)
            if theirs is None:
                continue
            if ours is None or (ours < theirs if "_min" in name else ours > theirs):
                return False
        return True


def plain_rules(*rungs: Rung) -> tuple[RungRule, ...]:
    """Return rules without conditions."""
    return tuple(RungRule(rung=rung) for rung in rungs)


class RecoveryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of rungs. `classes`: rules in order, by class of failure, for those that differ from
    `default`. `budgets`: how often an hour each rung is taken; of `migrate`, for findings of node
    checks and Slurm's drains. `failures_max`: how often an hour a class is recovered from; that of
    "default" holds for each class without rules of its own. `repeats_max`: how many workers of one
    rank the same failure ends within an hour. `exit_codes`: classes of exit codes, beside
    EXIT_CLASSES."""

    name: str
    default: tuple[RungRule, ...]
    classes: dict[str, tuple[RungRule, ...]] = {}
    budgets: dict[Rung, int] = {}
    failures_max: dict[str, int] = {}
    repeats_max: int = REPEATS_MAX
    exit_codes: dict[int, str] = {}
    price_usd_per_rank_hour: float = 0.0
    deadline_s: float = 0.0  # Unix time until which the job should be done; 0: none

    def rules(self, failure: str) -> tuple[RungRule, ...]:
        """Return the rules of a class of failure."""
        if failure in self.classes:
            return self.classes[failure]
        if failure in _FINAL:
            return plain_rules("stop")
        if failure in self.exit_classes.values():
            return self.classes.get("exited", self.default)
        return self.default

    @property
    def exit_classes(self) -> dict[int, str]:
        """Return the classes of exit codes."""
        return EXIT_CLASSES | self.exit_codes

    @property
    def failures(self) -> tuple[str, ...]:
        """Return all classes of failure."""
        return tuple(dict.fromkeys((*FAILURES, *self.exit_classes.values())))

    def failure_class(self, cause: Fault | None, planned: str = "") -> str:
        """Return the class of a failure by its cause; "request" for a wish about the whole run,
        which is no failure and which no policy orders. `planned`: the class of a planned move."""
        if cause is None or cause.kind in ("save", "contract", "internal", "regrow"):
            return "request"
        if cause.kind == "requested":
            return planned or "request"
        if cause.kind == "exited":
            return self.exit_classes.get(cause.exit_code, cause.kind)
        return cause.kind

    def names(self, rung: Rung, failure: str) -> bool:
        """Return whether a class of failure has this rung."""
        return any(rule.rung == rung for rule in self.rules(failure))

    @property
    def shrinks(self) -> bool:
        """Return whether ranks may leave in any class of failure."""
        rules = (self.default, *self.classes.values())
        return any(rule.rung == "shrink" for each in rules for rule in each)

    @property
    def moves_max(self) -> int:
        """Return how many planned moves an hour are made for findings of checks."""
        return self.budgets.get("migrate", 1 << 30)

    @property
    def digest(self) -> str:
        """Return the digest of the policy; its name does not count."""
        same = msgspec.to_builtins(msgspec.structs.replace(self, name=""), str_keys=True)
        data = msgspec.json.encode(same, order="deterministic")
        return hashlib.blake2b(data, digest_size=6).hexdigest()


_EXACT: list[Rung] = [rung for rung in RUNGS if rung != "shrink"]
ELASTIC = RecoveryPolicy(name="elastic", default=plain_rules(*RUNGS), budgets={"migrate": 3})
DEFAULT = RecoveryPolicy(name="default", default=plain_rules(*_EXACT), budgets={"migrate": 3})


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """Means at a decision, with which conditions and budgets are compared."""

    warm: int = 0  # spares that are warm, fit or not
    step_s: float = 0.0  # newest measured step; 0: none was timed
    rungs: tuple[tuple[str, str, int], ...] = ()  # taken, for which class of failure, and when
    now_ns: int = 0  # Unix time
    failed: tuple[FailedWorker, ...] = ()  # of an hour, whose loss was recovered from

    def recent(self, rung: Rung) -> int:
        """Return how often a rung was taken within the last hour."""
        since_ns = self.now_ns - HOUR_NS
        return sum(one == rung and t_ns > since_ns for one, _, t_ns in self.rungs)

    def recoveries(self, failure: str) -> int:
        """Return how often a class of failure was recovered from within the last hour."""
        since_ns = self.now_ns - HOUR_NS
        return sum(one == failure and t_ns > since_ns for _, one, t_ns in self.rungs)


def class_of(rule: str) -> str:
    """Return the class of failure in a decision's rule ("policy exact, killed, rung 3 of 8"); "" if
    it has none."""
    return next(iter(rule.split(", ")[1:]), "")


def spent_budget(policy: RecoveryPolicy, means: Means, failure: str) -> str:
    """Return why a class of failure is not recovered from once more; "" if it is."""
    table = failure if failure in policy.classes else "default"
    budget = policy.failures_max.get(table)
    if budget is None or failure in ("request", *PLANNED):
        return ""
    recent = means.recoveries(failure)
    if recent < budget:
        return ""
    return (
        f"failures of class {failure} were recovered from {recent} times within an hour, and the"
        f" budget is {budget}"
    )


def repeated(policy: RecoveryPolicy, means: Means, failed: FailedWorker | None) -> str:
    """Return why no further worker is lost to a failure that repeats; "" if it does not."""
    if failed is None:
        return ""
    since_ns = means.now_ns - HOUR_NS
    alike = {
        one.worker: one.seat
        for one in means.failed
        if one.failure == failed.failure and one.t_ns > since_ns and one.worker != failed.worker
    }
    here = sum(seat == failed.seat for seat in alike.values())
    limit, everywhere = policy.repeats_max, _ANY_RANK * policy.repeats_max
    if here < limit and len(alike) < everywhere:
        return ""
    ranks = f"of rank {failed.seat}" if here >= limit else "of any ranks"
    count, most = (here, limit) if here >= limit else (len(alike), everywhere)
    return (
        f"{failed.failure} has ended {count + 1} workers {ranks} within an hour, and {most} are"
        f" replaced (repeats_max = {limit})"
    )


def numbered(rules: tuple[RungRule, ...], failure: str) -> list[tuple[int, RungRule]]:
    """Return the rules in the order in which they are tried, with their numbers in the policy: for
    a planned move, migrate comes first, wherever it stands."""
    found = list(enumerate(rules, 1))
    if failure in PLANNED:
        found.sort(key=lambda one: one[1].rung != "migrate")
    return found


def why_no_move(
    policy: RecoveryPolicy, means: Means, leaving: int, world: int, failure: str = NOTICE
) -> str:
    """Return why the policy lets no rank move now; "" if it does. `leaving`: ranks. `failure`: the
    class of the planned move."""
    rules = [rule for rule in policy.rules(failure) if rule.rung == "migrate"]
    if not rules:
        return f"the policy {policy.name} has no rung migrate for {failure}s"
    reasons = [unmet(policy, rule, means, leaving, 0, world) for rule in rules]
    return "" if "" in reasons else reasons[0]


def unmet(
    policy: RecoveryPolicy, rule: RungRule, means: Means, lost: int, steps_lost: int, world: int
) -> str:
    """Return the condition or budget that forbids a rung now; "" if none does. `lost`: ranks
    without a worker; `steps_lost`: steps that the rung makes all ranks redo."""
    rung = rule.rung
    budget, recent = policy.budgets.get(rung), means.recent(rung)
    if budget is not None and rung != "migrate" and recent >= budget:
        return f"{rung} was taken {recent} times within an hour, and its budget is {budget}"
    if rule.spares_min is not None and means.warm < rule.spares_min:
        return f"{rung} needs {rule.spares_min} warm spare(s), and there are {means.warm}"
    if rule.lost_max is not None and lost > rule.lost_max:
        return f"{rung} is for up to {rule.lost_max} lost rank(s), and {lost} are lost"
    if rule.steps_lost_max is not None and steps_lost > rule.steps_lost_max:
        return f"{rung} may redo {rule.steps_lost_max} step(s), and would redo {steps_lost}"
    if rule.cost_max_usd is not None and steps_lost:
        if not means.step_s:
            return f"the cost of {rung} is unknown, since no step was timed by a save yet"
        hours = steps_lost * means.step_s * world / HOUR_S
        cost_usd = hours * policy.price_usd_per_rank_hour
        if cost_usd > rule.cost_max_usd:
            return f"{rung} may cost ${rule.cost_max_usd:g}, and would cost ${cost_usd:.2f}"
    if rule.remaining_min_s is not None:
        rest_s = policy.deadline_s - means.now_ns / 1e9
        if rest_s < rule.remaining_min_s:
            need_s = rule.remaining_min_s
            return f"{rung} needs {need_s:g} s before the deadline, and {max(0.0, rest_s):.0f} are"
    return ""
