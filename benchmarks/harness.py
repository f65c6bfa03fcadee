"""Starts a job, waits for it inside a deadline, and reads what its ranks wrote down."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from workload import WORLD

from outlast.config import child_environment

HERE = Path(__file__).parent
DEADLINE_S = 900.0
TAIL = 0.025  # of a median's interval, on each side
_RESAMPLES = 2000
# A library is compiled once, when it is installed, and so is ours: also where this is set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone",
    f"--nproc-per-node={WORLD}", "--monitor-interval=0.1",
)  # fmt: skip
OUTLAST = (
    sys.executable, "-m", "outlast", "run", "--plain", "--run-dir={folder}/run",
    f"--nproc-per-node={WORLD}",
)  # fmt: skip
# Without it torchrun's restarted workers may read the addresses of the dead ones.
FAIR = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


class Place(NamedTuple):
    """Where the ranks of a job compute, and how many there are."""

    device: str = "cpu"
    ranks: int = WORLD

    def argv(self, launcher: tuple[str, ...]) -> tuple[str, ...]:
        """Return the launcher's words with this number of ranks, for which the last flag counts."""
        return (*launcher, f"--nproc-per-node={self.ranks}")


class Line(NamedTuple):
    """`rank` had committed `step` at `t_ns` (monotonic)."""

    rank: int
    step: int
    t_ns: int


class Job(NamedTuple):
    """What one job left. `killed_ns` is 0 when nothing was killed."""

    folder: Path
    lines: list[Line]
    killed_ns: int
    figures: dict[str, float]

    def step_s(self) -> float:
        """Median step of the undisturbed part, without the first three."""
        times = [
            line.t_ns
            for line in self.lines
            if line.rank == 0 and line.step > 3 and not 0 < self.killed_ns < line.t_ns
        ]
        return statistics.median(b - a for a, b in itertools.pairwise(times)) / 1e9

    def turns_s(self, block: int) -> list[list[float]]:
        """Steps of rank 0 by turn of `block` steps, without the first turn and without the first
        step of each, which begins with a wait for the other job."""
        times = {line.step: line.t_ns for line in self.lines if line.rank == 0}
        turns: dict[int, list[float]] = {}
        for step in sorted(times):
            if step > block and (step - 1) % block:
                took_s = (times[step] - times[step - 1]) / 1e9
                turns.setdefault((step - 1) // block, []).append(took_s)
        return list(turns.values())

    def back_s(self, step: int, *, without: int | None = None) -> float:
        """From the kill until every rank has committed `step`; `without`: every other rank."""
        ranks = {line.rank for line in self.lines} - {without}
        first: dict[int, int] = {}
        for line in self.lines:
            if line.step == step and line.t_ns > self.killed_ns and line.rank in ranks:
                first.setdefault(line.rank, line.t_ns)
        if len(first) < len(ranks) or not self.killed_ns:
            raise SystemExit(f"step {step} did not come back on every rank: see {self.folder}")
        return (max(first.values()) - self.killed_ns) / 1e9


@contextmanager
def job(command: tuple[str, ...], script: str, *flags: object) -> Iterator[Job]:
    """Run `command script folder *flags` in a fresh folder, which goes when the block ends well."""
    folder = Path(tempfile.mkdtemp(prefix="outlast-bench-"))
    launcher = [word.replace("{folder}", str(folder)) for word in command]
    argv = [*launcher, str(HERE / script), str(folder), *map(str, flags)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, env=child_environment(FAIR)
        )
        try:
            code = process.wait(DEADLINE_S)
        except BaseException:  # also Ctrl-C: the launcher stops its workers on SIGTERM
            process.terminate()
            process.wait(30)
            raise
    if code:
        tail = (folder / "output").read_text(errors="replace")[-3000:]
        raise SystemExit(f"{' '.join(argv)} ended with {code}; {folder}/output ends:\n{tail}")
    rows = (folder / "ledger").read_text().splitlines()
    killed, figures = folder / "killed", folder / "figures.json"
    yield Job(
        folder,
        [Line(*map(int, row.split())) for row in rows],
        int(killed.read_text()) if killed.exists() else 0,
        json.loads(figures.read_text()) if figures.exists() else {},
    )
    shutil.rmtree(folder)


def median(values: list[float]) -> float:
    return statistics.median(values)


class Spread(NamedTuple):
    """A median, and the interval that holds it with 95 % confidence."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median with its interval by order statistics, which assume no distribution. Below
    six values the interval is their whole range, and holds less than 95 %."""
    ordered, count = sorted(values), len(values)
    tail, below = 0.0, 0
    while (tail := tail + math.comb(count, below) / 2**count) <= TAIL and below < count // 2:
        below += 1
    first = max(0, below - 1)
    return Spread(statistics.median(ordered), ordered[first], ordered[count - 1 - first])


def bootstrap_ratio(below: Sequence[float], above: Sequence[float]) -> Spread:
    """Return the median of `above / below`, figures of turns in pairs, with its 95 % interval.

    Pairs are drawn with replacement 2,000 times (percentile bootstrap; Efron, Tibshirani: An
    Introduction to the Bootstrap, 1993, section 13.3). Seeded.
    """
    ratios = [b / a for a, b in zip(below, above, strict=True)]
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    first = int(_RESAMPLES * TAIL)
    return Spread(statistics.median(ratios), medians[first], medians[_RESAMPLES - 1 - first])


class Clock(NamedTuple):
    """Seconds that a call took: of this thread's processor time, and of the clock on the wall."""

    cpu_s: float
    wall_s: float


def clocked(what: Callable[[], object]) -> Clock:
    """Time one call. Processor time counts on a machine with other work to do."""
    cpu, begin = time.thread_time(), time.perf_counter()
    what()
    return Clock(time.thread_time() - cpu, time.perf_counter() - begin)


def load() -> float:
    """Return the machine's load: processes that ran or wanted to, over the last minute."""
    return os.getloadavg()[0]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, tuple("-" * w for w in widths), *rows]:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def verdict(name: str, figures: Mapping[str, Any], bars: Mapping[str, tuple[float, float]]) -> int:
    """Print each bar (figure, limit), then everything as one line of JSON; 1 if a bar is missed."""
    met = {bar: figure <= limit for bar, (figure, limit) in bars.items()}
    print()
    table(
        ("bar", "figure", "limit", ""),
        [
            (bar, f"{figure:.4g}", f"{limit:.4g}", "met" if met[bar] else "MISSED")
            for bar, (figure, limit) in bars.items()
        ],
    )
    document = {
        "benchmark": name,
        "figures": dict(figures),
        "bars": {
            bar: {"figure": figure, "limit": limit, "met": met[bar]}
            for bar, (figure, limit) in bars.items()
        },
        "all_met": all(met.values()),
    }
    print(json.dumps(document))
    return 0 if all(met.values()) else 1
