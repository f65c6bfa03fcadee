"""`outlast ckpt diff`: differences of tensors and values between two checkpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import msgspec

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import digest_of
from outlast.checkpoint.format.value_encoder import BLOB_MAGIC
from outlast.checkpoint.load.checkpoint_diff import (
    TensorDifference,
    compare_tensors,
    suspect_tensors,
    value_differences,
)
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.cli.ckpt.target_argument import open_target
from outlast.cli.output_stream import byte_progress, echo, print_json
from outlast.cli.replay_comparison import DifferingValue
from outlast.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    ConfigError,
    CorruptionError,
    MismatchError,
    StorageError,
    UsageError,
)
from outlast.terminal_tables import listing, number_column, text_column
from outlast.text_formatting import plural
from outlast.worker.phases.script_progress import SEAT_MAGIC, part_summary


def compare_values(a: CheckpointReader, b: CheckpointReader) -> list[DifferingValue]:
    """Compare the shared values, then the values of each rank where both have as many ranks.

    Raises CorruptionError or StorageError as reading does.
    """
    worlds = a.checkpoint.commit.world, b.checkpoint.commit.world
    pieces = [(-1, 0, "shared")]
    if worlds[0] == worlds[1]:
        pieces += [(rank, rank, "own") for rank in range(worlds[0])]
    differences: list[DifferingValue] = []
    for rank, holder, name in pieces:
        one, two = _value_blob(a, holder, name), _value_blob(b, holder, name)
        if one != two:
            pair = _decoded(a, holder, one), _decoded(b, holder, two)
            differences += [
                DifferingValue(rank, value_difference.path, value_difference.a, value_difference.b)
                for value_difference in value_differences(*pair)
            ]
    return differences


def _value_blob(reader: CheckpointReader, rank: int, name: str) -> bytes:
    try:
        return reader.blob(rank, name)
    except MismatchError:  # it has none
        return b""


def _decoded(reader: CheckpointReader, rank: int, data: bytes) -> Any:
    """Decode a value; return the digest of bytes that are no value of ours."""
    if data.startswith(SEAT_MAGIC):
        return part_summary(data, f"{reader.checkpoint.where}, rank {rank}")
    if data.startswith(BLOB_MAGIC):
        return codec.decode(data)
    return {"digest": digest_of(data)} if data else {}


_ROWS_MAX = 40


class DiffReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `tensors` and `values` are those that differ."""

    a: str
    b: str
    equal: bool
    compared: int
    tensors: list[TensorDifference]
    values: list[DifferingValue]


def diff(
    a: str,
    b: str,
    *,
    step: int | None = None,
    step_b: int | None = None,
    tensors: str = "*",
    tolerance: float | None = None,
    json: bool = False,
) -> int:
    """Compare two checkpoints by tensors and values.

    The comparison is bitwise: a NaN equals itself, -0.0 differs from 0.0. The
    numbers of ranks may differ. Data with equal digests is not read.

    Exit code 0: equal. 1: different. 2: one of them is damaged or could not be
    read.

    Parameters
    ----------
    a
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    b
        Checkpoint to compare with, given as A is.
    step
        Step of both checkpoints (default: the newest of each).
    step_b
        Step of B, if it differs from --step.
    tensors
        Compare only tensors whose names match this pattern, for example `model.*`, and no values.
    tolerance
        Treat numbers as equal if they differ by at most this, and all NaNs as equal (default:
        bitwise).
    json
        Print one JSON object.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"--tolerance {tolerance}: must be 0 or more")
    try:
        one = open_target(a).open(step)
        two = open_target(b).open(step if step_b is None else step_b)
        report = _compared(one, two, tensors, tolerance)
    except (CorruptionError, StorageError) as error:
        # As with diff and cmp, an error has an exit code of its own.
        raise UsageError(f"{error}; the two could not be compared") from error
    if json:
        print_json(report)
    else:
        _print(report)
    return EXIT_DONE if report.equal else EXIT_USER_ERROR


def _compared(
    one: Checkpoint, two: Checkpoint, pattern: str, tolerance: float | None
) -> DiffReport:
    names = {name for name in {**one.tensors, **two.tensors} if fnmatchcase(name, pattern)}
    if not names and pattern != "*":
        raise UsageError(f"no tensor of either checkpoint matches {pattern!r}")
    readers = CheckpointReader(one), CheckpointReader(two)
    tensor_names = names & suspect_tensors(one, two)
    with byte_progress("comparing") as advance:
        found = list(
            compare_tensors(
                *readers, wanted=tensor_names.__contains__, tolerance=tolerance, on_progress=advance
            )
        )
    odd = compare_values(*readers) if pattern == "*" else []
    same = not odd and not any(_differs(each, tolerance) for each in found)
    return DiffReport(
        a=one.where, b=two.where, equal=same, compared=len(names), tensors=found, values=odd
    )


def _differs(difference: TensorDifference, tolerance: float | None) -> bool:
    """Return whether two tensors differ; an element type alone counts only without tolerance."""
    comparable = bool(difference.elements)
    return bool(difference.differing) or not (comparable and tolerance is not None)


def _print(report: DiffReport) -> None:
    echo(f"A {report.a}")
    echo(f"B {report.b}")
    if report.tensors:
        figures = map(number_column, ("differing", "of", "largest"))
        table = listing(text_column("tensor"), *figures, text_column())
        for tensor in sorted(report.tensors, key=_weight)[:_ROWS_MAX]:
            compared = tensor.elements > 0
            values = (str(tensor.differing), str(tensor.elements), f"{tensor.difference_max:.3g}")
            table.add_row(tensor.name, *(values if compared else ("", "", "")), _note(tensor))
        echo(table)
        if rest := report.tensors[_ROWS_MAX:]:
            echo(f"and {plural(len(rest), 'more tensor')}: --json has all, --tensors chooses")
    for value in report.values[:_ROWS_MAX]:
        owner = f"rank {value.rank}: " if value.rank >= 0 else ""
        rest, right = value.a or "(not in A)", value.b or "(not in B)"
        echo(f"{owner}{value.path}: {rest} -> {right}")
    if more := report.values[_ROWS_MAX:]:
        echo(f"and {plural(len(more), 'more value')}: --json has all")
    compared = plural(report.compared, "tensor")
    if not report.tensors and not report.values:
        echo(f"equal to the last bit: {compared}")
        return
    verdict = "equal within the tolerance" if report.equal else "different"
    beside = f" and {plural(len(report.values), 'value')}" if report.values else ""
    echo(f"{verdict}: {len(report.tensors)} of {compared}{beside}")


def _weight(difference: TensorDifference) -> tuple[bool, bool, float, str]:
    """Return the sort key of a difference: not comparable first, by distance, counters last."""
    return (
        difference.elements > 0,
        difference.elements == 1,
        -difference.difference_max,
        difference.name,
    )


def _note(difference: TensorDifference) -> str:
    if not difference.a:
        return f"only in B: {difference.b}"
    if not difference.b:
        return f"only in A: {difference.a}"
    notes = (
        [f"A {difference.a}, B {difference.b}"] if difference.a != difference.b else [difference.a]
    )
    notes += [f"{difference.not_finite} NaN or infinite"] if difference.not_finite else []
    return "; ".join(notes)
