"""Comparison of two replays with each other and with the original run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

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
from outlast.cli.run_comparison import Losses, bits
from outlast.worker.phases.script_progress import part_summary

UNKEPT = (
    "what the script changes from step to step and gave neither to session.protect nor to"
    " session.state: a global, an attribute, a file; or what it read from outside then"
)
_ELSEWHERE = ("script",)  # of a checkpoint's origin: where the script lay changes no bit


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
    one, two = bits(a), bits(b)
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
            f"it begins on {_ranks(alone)} alone: in its data, its generators or its hardware, and"
            " not in what all ranks compute together"
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
        lines.append(f"{here['threads']} threads a rank: a sum may be split otherwise; try 1")
    lines.append(
        "what a script takes from a clock, uuid, os.urandom, its pid or its run directory is"
        " another one each time"
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
