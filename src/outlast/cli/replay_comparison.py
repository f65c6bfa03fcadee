"""Comparison of two replays with each other and with the original run, and its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from outlast.checkpoint.format import codec
from outlast.checkpoint.load.checkpoint_diff import (
    TensorDifference,
    ValueDifference,
    compare_tensors,
    suspect_tensors,
    value_differences,
)
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.telemetry.event_store import Losses, bit_texts
from outlast.terminal_tables import number_column, table, text_column
from outlast.text_formatting import duration, plural
from outlast.worker.phases.script_progress import part_summary

UNKEPT = (
    "state that the script changes from step to step without session.protect or session.state:"
    " a global, an attribute, a file; or input from outside the script"
)
_ELSEWHERE = ("script",)  # parts of a checkpoint's origin that change no bits


class NumberDifference(msgspec.Struct, frozen=True):
    """A number that one rank reported for one step in both runs; None where it is missing.

    JSON has no number for what is not finite: that is "nan", "inf" or "-inf".
    """

    rank: int
    name: str
    a: float | str | None
    b: float | str | None


class FirstDifference(msgspec.Struct, frozen=True):
    """The first step at which reported numbers differ, and those numbers."""

    step: int
    numbers: list[NumberDifference]


class DifferingValue(msgspec.Struct, frozen=True):
    """A value in a checkpoint that differs; `rank` -1: one that all ranks share."""

    rank: int
    path: str
    a: str
    b: str


class StateComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two checkpoints of one step. `tensors` and `values` are those that differ."""

    compared: int
    ranks: int
    tensors: list[TensorDifference]
    values: list[DifferingValue]

    @property
    def equal(self) -> bool:
        """True if no tensor and no value differs."""
        return not self.tensors and not self.values


class RunPair(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs of the same steps. `states` is None where one has no checkpoint at the end."""

    numbers: int
    parting: FirstDifference | None
    states: StateComparison | None

    @property
    def equal(self) -> bool:
        """True if no number differs and, where both have a final checkpoint, no state."""
        return self.parting is None and (self.states is None or self.states.equal)

    @property
    def compared(self) -> bool:
        """True if the two runs have any step, number or state in common."""
        return self.numbers > 0 or self.states is not None


def sides(
    a: Losses,
    b: Losses,
    one: Checkpoint | None,
    two: Checkpoint | None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> RunPair:
    """Return the numbers by (rank, step, name), and the contents of the two checkpoints.

    Raises CorruptionError or StorageError where one of them cannot be read.
    """
    return RunPair(
        numbers=len(a.keys() | b.keys()),
        parting=parting(a, b),
        states=states(one, two, on_progress) if one and two else None,
    )


def parting(a: Losses, b: Losses) -> FirstDifference | None:
    """Return the first step at which the numbers of two runs differ.

    A number that only one run has is a difference.
    """
    one, two = bit_texts(a), bit_texts(b)
    apart = [key for key in one.keys() | two.keys() if one.get(key) != two.get(key)]
    if not apart:
        return None
    step = min(key[1] for key in apart)
    return FirstDifference(
        step,
        [
            NumberDifference(k[0], k[2], _json_number(a.get(k)), _json_number(b.get(k)))
            for k in sorted(apart)
            if k[1] == step
        ],
    )


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def states(
    one: Checkpoint, two: Checkpoint, on_progress: Callable[[int, int], None]
) -> StateComparison:
    """Compare two checkpoints bit by bit; equal digests of chunks spare the reading."""
    readers = CheckpointReader(one), CheckpointReader(two)
    tensors = compare_tensors(
        *readers, wanted=suspect_tensors(one, two).__contains__, on_progress=on_progress
    )
    found = list(tensors)
    values = list(_odd(-1, _decoded(readers, 0, "shared")))
    ranks = min(one.commit.world, two.commit.world)
    for rank in range(ranks):
        values += _odd(rank, _decoded(readers, rank, "own"))
    return StateComparison(compared=len(one.tensors), ranks=ranks, tensors=found, values=values)


def origin_differences(
    there: Mapping[str, str], here: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return the differences between two checkpoints' origins that may change bits."""
    names = sorted({**there, **here}.keys() - set(_ELSEWHERE))
    pairs = {name: (there.get(name, ""), here.get(name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def hints(found: RunPair, origins: tuple[Mapping[str, str], Mapping[str, str]]) -> list[str]:
    """Return likely causes of a difference, the likeliest first."""
    here, again = origins
    lines: list[str] = []
    values = found.states.values if found.states else []
    drawn = sorted({odd.rank for odd in values if odd.path.startswith("random.")})
    if drawn:
        lines.append(
            f"random generators of {_ranks(drawn)} differ: seeded from a clock or os.urandom, or"
            " drawn from more often in one run than in the other"
        )
    fed = sorted({odd.rank for odd in values if odd.path.startswith("batch.")})
    if fed:
        lines.append(
            f"the data position of {_ranks(fed)} differs: a sampler or a loader that is not seeded,"
            " or whose order depends on timing"
        )
    paths = sorted(
        {odd.path.removeprefix("objects.") for odd in values if odd.path.startswith("objects.")}
    )
    if paths:
        lines.append(f"the script's own objects differ: {', '.join(paths[:4])}")
    alone = sorted({number.rank for number in found.parting.numbers}) if found.parting else []
    if found.parting and found.states and len(alone) < found.states.ranks:
        lines.append(
            f"it begins on {_ranks(alone)} alone: in its data, its generators or its hardware,"
            " not in collectives"
        )
    if here.get("hash") != again.get("hash"):
        lines.append("hashes of text differ: set PYTHONHASHSEED=0, or sort what comes from a set")
    if here.get("device") == "cuda":
        if here.get("cudnn_benchmark") == "True":
            lines.append(
                "torch.backends.cudnn.benchmark chooses kernels by their time: turn it off"
            )
        if here.get("deterministic") != "True":
            lines.append(
                "torch.use_deterministic_algorithms(True), with CUBLAS_WORKSPACE_CONFIG=:4096:8,"
                " names kernels whose sums have no fixed order"
            )
    elif here.get("threads", "1") != "1":
        lines.append(f"{here['threads']} threads a rank: sums may be split differently; try 1")
    lines.append(
        "values from a clock, uuid, os.urandom, the pid or the run directory differ between runs"
    )
    return lines


def _odd(rank: int, found: Iterable[ValueDifference]) -> Iterable[DifferingValue]:
    return (DifferingValue(rank, each.path, each.a, each.b) for each in found)


def _decoded(
    readers: tuple[CheckpointReader, CheckpointReader], rank: int, name: str
) -> list[ValueDifference]:
    one, two = (reader.blob(rank, name) for reader in readers)
    if one == two:
        return []
    pair: list[Any] = [
        codec.decode(data)
        if name == "shared"
        else part_summary(data, f"{reader.checkpoint.where}, {rank}")
        for reader, data in zip(readers, (one, two), strict=True)
    ]
    return value_differences(*pair)


def _ranks(ranks: list[int]) -> str:
    names = [f"rank {rank}" if rank >= 0 else "all ranks" for rank in ranks]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")


_SHOWN_MAX = 12
_NUMBERS_MAX = 4

Verdict = Literal[
    "identical",  # both replays, and the run itself as far as it was compared
    "different",  # the replays differ
    "unlike the run",  # the replays are equal, the run differs, and nothing else changed
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
            "nothing was compared: the script reported no number and ended before step"
            f" {report.until_step}"
        )
    if report.verdict == "unlike the run":
        return (
            f"bit-identical: {steps} twice, but the run itself differs: it depended on state"
            " that its checkpoint does not hold"
        )
    if found.parting is None:
        return (
            f"not deterministic: {plural(found.numbers, 'reported number')} of {steps} equal,"
            f" but the checkpoints of step {report.until_step} differ"
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
        return "the original run has no values of these steps to compare"
    if found.equal:
        return f"the run itself: equal ({_counts(found)})"
    went = f"the run itself: different numbers{_where(found, ' again', ' then')}"
    if found.parting is None:
        went = (
            f"the run itself: equal numbers, but a different checkpoint of step {report.until_step}"
        )
    if not unlike:
        return f"{went}, on the same host, software and script"
    changed = ", ".join(
        f"{name} {then or '?'} -> {now or '?'}" for name, (then, now) in unlike.items()
    )
    return f"{went}; the environment changed (then -> now): {changed}"


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
