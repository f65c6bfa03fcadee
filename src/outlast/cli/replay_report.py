"""The report of `outlast replay`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from outlast.cli.replay_comparison import NumberDifference, RunPair, StateComparison
from outlast.terminal_tables import number_column, table, text_column
from outlast.text_formatting import duration, plural

_SHOWN_MAX = 12
_NUMBERS_MAX = 4

Verdict = Literal[
    "identical",  # both replays, and the run itself as far as that can be told
    "different",  # the replays differ
    "unlike the run",  # the replays are equal, the run went another way, and nothing else changed
    "nothing compared",  # neither numbers nor checkpoints
]


class Original(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the run itself (b) with its first replay (a).

    `unlike`: differences in the environment that may change bits, as (then, now).
    """

    sides: RunPair
    unlike: dict[str, tuple[str, str]]


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `kept`: run directories of both replays, unless they were removed."""

    version: int = 1
    verdict: Verdict
    run_dir: str
    from_step: int
    until_step: int
    replays: RunPair
    original: Original
    hints: list[str]
    notes: list[str]
    kept: tuple[str, ...]
    wall_s: float


def judge(replays: RunPair, original: Original) -> Verdict:
    """Return the verdict on two replays and their comparison with the original run."""
    if not replays.compared:
        return "nothing compared"
    if not replays.equal:
        return "different"
    return "identical" if original.sides.equal or original.unlike else "unlike the run"


def show(report: ReplayReport, console: Console) -> None:
    """Print the report for people; green if bit-identical."""
    good = report.verdict == "identical"
    parts: list[RenderableType] = [Text(headline(report), style="bold"), *_body(report)]
    if report.hints:
        parts.append(Text("\nlook at:"))
        parts += [Text(f"  - {hint}") for hint in report.hints]
    if report.kept:
        parts.append(Text("\nkept, with logs and checkpoints:"))
        parts += [Text(f"  {path}", overflow="fold") for path in report.kept]
    title = f"replay of steps {report.from_step + 1} to {report.until_step}"
    style = "green" if good else "red"
    console.print(Panel(Group(*parts), title=title, title_align="left", border_style=style))


def headline(report: ReplayReport) -> str:
    """Return the verdict as one line."""
    steps = plural(report.until_step - report.from_step, "step")
    found = report.replays
    if report.verdict == "identical":
        return f"bit-identical: {steps} twice, in {duration(report.wall_s)}"
    if report.verdict == "nothing compared":
        return (
            "nothing was compared: the script reports no number, and ended before step"
            f" {report.until_step}"
        )
    if report.verdict == "unlike the run":
        return (
            f"bit-identical: {steps} twice, but the run itself went another way: it depended on"
            " something that its checkpoint lacks"
        )
    if found.parting is None:
        return (
            f"not deterministic: {plural(found.numbers, 'reported number')} of {steps} equal, and"
            f" what step {report.until_step} left is not"
        )
    return f"not deterministic: first{_where(found)}"


def _body(report: ReplayReport) -> Iterator[RenderableType]:
    found = report.replays
    if found.equal:
        yield Text(f"equal to the last bit: {_counts(found)}")
    if found.states is None:
        yield Text(
            f"the script ended before step {report.until_step}: no checkpoints were compared",
            style="yellow",
        )
    else:
        yield from _differing(found.states, report.until_step)
    yield Text(_original(report))
    if report.verdict == "unlike the run" and report.original.sides.states:
        yield from _differing(report.original.sides.states, report.until_step)


def _original(report: ReplayReport) -> str:
    """Describe the comparison with the run in a sentence."""
    found, unlike = report.original.sides, report.original.unlike
    if not found.compared:
        return "the original run: it has no values of these steps to compare"
    if found.equal:
        return f"the run itself: the same ({_counts(found)})"
    went = f"the run itself: other numbers{_where(found, ' again', ' then')}"
    if found.parting is None:
        went = f"the run itself: equal numbers, and another checkpoint of step {report.until_step}"
    if not unlike:
        return f"{went}, on the same host, software and script"
    changed = ", ".join(
        f"{name} {then or '?'} -> {now or '?'}" for name, (then, now) in unlike.items()
    )
    return f"{went}; this was otherwise then: {changed}"


def _where(found: RunPair, a: str = "", b: str = "") -> str:
    """Describe a difference: ` at step 10, rank 1: loss 0.5 and 0.25`; `a`, `b` name the sides."""
    if found.parting is None:
        return ""
    numbers = [_number(number, a, b) for number in found.parting.numbers[:_NUMBERS_MAX]]
    more = len(found.parting.numbers) - len(numbers)
    also = f" (and {more} more)" if more else ""
    return f" at step {found.parting.step}, {'; '.join(numbers)}{also}"


def _number(number: NumberDifference, a: str, b: str) -> str:
    one, two = (str(each) if each is not None else "nothing" for each in (number.a, number.b))
    return f"rank {number.rank}: {number.name} {one}{a} and {two}{b}"


def _counts(found: RunPair) -> str:
    parts = [plural(found.numbers, "number")]
    if states := found.states:
        parts += [plural(states.compared, "tensor"), f"own state of {plural(states.ranks, 'rank')}"]
    return ", ".join(parts)


def _differing(states: StateComparison, step: int) -> Iterator[RenderableType]:
    if states.tensors:
        count = f"{len(states.tensors)} of {plural(states.compared, 'tensor')}"
        yield Text(f"\nafter step {step}, {count}:")
        figures = ("differing", "of", "largest difference")
        grid = table(text_column("tensor"), *map(number_column, figures))
        for each in states.tensors[:_SHOWN_MAX]:
            apart = "NaN or infinite" if each.not_finite else f"{each.difference_max:.3g}"
            grid.add_row(Text(each.name), str(each.differing), str(each.elements), apart)
        yield grid
        if len(states.tensors) > _SHOWN_MAX:
            yield Text(f"and {len(states.tensors) - _SHOWN_MAX} more")
    if states.values:
        yield Text(f"\nafter step {step}, beside tensors:")
        for odd in states.values[:_SHOWN_MAX]:
            whose = f"rank {odd.rank}" if odd.rank >= 0 else "all ranks"
            both = odd.a if odd.a == odd.b else f"{odd.a or '(nothing)'} and {odd.b or '(nothing)'}"
            yield Text(f"  {whose}: {odd.path}: {both}")
        if len(states.values) > _SHOWN_MAX:
            yield Text(f"  and {len(states.values) - _SHOWN_MAX} more")
