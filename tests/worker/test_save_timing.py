"""Step times beside saves, and the slowdown that a save causes."""

from __future__ import annotations

import pytest

from outlast.worker.save_timing import StepRhythm


def steps(rhythm: StepRhythm, *lengths_s: float, writing: bool = False) -> None:
    for length_s in lengths_s:
        rhythm.begin(100.0)
        rhythm.end(100.0 + length_s, writing=writing)


def test_the_slowdown_of_steps_beside_a_write_is_its_drag() -> None:
    rhythm = StepRhythm()
    steps(rhythm, 9.0, 1.0, 1.0, 1.0)  # the first one compiles
    steps(rhythm, 1.5, 1.5, 7.0, writing=True)  # the last one is followed by an evaluation
    assert rhythm.step_s == 1.0
    assert rhythm.drag_s() == pytest.approx(1.5)
    assert rhythm.drag_s() == 0.0


def test_a_write_that_slows_nothing_has_no_drag() -> None:
    rhythm = StepRhythm()
    steps(rhythm, 1.0, 1.0)
    steps(rhythm, 0.9, writing=True)
    assert rhythm.drag_s() == 0.0


def test_without_a_quiet_step_nothing_is_known() -> None:
    rhythm = StepRhythm()
    steps(rhythm, 1.0, writing=True)
    assert (rhythm.step_s, rhythm.drag_s()) == (0.0, 0.0)


def test_an_end_without_a_beginning_is_no_step() -> None:
    rhythm = StepRhythm()
    rhythm.end(5.0, writing=False)
    steps(rhythm, 2.0)
    rhythm.end(50.0, writing=False)
    assert rhythm.step_s == 2.0
