"""Findings of node checks that precede an incident."""

from __future__ import annotations

import io
from pathlib import Path

from msgspec.structs import replace
from tests.telemetry.synthetic_run import T0_NS, SyntheticRun

from outlast.events import Warned
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.incident_explanation import LINES_MAX, finding_lines
from outlast.telemetry.live_view import LineDisplay
from outlast.telemetry.run_summary import summarise


def warned(t_ns: int, severity: str = "now", host: str = "node-1", device: str = "GPU 2") -> Warned:
    return Warned(
        t_ns=t_ns, host=host, check="kernel", symptom="gpu-driver", severity=severity,
        code="XID 79", device=device, detail="fell off the bus",
    )  # fmt: skip


def told(tmp_path: Path, before_s: dict[float, Warned]) -> list[str]:
    """A run whose rank 2 is killed; warnings so many seconds before."""
    SyntheticRun(tmp_path).start().steps(5).killed(2).steps(2).end()
    history = read_history(tmp_path)
    found = history.events
    (one,) = incidents(history)
    for seconds, event in before_s.items():
        t_ns = one.t_ns - int(seconds * 1e9)
        found.append(replace(event, t_ns=t_ns))
    return list(finding_lines([one], sorted(found, key=lambda event: event.t_ns)))


def test_a_warning_is_printed_with_its_age(tmp_path: Path) -> None:
    assert told(tmp_path, {184: warned(0)}) == [
        "incident 1: 3 min 04 s before: now: kernel: XID 79 on GPU 2 (node-1): fell off the bus"
    ]


def test_ended_later_and_unrelated_warnings_are_omitted(tmp_path: Path) -> None:
    over = {900.0: warned(0, "warn"), 800.0: warned(0, "healthy")}
    other = {5.0: warned(0, host="node-2"), -5.0: warned(0, device="GPU 3")}
    assert told(tmp_path, {**over, **other}) == []


def test_persisting_and_just_ended_warnings_are_printed(tmp_path: Path) -> None:
    said = told(
        tmp_path,
        {9000: warned(0), 300: warned(0, device="x"), 60: warned(0, "healthy", device="x")},
    )
    assert len(said) == 2 and "2 h 30 min before" in said[0]
    assert "60.0 s before: healthy: kernel: XID 79 on x" in said[1]


def test_the_newest_of_many_warnings_are_printed(tmp_path: Path) -> None:
    said = told(tmp_path, {float(k): warned(0, device=f"GPU {k}") for k in range(1, 20)})
    assert len(said) == LINES_MAX and "GPU 1 " in said[-1]


def test_a_line_in_the_progress_and_a_note_in_the_summary(tmp_path: Path) -> None:
    lines_out, said = io.StringIO(), io.StringIO()
    display = LineDisplay(lines=lines_out, stream=said)
    display.event(warned(1))
    assert "node check: now: kernel: XID 79 on GPU 2 (node-1): fell off the bus" in said.getvalue()
    story = SyntheticRun(tmp_path).start()
    for severity in ("warn", "warn", "healthy"):
        story.say(warned(T0_NS, severity))
    story.steps(3).end()
    assert summarise(tmp_path).notes == (
        "node check: kernel: XID 79 on GPU 2 (node-1, warn) (2 times)",
    )
