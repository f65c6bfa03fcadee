"""Recovery policy for a scenario, as a file for `outlast run --policy`, with its reasons."""

from __future__ import annotations

import math

import msgspec

from outlast.controller.recovery.recovery_policy import DEFAULT, Rung
from outlast.plan.answers.advice import TIE, BestSettings, TunedSettings, with_settings
from outlast.plan.model.answer_values import HIGH, at_rate, format_count, format_quantity
from outlast.plan.model.ladder_costs import mtbf_s, rungs
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import Prediction
from outlast.theory import spares as spare_theory
from outlast.theory.failures import HOUR_S

RARE = 0.999  # of hours: so many need no more starts of all ranks than the budget
BUDGET_MAX = 1_000_000  # of a policy's file
BUDGET_MIN = 2  # one start may fail without a cause that stays


class ProposedRung(msgspec.Struct, frozen=True, kw_only=True):
    """A rung of the proposed policy. `usd`: cost of a failure that it answers; None: unknown."""

    rung: Rung
    usd: float | None
    why: str


class ProposedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Proposed policy. `left_out`: reasons by rung; `budgets`: times an hour; `file`: its TOML."""

    rungs: tuple[ProposedRung, ...]
    left_out: dict[Rung, str]
    budgets: dict[Rung, int]
    why_budgets: dict[Rung, str]
    spares: int
    file: str = ""


def propose_policy(at: BestSettings, settings: TunedSettings) -> ProposedPolicy:
    """Return the policy for a scenario's best settings."""
    here = with_settings(at.scenario, settings)
    left_out: dict[Rung, str] = {}
    spares = 0 if (shrinks := _pays_to_shrink(at, left_out)) else settings.spares
    found = [
        *_live_rungs(here, spares, left_out),
        *_shrink(here, shrinks),
        *_copy_rungs(here, settings, left_out),
    ]
    named: set[Rung] = {one.rung for one in found}
    budgets, why = _budgets(at, here, named)
    plain = ProposedPolicy(
        rungs=tuple(found), left_out=left_out, budgets=budgets, why_budgets=why, spares=spares
    )
    return msgspec.structs.replace(plain, file=_file(here, settings, plain))


def describe_policy(policy: ProposedPolicy) -> str:
    """Describe a proposed policy in a sentence or two."""
    parts = [f"{one.rung} costs {_usd(one.usd)} a failure" for one in policy.rungs if one.usd]
    parts += [f"{rung} is left out, since {why}" for rung, why in policy.left_out.items()]
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}. --policy-out FILE writes it."


# --- rungs ---


def _live_rungs(here: Scenario, spares: int, left_out: dict[Rung, str]) -> list[ProposedRung]:
    """Return the rungs that keep the state of live ranks, if they are worth it."""
    pause_s = here.detect_s + here.pause_s + here.step_s / 2
    usd = _price_usd(here, pause_s)
    restart_usd = _price_usd(here, _restart_s(here))
    retry = ProposedRung(rung="retry", usd=usd, why="all workers live: the step is computed again")
    if usd >= restart_usd:
        why = f"a start of all ranks is cheaper ({_usd(restart_usd)} a failure, not {_usd(usd)})"
        left_out.update({"replace": why, "respawn": why})
        return [retry]
    found = [retry]
    alone = "; passed, as one replica has no copy" if here.replicas < 2 else ""
    if spares:
        taken = f"{format_count(spares, 'spare node')} to take the rank{alone}"
        found += [
            ProposedRung(rung="migrate", usd=None, why="a notice: ranks leave before the failure"),
            ProposedRung(rung="replace", usd=usd, why=taken),
        ]
    else:
        left_out["replace"] = "no spare node is bought"
    why = f"a new worker, where there is room{alone}"
    return [*found, ProposedRung(rung="respawn", usd=usd, why=why)]


def _pays_to_shrink(at: BestSettings, left_out: dict[Rung, str]) -> bool:
    """Return whether going on with fewer ranks costs less than spares and waiting."""
    if at.scenario.replicas < 2:
        left_out["shrink"] = "without the only replica nobody can go on"
        return False
    fewer = _option(at, "drop")
    others = [one for one in at.found if one.strategy in ("migrate", "outlast")]
    if fewer is None or not others:
        left_out["shrink"] = "it has no price here"
        return False
    best = min(others, key=lambda one: one.usd)
    if fewer.usd < best.usd * (1 - TIE):
        return True
    more_usd = fewer.usd - best.usd
    why = f"the run would cost {_usd(more_usd)} more than with {_count(best.spares)}"
    if not math.isfinite(more_usd):
        why = "the run would not end"
    elif more_usd <= best.usd * TIE:
        why = f"the run would cost as much as with {_count(best.spares)}"
    left_out["shrink"] = f"{why}, and would not have the bits of an undisturbed one"
    return False


def _option(at: BestSettings, strategy: str) -> Prediction | None:
    return next((one for one in at.found if one.strategy == strategy), None)


def _shrink(here: Scenario, shrinks: bool) -> list[ProposedRung]:
    if not shrinks:
        return []
    pauses_s = here.detect_s + 2 * here.pause_s + here.step_s
    usd = _price_usd(here, pauses_s + here.repair_s / here.replicas)
    why = (
        "the other replicas go on until the node is repaired: cheaper than spares and waiting; the"
        " bits are not those of an undisturbed run"
    )
    return [ProposedRung(rung="shrink", usd=usd, why=why)]


def _copy_rungs(
    here: Scenario, settings: TunedSettings, left_out: dict[Rung, str]
) -> list[ProposedRung]:
    """Return the rungs that begin from a copy, and the last one."""
    restart_usd = _price_usd(here, _restart_s(here))
    found: list[ProposedRung] = []
    if settings.memory_interval_s is None:
        left_out["rollback"] = "copies in memory do not pay here"
    else:
        memory_s = here.detect_s + here.restore_s + settings.memory_interval_s / 2
        usd = _price_usd(here, memory_s)
        if usd >= restart_usd:
            left_out["rollback"] = f"restart is cheaper ({_usd(restart_usd)}, not {_usd(usd)})"
        else:
            why = "lost shards come from copies in memory, and the other ranks stay"
            found.append(ProposedRung(rung="rebuild", usd=usd, why=why))
            why = f"all ranks, from copies in memory every {_span(settings.memory_interval_s)}"
            found.append(ProposedRung(rung="rollback", usd=usd, why=why))
    why = f"all ranks, from a checkpoint every {_span(settings.interval_s)}"
    return [
        *found,
        ProposedRung(rung="restart", usd=restart_usd, why=why),
        ProposedRung(rung="stop", usd=None, why="the run ends, and can be resumed"),
    ]


def _restart_s(here: Scenario) -> float:
    return here.detect_s + here.restart_s + (here.interval_s or 0.0) / 2


# --- budgets ---


def _budgets(
    at: BestSettings, here: Scenario, named: set[Rung]
) -> tuple[dict[Rung, int], dict[Rung, str]]:
    """Return the budgets of starts of all ranks: as many an hour as failures explain."""
    budgets: dict[Rung, int] = {}
    why: dict[Rung, str] = {}
    if "migrate" in named:
        budgets["migrate"] = DEFAULT.budgets["migrate"]
        why["migrate"] = "as the default policy; notices are not counted"
    is_exact = here.failures.weight_failures == EXACT
    worst = here if is_exact else at_rate(here, HIGH)
    ladder = rungs(worst, at.taken.strategy, memory=here.memory_interval_s is not None)
    an_hour = HOUR_S / mtbf_s(worst)
    by: tuple[tuple[Rung, str], ...] = (("rollback", "snapshot"), ("restart", "checkpoint"))
    for rung, loses in by:
        if rung not in named:
            continue
        share = sum(each.share for each in ladder if each.loses == loses)
        mean = min(an_hour * share, spare_theory.MEAN_MAX / 10)
        count = spare_theory.quantile(RARE, mean) if mean else 0
        budgets[rung] = min(max(BUDGET_MIN, count + 1), BUDGET_MAX)
        end = "" if is_exact else ", at the upper end of the rate's band,"
        why[rung] = (
            f"failures{end} need {mean:.2g} an hour; more than {budgets[rung]} come in fewer than"
            f" one of 1,000 hours, and point to a cause that stays: then stop, which frees"
            f" {_usd(_price_usd(here, HOUR_S))} an hour"
        )
    return budgets, why


# --- text ---


def _file(here: Scenario, settings: TunedSettings, policy: ProposedPolicy) -> str:
    price = here.usd_per_gpu_hour
    lines = [
        "# Proposed by `outlast plan advise`, from rates and prices. Costs are those of a failure,",
        f"# for {format_count(here.gpus, 'GPU')} at {_usd(price)} a GPU-hour; failures:"
        f" {_plain(here.failures.name)}.",
        f"# To use it: outlast run --policy THIS_FILE, with {_count(policy.spares)}, a checkpoint"
        f" every {_span(settings.interval_s)} of work",
    ]
    if settings.memory_interval_s is not None:
        lines[-1] += f", a copy in memory every {_span(settings.memory_interval_s)}"
    lines += [f"# Left out: {rung}, since {why}." for rung, why in policy.left_out.items()]
    lines += ["", f"price_usd_per_rank_hour = {price!r}"]
    if policy.budgets:
        lines += ["", "[budgets] # times an hour"]
        for rung, count in policy.budgets.items():
            lines += [f"# {rung}: {policy.why_budgets[rung]}", f"{rung} = {count}"]
    lines += ["", "[default] # all classes of failure", "rungs = ["]
    for one in policy.rungs:
        cost = f"{_usd(one.usd)} a failure; " if one.usd is not None else ""
        lines.append(f'  "{one.rung}", # {cost}{one.why}')
    return "\n".join([*lines, "]", ""])


def _count(spares: int) -> str:
    return format_count(spares, "spare node") if spares else "no spare node"


def _plain(name: str) -> str:
    """Return a name that fits a comment."""
    return "".join(letter if letter.isprintable() else " " for letter in name)


def _price_usd(here: Scenario, length_s: float) -> float:
    return here.gpus * length_s / HOUR_S * here.usd_per_gpu_hour


def _usd(value: float | None) -> str:
    return "" if value is None else format_quantity(value, "USD")


def _span(length_s: float) -> str:
    return format_quantity(length_s, "s")
