"""Reproduced figures of five documents; each disagreement is listed and explained."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from decimal import ROUND_HALF_EVEN, Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.cli.plan.listings import reproduce
from outlast.errors import UsageError
from outlast.plan.reproduce import ReproducedFigure, SourceDocument, rows, source_documents
from outlast.plan.reproduce.strategy_experiment import (
    UniformGaps,
    mean_failures,
    paused_wall_time,
    restarted_run,
)

ROWS = {(row.document, row.quantity): row for row in rows()}
LIMIT = "GPUs from which failures take more than training"
FAR_2 = "ETTR of 100,000 GPUs at RSC-2's rate, every 21 min"

# All that disagree, with what is right; no other row may.
WRONG = {
    ("000", "time lost to saves, redone work and recovery"): 4.934,
    ("000", LIMIT): 27.81e6,
    ("000", f"{LIMIT}, failures during saves counted"): 13.91e6,
    ("000", f"{LIMIT}, its recovery counted"): 344_410,
    ("000", f"{LIMIT}, memory"): 217.3e6,
    ("000", "runs to one loss, 2 copies"): 32_000,
    ("000", "runs to one loss, 3 copies"): 1.3824e11,
    ("000", "parameters per root of GPUs"): 4.385e9,
    ("000", "largest cluster, linear network"): 1.8286e15,
    ("000", "largest cluster, root network"): 42.76e6,
    ("000", "nodes in repair, of all"): 0.384,
    ("000", "spares that suffice"): 549,
    ("001", "Llama 3: interruptions, by its formula"): 4434.8,
    ("001", "Llama 3: interruptions that hardware caused"): 70.13,
    ("001", "lost without checkpoints"): None,
    ("001", "lost with a checkpoint an hour"): 3.4274e6,
    ("002", "time of a save, 10 TB at 80 GB/s"): 125,
    ("002", "overhead, every 4 h"): 95.65,
    ("002", "efficiency, every 4 h"): 32.88,
    ("002", "a save shrinks, disk to host memory"): 50,
    ("002", "checkpoint over parameter count"): 14,
    ("002", "all ranks' throughput over one NIC's"): 2048,
    ("003", "MTTF, 1,024 GPUs"): 28.846,
    ("003", "TorchFT: total, half speed and pauses of 120 s"): 836.88,
    ("003", "TorchFT: speed lost, pauses of 120 s"): 55.00,
    ("003", "TorchFT: pause, half the speed lost"): 481.8,
    ("004", "failures on RSC-1, fig. 5"): 0.0065,
    ("004", "MTTF, 8 GPUs"): 153.85,
    ("004", "MTTF, 1,024 GPUs"): 28.846,
    ("004", FAR_2): 0.6852,
    ("004", f"{FAR_2}, exactly"): 0.7244,
    ("004", "longest interval with ETTR 0.5 at RSC-2's rate"): 53.46,
    ("004", "ETTR by equation 7: a day's run, 1,024 GPUs, an hour of queue"): 0.9080,
    ("004", "more large jobs completed"): 11.628,
}
# Answers that no document prints.
ANSWERS = {
    ("000", "runs to one loss, 2 copies, re-protected in 5 minutes"): 4266.8,
    ("001", "exercise 1: fewest GPUs with an MTBF below an hour"): 4788,
    ("001", "exercise 2: best interval, a save of 1 min"): 11.844,
    ("001", "exercise 3: interruptions of 8,000 GPUs in 30 days"): 1203.0,
    ("001", "exercise 3: dollars of that"): 6.015e6,
    ("001", "exercise 3: share of the budget"): 41.77,
    ("003", "checkpoint restart: restart, gaps by the clock"): 25.11,
    ("003", "checkpoint restart: restart, gaps from the resumption on"): 52.24,
    ("003", "TorchPass: baseline, if 405 min contain pauses of 100 s"): 394.61,
    ("003", "TorchFT: speed lost, no pause"): 56.45,
}


def test_disagreements_are_the_listed_ones() -> None:
    """DESIGN lists the gravest; a new disagreement is an error here or a discovery there."""
    assert {key for key, row in ROWS.items() if row.agrees is False} == set(WRONG)


@pytest.mark.parametrize(("key", "right"), [*WRONG.items(), *ANSWERS.items()])
def test_recomputed_values_are_right(key: tuple[str, str], right: float | None) -> None:
    assert ROWS[key].ours == (None if right is None else pytest.approx(right, rel=5e-4))
    assert (ROWS[key].says is None) == (key in ANSWERS)


def test_every_row_is_complete() -> None:
    assert len(ROWS) == len(rows()), "two rows of a document have one name"
    assert {document for document, _ in ROWS} == set(source_documents())
    for row in ROWS.values():
        assert row.ours is not None or "never ends" in row.why, row
        assert row.why or row.agrees, row
        assert row.agrees is None or row.says is not None, row


def test_tables_are_complete() -> None:
    """12 figures of 001, and 20 of 002, 4 in each line."""
    assert sum("MTBF, GPUs" in name or "60 days, GPUs" in name for _, name in ROWS) == 12
    cells = [row for (_, name), row in ROWS.items() if ", every " in name and row.document == "002"]
    assert sum(row.says is not None for row in cells) == 20


def test_documents_one_by_one() -> None:
    assert {row.document for row in rows(["003"])} == {"003"}
    assert [row.document for row in rows(["004", "000"])] == ["000"] * len(rows(["000"])) + [
        "004"
    ] * len(rows(["004"]))
    with pytest.raises(UsageError, match=r"unknown document '005'; known are 000 \(Erben"):
        rows(["005"])


@given(st.floats(-1e9, 1e9), st.integers(0, 6))
def test_a_printed_figure_agrees_if_it_is_ours_rounded(ours: float, digits: int) -> None:
    source = SourceDocument("x", "a document")
    unit = Decimal(1).scaleb(-digits)
    printed = Decimal(ours).quantize(unit, ROUND_HALF_EVEN)
    assert source.check("q", str(printed), ours, "").agrees
    off = 2 * unit + Decimal(abs(ours) * 1e-8)  # one unit and what floats leave
    assert source.check("q", str(printed + off), ours, "").agrees is False


@pytest.mark.parametrize(
    ("printed", "ours", "agrees"),
    [
        ("88e4", 884_736, True),
        ("88e4", 885_100, False),
        ("880000", 884_736, False),
        ("562e6", 562.5e6, True),
        ("<5", 4.9, True),
        ("<5", 5.0, False),
        (">100", 95.6, False),
    ],
)
def test_digits_and_bounds(printed: str, ours: float, agrees: bool) -> None:
    assert SourceDocument("x", "a document").check("q", printed, ours, "").agrees is agrees


def test_regular_gaps_by_hand() -> None:
    """A failure every 60 min and 10 min to restart: 4 intervals of 13.5, then 3 in each 50 min."""
    always = UniformGaps(60.0, 60.0 + 1e-9)
    run = restarted_run(always, 30, 13.5, 10.0)
    assert run.failures == pytest.approx(9)
    assert run.wall == pytest.approx(70 + 8 * 60 + 27)
    assert restarted_run(always, 30, 13.5, 10.0, clock=False).wall == pytest.approx(
        7 * 70 + 2 * 13.5
    )
    assert mean_failures(always, 405.0) == pytest.approx(6)
    assert paused_wall_time(always, 405.0, 20.0) == pytest.approx(405 + 9 * 20)
    assert paused_wall_time(always, 405.0, 20.0, clock=False) == pytest.approx(405 + 6 * 20)
    assert mean_failures(always, 59.0) == 0


@pytest.mark.parametrize("clock", [True, False])
def test_even_gaps_as_simulated(clock: bool) -> None:
    draw, gaps, count = random.Random(3), UniformGaps(45.0, 75.0), 4000
    walls, struck, pauses = [], [], []
    for _ in range(count):
        gap, wall, done, fails = draw.uniform(45, 75), 0.0, 0, 0
        while (30 - done) * 13.5 > gap:
            wall, done, fails = wall + gap + 25, done + int(gap // 13.5), fails + 1
            gap = draw.uniform(45, 75) - (25 if clock else 0)
        walls.append(wall + (30 - done) * 13.5)
        struck.append(fails)
        gap, worked, fails = draw.uniform(45, 75), 0.0, 0
        while worked + gap <= 405:
            worked, fails = worked + gap, fails + 1
            gap = draw.uniform(45, 75) - (8 if clock else 0)
        pauses.append(fails)
    run = restarted_run(gaps, 30, 13.5, 25.0, clock=clock)
    error = run.deviation / math.sqrt(count)
    assert abs(math.fsum(walls) / count - run.wall) < 4 * error
    spread = math.sqrt(math.fsum((wall - run.wall) ** 2 for wall in walls) / count)
    assert spread == pytest.approx(run.deviation, rel=0.05)
    assert sum(struck) / count == pytest.approx(run.failures, abs=0.06)
    expected = mean_failures(gaps, 405.0, pause=8.0, clock=clock)
    assert sum(pauses) / count == pytest.approx(expected, abs=0.05)


def test_impossible_gaps() -> None:
    with pytest.raises(UsageError, match=r"a gap may leave 13, too short for 13\.5 of work"):
        restarted_run(UniformGaps(45.0, 75.0), 30, 13.5, 32.0)
    with pytest.raises(UsageError, match="a pause of 45 outlasts the shortest gap, 45"):
        mean_failures(UniformGaps(45.0, 75.0), 405.0, pause=45.0)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(json=True) == 0
    told = msgspec.json.decode(capsys.readouterr().out, type=list[ReproducedFigure], strict=True)
    assert told == rows()
    assert reproduce("004") == 0
    text = capsys.readouterr().out
    assert "28.846" in text and "Kokolis" in text and "Epoch" not in text
    assert text.splitlines()[-1].endswith("have nothing to compare")


def test_it_needs_no_extra() -> None:
    code = "import sys, outlast.plan.reproduce as r; r.rows(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"numpy", "numba", "torch"} & set(done.stdout.split())
