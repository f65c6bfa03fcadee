"""Verdict of the demo: runs are equal only if nothing differs or was lost, and a fault struck."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from outlast import events
from outlast.cli import demo
from outlast.cli.demo import compare
from outlast.telemetry.event_store import DIRECTORY, EventWriter, bit_texts
from outlast.telemetry.run_summary import summarise

WORLD, STEPS = 2, 3


def made(
    folder: Path, *, nudge: float = 0.0, lose: bool = False, digest: str = "a" * 64, struck: int = 1
) -> Path:
    """A run as its files tell it: `nudge` is added to the last loss, `lose` drops one."""
    writer = EventWriter(folder / DIRECTORY, "test")
    writer.emit(
        events.RunStarted(
            t_ns=writer.now_ns(), run="r", term=1, world=WORLD, spares=0, script="s", args=()
        )
    )
    for step in range(1, STEPS + 1):
        for seat in range(WORLD):
            last = (seat, step) == (WORLD - 1, STEPS)
            if last and lose:
                continue
            loss = math.pi / step + (nudge if last else 0.0)
            writer.emit(
                events.Metrics(
                    t_ns=writer.now_ns(), worker="w", seat=seat, step=step, values={"loss": loss}
                )
            )
    for number in range(struck):
        writer.emit(
            events.FaultInjected(
                t_ns=writer.now_ns(), worker="w", seat=0, spec=f"kill:rank={number}", n=0, step=0
            )
        )
    writer.emit(
        events.RunEnded(t_ns=writer.now_ns(), outcome="done", exit_code=0, n=STEPS, step=STEPS)
    )
    writer.close()
    log = folder / "logs" / "0" / "w" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"step 1\nparameters sha256 {digest}\n")
    return folder


def test_equal_runs_are_equal(tmp_path: Path) -> None:
    found = compare(made(tmp_path / "a"), made(tmp_path / "b", struck=0), faults=1)
    assert found.equal
    assert found.losses == (WORLD * STEPS, WORLD * STEPS)
    assert found.steps == (STEPS, STEPS)


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"nudge": 1e-15}, "losses_equal"),
        ({"lose": True}, "losses_equal"),
        ({"digest": "b" * 64}, "digests_equal"),
        ({"struck": 0}, "all_struck"),
    ],
)
def test_one_difference_is_enough(tmp_path: Path, change: dict[str, object], fails: str) -> None:
    found = compare(made(tmp_path / "a", **change), made(tmp_path / "b", struck=0), faults=1)  # type: ignore[arg-type]
    assert not found.equal
    assert not getattr(found, fails)


def test_a_twin_that_was_struck_is_no_twin(tmp_path: Path) -> None:
    found = compare(made(tmp_path / "a"), made(tmp_path / "b", struck=1), faults=1)
    assert found.twin_struck == 1 and not found.all_struck and not found.equal


def test_the_table_shows_what_the_twin_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right = made(tmp_path / "a", struck=2), made(tmp_path / "b", struck=7)
    books = msgspec.structs.replace(summarise(right), committed_steps_lost=5)
    report = demo.DemoReport(
        comparison=compare(left, right, faults=2),
        disturbed=summarise(left),
        undisturbed=books,
        figure="",
        wall_s=1.0,
    )
    demo._show(report, Console())
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines}
    assert rows["faults that occurred"][:2] == ["2", "7"]
    assert rows["committed steps lost"][:2] == ["0", "5"]


def test_two_runs_without_a_digest_are_not_equal(tmp_path: Path) -> None:
    left, right = made(tmp_path / "a", digest=""), made(tmp_path / "b", digest="", struck=0)
    assert not compare(left, right, faults=1).digests_equal


def test_comparison_by_bits_distinguishes_signed_zeros_and_equates_nan() -> None:
    key = (0, 1, "loss")
    assert bit_texts({key: 0.0}) != bit_texts({key: -0.0})
    assert bit_texts({key: math.nan}) == bit_texts({key: math.nan})


def test_a_missing_loss_is_infinitely_far() -> None:
    assert demo.difference_max({(0, 1, "loss"): 1.0}, {}) == math.inf
