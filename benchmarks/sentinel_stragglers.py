"""Slow ranks: precision and recall on synthetic series, a real slow rank, and what it costs.

The cost is that of the calls that measure own time, in pairs of turns with and without them, as a
share of a step of 100 ms with 20 collectives; and the controller's time for a row of 16,384 ranks.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import HERE, Spread, load, spread, table
from straggler_job import STEPS

from outlast import events
from outlast.controller.sentinels.straggler_detection import (
    RankTime,
    StepRow,
    StragglerRecord,
    observe,
)
from outlast.telemetry.event_store import read_events
from outlast.testing.sentinels.straggler_series import draw_mix, draw_series, judge, score
from outlast.transport.worker_page import Page
from outlast.worker.sentinels.own_time import OwnTime

FACTOR, SINCE, RANK = 1.3, 60, 1
COLLECTIVES, STEP_S = 20, 0.1
TURNS, CALLS = 40, 500
WORLD = 16_384
CALM = ("uneven", "noise", "warm-up", "pauses", "saves", "trend", "epochs")


def cost() -> Spread:
    """Return the seconds that measuring adds to a step, by turns in pairs."""
    page, own = Page.create(), OwnTime()

    def measured(step: int) -> None:
        own.enter_phase(time.monotonic_ns(), 1)
        for _ in range(COLLECTIVES):
            own.future_taken()
            with own.wait():
                pass
        own.enter_vote(time.monotonic_ns())
        own.won(time.monotonic_ns(), page, step=step, is_step=True, kind="step f")

    def plain(_step: int) -> None:
        for _ in range(3):
            time.monotonic_ns()  # the status reads the clock at these places anyway
        for _ in range(COLLECTIVES):
            pass

    def turn(what: Any) -> float:
        begun = time.perf_counter()
        for step in range(CALLS):
            what(step)
        return (time.perf_counter() - begun) / CALLS

    turn(measured)
    pairs = [(turn(plain), turn(measured)) for _ in range(TURNS)]
    page.close()
    return spread([b - a for a, b in pairs])


def row_s() -> Spread:
    """Return the controller's time for one row of all ranks."""
    dice, record = random.Random(1), StragglerRecord()
    times = []
    for step in range(1, 40):
        ranks = {rank: RankTime(0.1 * (1 + dice.gauss(0, 0.03))) for rank in range(WORLD)}
        row = StepRow(step, 1, 0.13, ranks)
        begun = time.perf_counter()
        observe(record, row, [range(WORLD)])
        times.append(time.perf_counter() - begun)
    return spread(times[10:])


def real_run() -> dict[str, float]:
    """Return after how many steps a real slow rank was named, and what the move cost and brought.
    -1: never."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        fault = f"--fault=slow:rank={RANK},step={SINCE},factor={FACTOR}"
        words = ("run", "--plain", "--nproc-per-node=4", "--spares=1", f"--run-dir={run}", fault)
        command = [sys.executable, "-m", "outlast", *words, "--limit=straggler_wait_s=3"]
        subprocess.run([*command, str(HERE / "straggler_job.py")], check=True, timeout=600)
        found = read_events(run)
    steps = [e for e in found if isinstance(e, events.PhaseDone) and e.kind == "step"]
    warned = [e for e in found if isinstance(e, events.Warned) and e.check == "straggler"]
    named = next((e for e in warned if e.device == f"rank {RANK}"), None)
    done = max((e.step for e in steps if named and e.t_ns <= named.t_ns), default=-1)
    moved = [e for e in found if isinstance(e, events.Decided) and e.rung == "migrate"]

    def pace_ms(first: int, last: int) -> float:
        times = {e.step: e.t_ns for e in steps if e.seat == 0 and first <= e.step <= last}
        return (times[last] - times[first]) / (last - first) / 1e6

    return {
        "named after, steps": done - SINCE + 1 if named else -1,
        "others named": len({e.device for e in warned} - {f"rank {RANK}", ""}),
        "moves": len(moved),
        "before, ms": pace_ms(10, SINCE - 2),
        "slow, ms": pace_ms(SINCE + 2, SINCE + 40),
        "behind the move, ms": pace_ms(STEPS - 60, STEPS - 2),
    }


def measure(count: int, seed: int) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return figures and bars. `count`: series, and half as many undisturbed hours."""
    result = score(draw_mix(count, seed))
    false = 0
    for hour in range(count // 2):
        length_s = random.Random(hour).uniform(0.2, 2.0)
        kind: Any = CALM[hour % len(CALM)]
        false += bool(judge(draw_series(kind, f"{seed} {hour}", steps=int(3600 / length_s))))
    added, row, run = cost(), row_s(), real_run()
    share = 100 * added.high / STEP_S
    rows = [
        ("series", f"{count}", f"precision {result.precision:.3f}, recall {result.recall:.3f}"),
        ("", "", f"found after at most {result.delays[-1]} steps"),
        ("undisturbed hours", f"{count // 2}", f"{false} with a finding"),
        ("cost of a step", f"{1e6 * added.median:.1f} us", f"{share:.4f} % of 100 ms (upper end)"),
        ("row of 16,384 ranks", f"{1e3 * row.median:.1f} ms", "at most one each 4 s"),
        *((name, f"{value:.6g}", "real run") for name, value in run.items()),
        ("load", f"{load():.1f}", ""),
    ]
    table(("of", "figure", ""), rows)
    figures: dict[str, Any] = {
        "straggler_precision": result.precision,
        "straggler_recall": result.recall,
        "straggler_delay_steps": result.delays[-1],
        "straggler_false_hours": false,
        "straggler_cost_percent": share,
        "straggler_named_steps": run["named after, steps"],
        "straggler_moves": run["moves"],
        "straggler_others": run["others named"],
    }
    named = figures["straggler_named_steps"]
    bars: dict[str, tuple[float, float]] = {
        "wrong findings, share": (1 - result.precision, 0.05),
        "missed, share": (1 - result.recall, 0.05),
        "steps until found": (result.delays[-1], 30),
        "undisturbed hours with a finding": (false, 0),
        "cost, % of 100 ms": (share, 0.5),
        "real run, steps until named": (named if named > 0 else float("inf"), 50),
        "real run, not moved once": (abs(run["moves"] - 1), 0),
        "real run, others named": (run["others named"], 0),
    }
    return figures, bars
