"""How a comparison of strategies looks."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from outlast.cli.plan.saying import band, remarks
from outlast.cli.stream import as_json, say
from outlast.plan.answers import Quantity
from outlast.plan.beside import Observed, Verdict
from outlast.plan.compare import Comparison
from outlast.plan.ensemble import CAUSES
from outlast.plan.words import figure, many


def show(found: Comparison, *, json: bool) -> None:
    """The whole comparison, as one JSON object or for people."""
    if json:
        as_json(found)
        return
    say(Text(found.question, "bold"))
    say(Text(f"failures: {found.failures}", "dim"))
    if found.contenders:
        say(_outcomes(found))
        say(_ends(found))
        say(_shares(found))
        say(_settings(found))
    if found.observed:
        _observed(found.observed)
    for one in found.impossible:
        say(Text(f"{one.strategy} {one.why}"))
    cut = "interrupted: " if found.interrupted else ""
    if found.contenders:
        rates = many(found.rates, "failure rate")
        say(f"{cut}{many(found.runs, 'run')} of each strategy at {rates}, seed {found.seed};")
        say("figures are medians, and P5 .. P95 below them; costs more: on the same failures")
    else:
        say(f"{cut}each strategy had not yet met enough failure rates to say anything")
    remarks(found)


def _outcomes(found: Comparison) -> Table:
    best = found.contenders[0]
    shown = _table("", "goodput", "takes", "costs")
    for one in found.contenders:
        cells = (_banded(one.goodput), _banded(one.takes), _banded(one.costs))
        shown.add_row(one.strategy, *cells, style="bold" if one is best else "")
    return shown


def _ends(found: Comparison) -> Table:
    """What the others cost more, how often it fails, and when it ends."""
    best = found.contenders[0]
    dated = ["ends"] if best.finish else []
    asked = [f"in {figure(found.within_s, 's')}"] if found.within_s else []
    shown = _table("", "costs more", "failures", *dated, *asked)
    for one in found.contenders:
        row = [Text("") if one is best else _banded(one.dearer), _banded(one.failures)]
        if one.finish:
            days = [f"{day:%Y-%m-%d}" if day else "never" for day in one.finish]
            row.append(_two_lines(days[1], f"{days[0]} .. {days[2]}"))
        if one.in_time is not None:
            row.append(Text(figure(one.in_time, "share")))
        shown.add_row(one.strategy, *row)
    return shown


def _banded(one: Quantity) -> Text:
    if one.low is None or one.high is None:
        return Text(figure(one.value, one.unit))
    low, high = figure(one.low, one.unit), figure(one.high, one.unit)
    number, _, unit = low.rpartition(" ")
    if number and unit == high.rpartition(" ")[2]:
        low = number
    return _two_lines(figure(one.value, one.unit), f"{low} .. {high}")


def _two_lines(middle: str, ends: str) -> Text:
    return Text.assemble(middle, "\n", (ends, "dim"))


def _shares(found: Comparison) -> Table:
    shown = _table("% of wall time, mean", *CAUSES)
    for one in found.contenders:
        shown.add_row(
            one.strategy, *(f"{round(100 * one.shares[cause], 2) + 0.0:.2f}" for cause in CAUSES)
        )
    return shown


def _settings(found: Comparison) -> Table:
    shown = _table("set", "save", "memory", "spares", "theory", "simulated", "z")
    for one in found.contenders:
        theory = one.theory
        memory = figure(one.memory_interval_s, "s") if one.memory_interval_s else "-"
        shown.add_row(
            one.strategy, figure(one.interval_s, "s"), memory, figure(one.spares, "nodes"),
            figure(theory.takes_s, "s"),
            "" if theory.differs is None else f"{theory.differs:+.2%}",
            "" if theory.z is None else f"{theory.z:+.1f}",
        )  # fmt: skip
    return shown


def _observed(found: Observed) -> None:
    causes = ", ".join(f"{count} {kind}" for kind, count in found.incidents.items()) or "no failure"
    measured = [
        f"{name} {figure(value, 'share')}"
        for name, value in (("goodput", found.goodput), ("ETTR", found.ettr))
        if value is not None
    ]
    say(Text(f"the run in {found.run_dir}", "bold"))
    say("; ".join([
        f"{found.outcome}: {many(found.steps, 'step')} on {many(found.devices, 'rank')} in"
        f" {figure(found.wall_s, 's')}", causes, *measured,
    ]))  # fmt: skip
    shown = _table(f"as {found.strategy}", "predicted", "observed", "", "at its rate", "")
    for one in found.rows:
        again = _banded(one.at_its_rate) if one.at_its_rate else Text("")
        shown.add_row(
            one.observed.name, _banded(one.predicted), _banded(one.observed),
            _verdict(one.verdict), again, _verdict(one.verdict_at_its_rate),
        )  # fmt: skip
    say(shown)
    say("shares of the time from the first step to the last; more and less: than the band; at its")
    say("rate: predicted once more, for runs that fail as often as this one did")
    if found.believed:
        one = found.believed
        said = f"{figure(one.value, one.unit)} ({band(one)})"
        say(f"{one.name}: {said} is to be believed now, from {one.source}")
    for note in found.notes:
        say(Text(f"the run's note: {note}", "dim"))


def _verdict(one: Verdict | None) -> Text:
    """How the run compares with the prediction beside it."""
    return Text(one or "", "" if one == "within" else "yellow")


def _table(*columns: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        shown.add_column(name, justify="right" if number else "left", no_wrap=not number)
    return shown
