"""Modes and invariants of the controller's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from outlast.config import Limits
from outlast.controller.controller_state import ControllerState, WorkerRecord
from outlast.controller.inputs import EndRun, FindingKey
from outlast.controller.state_machine import initial
from outlast.controller.state_parts import MODES, Mode
from outlast.errors import InvariantError
from outlast.events import Fault

ROOT = Path(__file__).parents[2]
KILLED = Fault(kind="killed", detail="SIGKILL")
FINDING = FindingKey("h", "gpu", "xid", "79", "0")
DONE = EndRun(outcome="done", exit_code=0, cause=None)


def worker(name: str, seat: int) -> WorkerRecord:
    return WorkerRecord(name=name, agent="a", since_ns=0, seat=seat)


def state(changes: dict[str, Any]) -> ControllerState:
    """An open generation of two ranks, which holds every invariant, with these changes."""
    workers = {name: worker(name, seat) for seat, name in enumerate(("w0", "w1"))}
    sound = {
        "clock.mode": "open",
        "members.seats": ["w0", "w1"],
        "members.workers": workers,
        "progress.generation": 1,
    }
    found = initial(2, 0, Limits())
    fields = {**sound, **changes}
    for each in fields.pop("members.workers").values():
        found.members.add(each)
    for name, value in fields.items():
        part, _, field = name.rpartition(".")
        setattr(getattr(found, part) if part else found, field, value)
    return found


def test_the_document_shows_the_table() -> None:
    rows = ["| mode | meaning | ends when | next |", "|---|---|---|---|"]
    for mode, row in MODES.items():
        following = ", ".join(f"`{each}`" for each in row.following)
        rows.append(f"| `{mode}` | {row.meaning} | {row.ends} | {following} |")
    assert "\n".join(rows) in (ROOT / "docs" / "protocol.md").read_text()


def test_every_mode_has_a_row_and_is_reached() -> None:
    assert tuple(MODES) == get_args(Mode)
    reached: set[Mode] = {"unborn"}
    for _ in MODES:
        reached |= {after for mode in reached for after in MODES[mode].following}
    assert reached == MODES.keys()


def test_a_sound_state_is_valid() -> None:
    state({}).validate()
    initial(2, 0, Limits()).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clock.path": ("open", "gathering")}, "no transition from open to gathering"),
        ({"clock.path": ("closing", "stopping", "open")}, "no transition from stopping to open"),
        ({"members.seats": ["w0"]}, "1 seats in a world of 2"),
        (
            {"members.workers": {"w0": worker("w0", 0), "w1": worker("w1", 0)}},
            "two workers have one seat",
        ),
        ({"members.workers": {"w0": worker("w0", 1)}}, "seats and workers differ"),
        ({"members.workers": {"w0": worker("w0", 7)}}, "seats and workers differ"),
        ({"clock.mode": "connecting", "members.seats": ["w0", ""]}, "an empty seat"),
        ({"ending.result": DONE}, "the end and the mode"),
        ({"clock.mode": "stopping"}, "the end and the mode"),
        ({"progress.transfers": ((0, 2),)}, "a transfer leaves the world"),
        ({"incident.number": 3, "incident.count": 2}, "an incident has no number"),
        ({"incident.faults": (KILLED,)}, "a fault belongs to no incident"),
        ({"findings.unmoved": (FINDING,)}, "a finding that is over is noted"),
        ({"saves.searches": 1}, "a restart is not counted"),
        ({"clock.since_ns": 5, "clock.now_ns": 4}, "time runs backwards"),
    ],
)
def test_a_contradiction_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        state(changes).validate()
