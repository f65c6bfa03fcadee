"""What carried variables cost a phase, and what positions of loaders cost a batch.

A job of one rank changes variables that nobody protects; runs with and without them take turns, and
the difference of their median steps is the cost. The alternative is one `copy.deepcopy` of the same
values a phase, which alone undoes and hands on nothing; the limit is one copy of the
encoded bytes. Loaders: a batch by torch's DataLoader, and by ours with its position encoded, in
turn. All of processor time of the main thread. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import OUTLAST, WORLD, Spread, clocked, job, load, median, spread, table, verdict
from torch.utils.data import DataLoader, Sampler
from workload import Noise

from outlast.checkpoint.format import codec
from outlast.data.batch_source import open_source
from outlast.data.counted_source import Codec
from outlast.data.draw_counts import count_between

ONE_RANK = tuple(word.replace(f"={WORLD}", "=1") for word in OUTLAST)
CASES = (
    *(("numbers", count) for count in (10, 100, 1_000)),
    *((kind, count) for kind in ("list", "dict") for count in (1_000, 10_000)),
    ("array", 100_000),
)
WARM = 8  # steps with rehearsals, and with looks at what changes
MICROSECONDS_MAX = 50.0  # of a carried number, a phase
BATCHES, BATCH = 60, 8
DRAWS = (0, 1_000, 1_000_000)  # of the model, between two of the sampler
CALLS = 20


class Carried(NamedTuple):
    """One kind of variables: microseconds a phase beyond a run without them, one reading a turn."""

    kind: str
    size: int
    cost_us: list[float]
    deepcopy_us: list[float]
    copy_us: list[float]
    load: float


def step_us(kind: str, count: int, steps: int) -> float:
    with job(
        ONE_RANK, "carried_job.py", "--steps", steps, "--kind", kind, "--count", count
    ) as done:
        costs: Any = done.figures["costs_s"]
        return 1e6 * median(costs[WARM:])


def measure_carried(repeats: int, steps: int) -> list[Carried]:
    found = [Carried(kind, count, [], [], [], load()) for kind, count in CASES]
    for turn in range(repeats):
        for one in found:
            without_us = step_us("numbers", 0, steps)
            one.cost_us.append(step_us(one.kind, one.size, steps) - without_us)
            values = values_of(one.kind, one.size)
            one.deepcopy_us.append(call_us(partial(copy.deepcopy, values)))
            one.copy_us.append(call_us(partial(bytearray, codec.encode(values))))
        print(f"carried {turn + 1}/{repeats}", file=sys.stderr, flush=True)
    return [one._replace(load=max(one.load, load())) for one in found]


def values_of(kind: str, count: int) -> Any:
    """Return the values of benchmarks/carried_job.py."""
    if kind == "array":
        return np.zeros(count, np.float32)
    numbers = [float(number) for number in range(count)]
    return {str(int(number)): number for number in numbers} if kind == "dict" else numbers


def call_us(what: Callable[[], object]) -> float:
    return 1e6 * median([clocked(what).cpu_s for _ in range(CALLS)])


class DrawnInTurn(Sampler[list[int]]):
    """Indices drawn from torch's own generator with each batch, as the model's dropout is."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(0, 1 << 16, (BATCH,)).tolist()


def measure_loader(draws: int, repeats: int) -> tuple[Spread, Spread]:
    """Return microseconds a batch by torch's loader, and what ours takes beyond it."""
    plain_us: list[float] = []
    more_us: list[float] = []
    for _ in range(repeats):
        plain = iter(DataLoader(Noise(), batch_sampler=DrawnInTurn()))
        source = open_source(
            DataLoader(Noise(), batch_sampler=DrawnInTurn()), Codec(codec.encode, codec.decode)
        )
        source.start_epoch(0, None)

        def ours(source: Any = source) -> None:
            codec.encode(source.position())
            source.next()

        for batch in range(BATCHES):
            taken = []
            for way in (partial(next, plain), ours):
                torch.rand(draws)
                taken.append(1e6 * clocked(way).cpu_s)
            if batch >= WARM:
                plain_us.append(taken[0])
                more_us.append(taken[1] - taken[0])
        source.close()
    return spread(plain_us), spread(more_us)


def measure_counts(draws: int) -> tuple[float, float]:
    """Return microseconds to count draws between two states, without and with the right guess."""
    before = torch.get_rng_state()
    torch.rand(draws)
    after = torch.get_rng_state()
    count = count_between(before, after)
    assert count is not None
    return (
        call_us(partial(count_between, before, after)),
        call_us(partial(count_between, before, after, count.draws)),
    )


def between(values: Spread) -> str:
    return f"{values.median:.0f} ({values.low:.0f} to {values.high:.0f})"


def show_carried(found: list[Carried]) -> None:
    table(
        ("variables", "us a phase", "us each", "deepcopy once, us", "ours / deepcopy", "copy, us",
         "load"),
        [
            (
                f"{one.kind} {one.size:,}", between(spread(one.cost_us)),
                f"{median(one.cost_us) / one.size:.2f}", f"{median(one.deepcopy_us):.0f}",
                f"{median(one.cost_us) / median(one.deepcopy_us):.1f}",
                f"{median(one.copy_us):.1f}", f"{one.load:.1f}",
            )
            for one in found
        ],
    )  # fmt: skip
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--part", choices=("variables", "loaders"), help="one part alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"repeats": args.repeats}
    bars = {}
    if args.part in (None, "variables"):
        found = measure_carried(args.repeats, args.steps)
        show_carried(found)
        figures["variables"] = [one._asdict() for one in found]
        each_us = median(found[2].cost_us) / found[2].size
        bars["us a phase for each of 1,000 numbers"] = (each_us, MICROSECONDS_MAX)
    if args.part in (None, "loaders"):
        rows = []
        for draws in DRAWS:
            plain, more = measure_loader(draws, args.repeats)
            searched, guessed = measure_counts(draws)
            rows.append((f"{draws:,}", between(plain), between(more), f"{searched:.0f}",
                         f"{guessed:.0f}", f"{load():.1f}"))  # fmt: skip
            figures[f"loader, {draws} draws"] = {
                "plain_us": plain, "more_us": more, "searched_us": searched, "guessed_us": guessed,
            }  # fmt: skip
        table(
            ("draws between", "DataLoader, us a batch", "ours beyond it, us", "count, us",
             "count with guess, us", "load"),
            rows,
        )  # fmt: skip
    return verdict("carried", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
