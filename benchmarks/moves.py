"""Move a rank on notice: how much longer than a step do all ranks take between two commits?

Hot and warm spares, with `outlast drain`; medians. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness import (
    DEADLINE_S,
    FAIR,
    HERE,
    OUTLAST,
    WORLD,
    child_environment,
    load,
    median,
    spread,
    table,
    verdict,
)

from outlast import events
from outlast.errors import RunDirError
from outlast.telemetry.event_store import read_events

STEPS, NOTICE_AT, RANK, SIZE = 40, 12, 1, "400ms"
SETTLED = 3  # steps at the start, and behind the move, that count as no usual ones


class Variant(NamedTuple):
    """Flags of the launcher, how the model is divided, and whether spares are prepared."""

    spares: int
    parallel: str = "ddp"
    hot: bool = False


VARIANTS = {
    "hot spare": Variant(1, hot=True),
    "warm spare": Variant(1),
    "hot spare, compiled": Variant(1, "compiled", hot=True),
    "hot spares, HSDP": Variant(2, "hsdp", hot=True),
}


class Move(NamedTuple):
    """Seconds. `cost_s`: from the last commit before the move to the first one behind it, of the
    slowest rank, less a usual step. `copy_s`: the slowest transfer of the state. `lost`: committed
    steps that some rank committed again."""

    cost_s: float
    step_s: float
    copy_s: float
    lost: int
    parts_s: dict[str, float]


def move(variant: Variant) -> Move:
    """Run the job, give a notice to a rank, and measure the move."""
    folder = Path(tempfile.mkdtemp(prefix="outlast-bench-"))
    hot = ("--hot-spares",) if variant.hot else ()
    launcher = [word.replace("{folder}", str(folder)) for word in OUTLAST]
    script = (str(HERE / "outlast_job.py"), str(folder), f"--steps={STEPS}", f"--size={SIZE}")
    argv = [*launcher, f"--spares={variant.spares}", *script, f"--parallel={variant.parallel}"]
    run_dir = folder / "run"
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*argv, *hot], stdout=output, stderr=subprocess.STDOUT, env=child_environment(FAIR)
        )
        try:
            _wait(lambda: _step(run_dir) >= NOTICE_AT and _is_ready(run_dir, variant), process)
            words = ("drain", str(run_dir), f"--rank={RANK}")
            subprocess.run(
                [sys.executable, "-m", "outlast", *words], check=True, timeout=DEADLINE_S
            )
            code = process.wait(DEADLINE_S)
        except BaseException:
            process.terminate()
            process.wait(30)
            raise
    if code:
        raise SystemExit(f"{' '.join(argv)} ended with {code}: see {folder}/output")
    found = _measure(read_events(run_dir), folder)
    shutil.rmtree(folder)
    return found


def _wait(is_true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end_s, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not is_true():
        if time.monotonic() > end_s or process.poll() is not None:
            raise SystemExit("the run did not come to the step of the notice")
        pause.wait(0.1)


def _story(run_dir: Path) -> list[events.AnyEvent]:
    try:
        return read_events(run_dir)
    except RunDirError:
        return []


def _step(run_dir: Path) -> int:
    found = [event.step for event in _story(run_dir) if isinstance(event, events.PhaseDone)]
    return max(found, default=0)


def _is_ready(run_dir: Path, variant: Variant) -> bool:
    """Return whether all spares are as warm or hot as they will be."""
    story = _story(run_dir)
    warm = sum(isinstance(event, events.WorkerWarm) for event in story)
    notes = [event.text for event in story if isinstance(event, events.Note)]
    hot = sum("prepared up to" in text for text in notes)
    return warm >= WORLD + variant.spares and (not variant.hot or hot >= variant.spares)


def _measure(story: list[events.AnyEvent], folder: Path) -> Move:
    (decided,) = [e for e in story if isinstance(e, events.Decided)]
    if decided.rung != "migrate":
        raise SystemExit(f"{decided.rung} in place of a move: see {folder}")
    done = [e for e in story if isinstance(e, events.PhaseDone) and e.kind == "step"]
    before = {e.seat: e.t_ns for e in done if e.n == decided.n}
    behind = {e.seat: e.t_ns for e in done if e.n == decided.n + 1}
    stand_s = (max(behind.values()) - min(before.values())) / 1e9
    by_n: dict[int, int] = {}
    for event in done:
        by_n[event.n] = max(by_n.get(event.n, 0), event.t_ns)
    usual = [
        (by_n[n] - by_n[n - 1]) / 1e9
        for n in by_n
        if n - 1 in by_n and (SETTLED < n <= decided.n or n > decided.n + SETTLED)
    ]
    moved = [e for e in story if isinstance(e, events.Transferred)]
    copy_s = max((e.seconds for e in moved), default=0.0)
    seen = [(e.seat, e.step) for e in done]
    return Move(
        stand_s - median(usual), median(usual), copy_s, len(seen) - len(set(seen)), _parts(story)
    )


def _parts(story: list[events.AnyEvent]) -> dict[str, float]:
    """Return the times of the stages of the move, from the end of the generation on."""
    kinds = (events.GenerationClosed, events.Decided, events.JoinerReady, events.Connected)
    times: dict[str, int] = {}
    closed = next(e.t_ns for e in story if isinstance(e, events.GenerationClosed))
    opened = next(e for e in story if isinstance(e, events.GenerationOpened) and e.t_ns > closed)
    for event in story:
        if isinstance(event, kinds) and closed < event.t_ns <= opened.t_ns:
            times[type(event).__name__] = event.t_ns
    times["GenerationOpened"] = opened.t_ns
    return {name: (t_ns - closed) / 1e9 for name, t_ns in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    runs: dict[str, list[Move]] = {name: [] for name in VARIANTS if name in args.only}
    for turn in range(args.repeats):
        for name, found in runs.items():
            found.append(move(VARIANTS[name]))
            took = f"{name} {found[-1].cost_s:.2f} s {found[-1].parts_s}"
            print(f"{turn + 1}/{args.repeats} {took}", file=sys.stderr, flush=True)
    rows, bars = [], {}
    figures: dict[str, object] = {"load": load()}
    for name, found in runs.items():
        cost = spread([each.cost_s for each in found])
        step_s = median([each.step_s for each in found])
        copy_s = median([each.copy_s for each in found])
        figures[name] = {"cost_s": cost, "step_s": step_s, "copy_s": copy_s}
        rows.append(
            (
                name,
                f"{cost.median:.2f}",
                f"{cost.low:.2f} to {cost.high:.2f}",
                f"{cost.median / step_s:.2f}",
                f"{step_s:.3f}",
                f"{copy_s:.3f}",
                str(sum(each.lost for each in found)),
            )
        )
        bars[f"{name}, s"] = (cost.median, step_s + copy_s)
    bars["committed steps lost"] = (float(sum(m.lost for each in runs.values() for m in each)), 0.0)
    head = ("move of rank 1 of 4", "median s", "range", "steps", "step s", "copy s", "steps lost")
    table(head, rows)
    return verdict("moves", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
