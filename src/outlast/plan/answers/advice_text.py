"""Text of advice, from its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outlast.plan.answers.advice import (
    AdviceDoubt,
    BestSettings,
    Bill,
    InputSensitivity,
    InputVariation,
    NextMeasure,
    TunedSettings,
)
from outlast.plan.answers.copy_counts import loss_rate_per_s, memory_per_gpu_bytes
from outlast.plan.answers.spare_nodes import CheapestSpares
from outlast.plan.model.answer_values import format_count, format_quantity
from outlast.plan.model.ladder_costs import Strategy, mtbf_s
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import Prediction
from outlast.theory import numerics
from outlast.theory import spares as spare_theory
from outlast.theory.intervals import Zone

CLOSE = 0.001
SURER_MAX = numerics.SHAPE_MAX / 10
TELLING = 0.001  # of the price: least effect of an input that is worth measuring
DOUBTS_MAX = 3
WHOLE_MIN = 100  # nodes: from here on rounded to whole ones
FAR = 1.5  # factor: settings that differ by less count as equal
NO_SPARES = "The job continues without a lost replica, and uses no spares."
ONE_REPLICA = "all GPUs together hold one replica (--replica-gpus was not given)"
DOES: dict[Strategy, str] = {
    "checkpoint-restart": "After a failure the whole job restarts from storage.",
    "peer-memory": "After a failure the whole job restarts from copies in its nodes' memory.",
    "migrate": "A spare copies the state of a live replica; the others pause.",
    "drop": "The job continues without the replica until its node is repaired.",
    "outlast": "A spare restores its state from a live replica, else from memory, else from"
    " storage.",
}
RUN_BY_POLICY = "`outlast run` does this by a policy with the rung shrink (--policy elastic)"
_GOES_ON = {
    "redo": "redone work",
    "recover": "restarts",
    "detect": "detection",
    "save": "saves",
    "wait": "waits for a node",
    "slow": "slowness without the missing replicas",
    "spares": "spares",
}


def _usd(value: float) -> str:
    return format_quantity(value, "USD")


def _share(value: float, of: float) -> str:
    return format_quantity(value / of, "share")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def describe_current(
    scenario: Scenario,
    here: Prediction,
    spent: Bill,
    saves_usd: float,
    best_usd: float,
    *,
    named: bool,
) -> str:
    """Describe the current settings, their costs by cause, and the saving by a change."""
    taken = "" if named else " (assumed without --strategy)"
    saving = (
        f"{here.strategy}{taken} with a durable save every {format_quantity(here.interval_s, 's')}"
    )
    if math.isinf(here.usd):
        then = "" if math.isinf(best_usd) else f" As advised below it ends, for {_usd(best_usd)}."
        return (
            f"{_sentence(saving)}: the run does not end. Failures come every"
            f" {format_quantity(mtbf_s(scenario), 's')}, faster than it makes progress.{then}"
        )
    lost = spent.total - spent.ideal
    parts = sorted(((getattr(spent, name), text) for name, text in _GOES_ON.items()), reverse=True)
    listed = ", ".join(f"{text} {_usd(value)}" for value, text in parts if value >= 0.005 * lost)
    text = (
        f"{_sentence(saving)}: {format_quantity(here.wall_s, 's')}, {_usd(here.usd)}, goodput"
        f" {format_quantity(here.outcome.goodput, 'share')}. Failures and saves cost"
        f" {_usd(lost)} of it"
        f" ({_share(lost, spent.total)}): {listed}."
    )
    if saves_usd > CLOSE * best_usd:
        less = f"{_usd(saves_usd)} ({_share(saves_usd, here.usd)})"
        return f"{text} With the settings below it costs {less} less."
    return f"{text} No change of settings would save more than {_usd(max(0.0, saves_usd))}."


def describe_strategy(at: BestSettings) -> str:
    """Describe the strategy and the extra cost of the others."""
    others = sorted((one for one in at.found if one is not at.taken), key=lambda one: one.usd)
    close = CLOSE * at.taken.usd
    same: list[Strategy] = [
        other.strategy for other in others if abs(other.usd - at.taken.usd) <= close
    ]
    sentences: list[str] = []
    if same:
        sentences.append(f"{_listed(same)} {'saves' if len(same) == 1 else 'save'} nothing more")
    for other in others:
        more = other.usd - at.taken.usd
        if math.isinf(more):
            sentences.append(f"{other.strategy} does not end")
        elif more > close:
            sentences.append(f"{other.strategy} costs {_usd(more)} more")
        elif more < -close:
            less = (
                f"{other.strategy} may cost {_usd(-more)} less by a formula that does not hold here"
            )
            sentences.append(f"{less} (to simulate it: `pip install 'outlast[plan]'`)")
    text = " ".join(
        [DOES[at.taken.strategy], *([_sentence("; ".join(sentences)) + "."] * bool(sentences))]
    )
    return f"{text} {RUN_BY_POLICY}." if at.taken.strategy == "drop" else text


def _listed(names: Sequence[Strategy]) -> str:
    *first, last = sorted(names, key=lambda name: list(DOES).index(name))
    return f"{', '.join(first)} and {last}" if first else last


def describe_interval(
    scenario: Scenario, settings: TunedSettings, zone: Zone | None, saves_usd: float | None
) -> str:
    """Describe the interval between durable saves, and its flatness where that is known."""
    at_s = settings.interval_s
    if at_s >= scenario.work_s * (1 - CLOSE):
        text = "One durable save, at the end: almost no failure restarts from storage."
    elif at_s <= scenario.step_s:
        text = "At every step, the shortest possible interval."
    elif scenario.flush_s and at_s <= scenario.flush_s * (1 + CLOSE):
        text = "As often as the flush allows: a save begins when the last one can be restored."
    else:
        text = (
            "A durable save after this amount of work, each blocking"
            f" {format_quantity(scenario.cost_s, 's')}."
        )
    if zone is not None:
        flat = f"Any interval from {format_quantity(zone.low_s, 's')}"
        flat += (
            f" to {format_quantity(zone.high_s, 's')}" if zone.high_s < scenario.work_s else " on"
        )
        text = f"{text} {flat} loses at most one point of goodput."
    if scenario.interval_s is None or saves_usd is None:
        return text
    given = format_quantity(scenario.interval_s, "s")
    inside = zone is not None and zone.low_s <= scenario.interval_s <= zone.high_s
    costs = "does not end" if math.isinf(saves_usd) else f"costs {_usd(max(0.0, saves_usd))} more"
    return f"{text} With the given {given}, {'which is within that, ' * inside}the run {costs}."


def describe_memory(scenario: Scenario) -> str:
    """Describe the interval between copies in memory."""
    blocks = format_quantity(scenario.memory_cost_s, "s")
    return (
        f"A version in memory after this amount of work, each blocking {blocks}; a failure undoes"
        " half of it on average."
    )


def describe_copies(scenario: Scenario, settings: TunedSettings) -> str:
    """Describe the rate at which all copies are lost, and their memory."""
    rate = loss_rate_per_s(scenario, settings.copies)
    memory_bytes = memory_per_gpu_bytes(scenario, settings.copies)
    lost = format_quantity(1 / rate if rate else math.inf, "s")
    every = lost if lost == "never" else f"every {lost} of running"
    return (
        f"Nodes that hold each part; all copies of a part are lost {every}. They take"
        f" {format_quantity(memory_bytes, 'bytes')} of memory per GPU for the last version and a"
        " new one."
    )


def describe_spares(
    scenario: Scenario,
    stock: CheapestSpares,
    there: Prediction,
    trap_usd: float,
    saves_usd: float | None,
    settings: TunedSettings,
) -> str:
    """Describe the number of spares, and its difference from the mean number in repair.

    `there`: the prediction with that number; `trap_usd`: extra cost of the mean number in repair.
    """
    if not stock.in_repair:
        return "No failure takes a node."
    trap = round(stock.in_repair)
    mean = f"{trap:,}" if stock.in_repair >= WHOLE_MIN else f"{stock.in_repair:.3g}"
    text = f"{mean} {'node is' if mean == '1' else 'nodes are'} in repair on average"
    if stock.racks:
        text += ", and a rack failure takes several at once: this number costs least."
    elif not stock.best:
        waits = format_quantity(spare_theory.stalled_share(0, stock.in_repair), "share")
        text += f": without spares the run waits {waits} of the time; one spare would cost more."
    else:
        waits = format_quantity(spare_theory.stalled_share(trap, stock.in_repair), "share")
        more = f"cost {_usd(trap_usd)} more" if trap_usd > 0 else "cost hardly less"
        more = "not end" if math.isinf(trap_usd) else more
        text += (
            f"; with {format_count(trap, 'spare')} the run would wait {waits} of the time"
            f" and {more}."
        )
        if stock.known != stock.best:
            text += f" At exactly the mean failure rate, {stock.known:,} would be enough."
    if saves_usd is None or scenario.spares is None or scenario.spares == stock.best:
        return text
    by = "" if there.strategy == settings.strategy else f", with {there.strategy},"
    return f"{text} There are {scenario.spares:,}: the change{by} saves {_usd(saves_usd)}."


def describe_main_inputs(sensitivities: list[InputSensitivity]) -> str:
    """Describe the inputs, not free to set, that move the price most."""
    if not sensitivities or sensitivities[0].swing_usd == 0:
        return ""
    most = sensitivities[0]
    ends = [
        f"{_usd(turn.usd)} at {side}" if math.isfinite(turn.usd) else f"does not end at {side}"
        for side, turn in (("half of it", most.half), ("double", most.double))
        if turn
    ]
    costs = " and ".join(ends)
    verb = "the run costs " if costs.startswith("$") else "the run "
    return f"The {most.label} has the largest effect: {verb}{costs}."


def describe_rarer(times: float, usd: float) -> str:
    """Describe the failure rate at which a run that does not end would end."""
    return f"With failures {times:g} times as rare, the run would end, for {_usd(usd)}."


def describe_rate(times: float, probability: float) -> str:
    """Describe a failure rate `times` the expected one, at quantile `probability`."""
    often = f"{times:.2g} times as often" if times > 1 else f"{1 / times:.2g} times as rarely"
    return f"GPUs fail {often} as expected (the {100 * probability:g} % end of the band)"


def describe_input(lever: InputSensitivity, turn: InputVariation) -> str:
    """Describe an input and its varied value."""
    source = "given" if lever.given else "assumed"
    here = format_quantity(lever.value, lever.unit)
    there = format_quantity(turn.value, lever.unit)
    return f"the {lever.label} is {there}, not the {source} {here}"


def describe_doubt(unknown: str, turn: InputVariation, settings: TunedSettings) -> str:
    """Describe the settings that another input calls for, and the cost of not choosing them."""
    then = turn.settings
    changes = [then.strategy] if then.strategy != settings.strategy else []
    if _far(then.interval_s, settings.interval_s) or not changes:
        changes.append(f"a durable save every {format_quantity(then.interval_s, 's')}")
    if _far(then.spares, settings.spares) and then.strategy != "drop":
        changes.append(format_count(then.spares, "spare"))
    best = " and ".join(changes)
    if math.isinf(turn.regret_usd):
        here = f"{settings.strategy} {'is impossible' if unknown == ONE_REPLICA else 'never ends'}"
        return f"If {unknown}, {here}: {best} is best, for {_usd(turn.usd)}."
    return f"If {unknown}, {best} is best: these settings cost {_usd(turn.regret_usd)} more."


def _far(value: float, other: float) -> bool:
    return not other / FAR <= value <= other * FAR


def describe_certainty(doubts: list[AdviceDoubt], rest: float, at: BestSettings) -> str:
    """Describe the uncertainty beside the doubts listed. `rest`: a share of the price."""
    most = f"at most {format_quantity(rest, 'share')}" if rest else "nothing"
    where = "with any input halved or doubled"
    if at.scenario.failures.weight_failures != EXACT:
        where = f"at the ends of the failure rate's band and {where}"
    if doubts:
        return f"All other uncertainty, {where}, costs {most}."
    return f"No input changes the advice: {where}, it costs {most} more than the best."


def next_measures(
    scenario: Scenario, found: list[InputSensitivity], at: BestSettings
) -> list[NextMeasure]:
    """Return the unknowns to measure next: the failure rate, and assumed inputs that move the
    price."""
    rate = scenario.failures
    unsure = rate.weight_failures <= SURER_MAX or rate.weight_failures == EXACT
    measures = [_count(scenario)] if unsure else []
    assumed = [
        lever
        for lever in found
        if not lever.given
        and lever.key not in ("failures", "replica-gpus")
        and lever.swing_usd > TELLING * at.taken.usd
    ]
    for assumption in assumed[:DOUBTS_MAX]:
        moves = f"half or double moves the price by {_usd(assumption.swing_usd)}"
        if math.isinf(assumption.swing_usd):
            moves = "half or double decides whether the run ends"
        taken = format_quantity(assumption.value, assumption.unit)
        measures.append(
            NextMeasure(
                what=assumption.key, why=f"The {assumption.label}: {taken} is assumed, and {moves}."
            )
        )
    return measures


def _count(scenario: Scenario) -> NextMeasure:
    weight = scenario.failures.weight_failures
    if weight == EXACT:
        why = (
            "The rate is assumed to be exact, so no figure has a band. Give the number of observed"
            " failures: --failures-seen."
        )
        return NextMeasure(what="failures-seen", why=why)
    more = failures_to_halve(weight)
    after_s = more * mtbf_s(scenario)
    late = ", longer than the run itself" if after_s > scenario.work_s else ""
    why = (
        f"Count failures: the rate is as certain as {format_count(round(weight), 'failure')}"
        f" make{'s' * (round(weight) == 1)} it. After {format_count(more, 'more', 'more')}, about"
        f" {format_quantity(after_s, 's')} of running{late}, its band is half as wide."
    )
    return NextMeasure(what="failures", why=why)


def failures_to_halve(weight: float) -> int:
    """Return the least number of further failures that halves the 90 % band of a rate.

    The band is relative to the rate, which is Gamma distributed with this shape.
    """
    target = _width(weight) / 2
    low = 0
    high = 1
    while _width(weight + high) > target:
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _width(weight + middle) <= target else (middle, high)
    return high


def _width(weight: float) -> float:
    return (numerics.gamma_quantile(weight, 0.95) - numerics.gamma_quantile(weight, 0.05)) / weight


def advice_warnings(scenario: Scenario, at: BestSettings) -> list[str]:
    """Return the effects that the advice leaves out, and the premises that do not hold."""
    warnings = list(at.taken.warnings)
    if scenario.nodes == 1:
        warnings.append("one node: its loss takes all copies in memory and live replicas")
    elif scenario.replicas < 2:
        warnings.append(
            "there is one replica of the model, so no failure leaves a live one; a smaller"
            " --replica-gpus gives several"
        )
    elif "replica-gpus" in scenario.assumed and at.taken.strategy in ("migrate", "drop", "outlast"):
        each = scenario.gpus // scenario.replicas
        warnings.append(
            f"{format_count(scenario.replicas, 'replica')} of {format_count(each, 'GPU')} are"
            " assumed: set"
            " --replica-gpus"
        )
    if at.taken.how == "simulated":
        warnings.append(
            f"{at.taken.strategy} is simulated: its prices have an error of some per cent"
        )
    if at.taken.strategy == "drop" and at.taken.how != "simulated":
        warnings.append("drop is priced for a long run; this one begins with all its replicas")
    if scenario.spares == 0 and at.taken.strategy != "drop":
        warnings.append("--spares 0: the job waits for the repair of each lost node")
    if math.isinf(at.taken.usd):
        warnings.append(
            "no strategy ends this run: failures come every"
            f" {format_quantity(mtbf_s(scenario), 's')}"
        )
    return warnings
