"""Flight recorder dumps of a hang, collected before any worker is killed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from torch._C import _distributed_c10d as c10d

from outlast import events
from outlast.cli.reports.run_reports import trace_lines
from outlast.fleet.flight_recorder.hang_report import analyse_dumps
from outlast.fleet.flight_recorder.recorder_dumps import read_dumps
from outlast.telemetry.event_store import read_events
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import RunHistory
from outlast.transport import messages
from outlast.worker import flight_recorder_dump

pytestmark = pytest.mark.process
DEADLINE_S = 200
# In its fifth phase rank 1 stays away from the second all-reduce of its group; when that is done
# again a survivor does, from the first one of all ranks.
JOB = """
import sys, threading
from pathlib import Path
import torch
from torch import distributed as dist
import outlast
session = outlast.init()
pair = dist.new_group([1, 2])
calls = 0
def hang(name):
    marker = Path(sys.argv[1], name)
    if not marker.exists():
        marker.touch()
        threading.Event().wait()
def both():
    if session.rank == 2 and Path(sys.argv[1], "first").exists():
        hang("second")
    dist.all_reduce(torch.ones(3))
    if session.rank == 1 and calls == 5:
        hang("first")
    if session.rank:
        dist.all_reduce(torch.ones(5, dtype=torch.float64), group=pair)
for calls in range(1, 7):
    session.run(both)
"""


@pytest.mark.extended
def test_who_was_missed_is_told_afterwards(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "job.py", tmp_path / "run"
    script.write_text(JOB)
    flags = (
        "--plain", "--nproc-per-node=3", "--spares=2", f"--run-dir={run_dir}",
        "--limit=hang_floor_s=2", "--limit=hang_ceiling_s=60",
    )  # fmt: skip
    command = [sys.executable, "-m", "outlast", "run", *flags, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_events(run_dir)
    # Under load a peer may report its cut connection as well, and a slow rank may be traced.
    faults = [one.fault for one in found if isinstance(one, events.Noticed)]
    hung = [fault for fault in faults if fault.kind == "hung"]
    assert [fault.seat for fault in hung] == [1, 2]
    folders = [
        next(each for each in (run_dir / "traces").iterdir() if str(each) in fault.detail)
        for fault in hung
    ]
    for folder in folders:
        assert sorted(path.name.partition("@")[0] for path in folder.iterdir()) == [
            "rank_0", "rank_1", "rank_2",
        ]  # fmt: skip
    first, second = (analyse_dumps(read_dumps([folder])) for folder in folders)
    assert (first.ranks, first.confidence, first.missing) == ((1,), "sure", ())
    assert (first.stuck[0].members, first.stuck[0].seq) == ((1, 2), 5)
    assert first.hosts.keys() == {0, 1, 2}
    assert (second.ranks, second.confidence) == ((2,), "sure"), second.verdict
    assert (second.stuck[0].members, second.stuck[0].seq) == ((0, 1, 2), 1)
    lines = list(trace_lines(run_dir, incidents(RunHistory.of(found))))
    assert any("Rank 1 never entered all_reduce" in line for line in lines), lines


SKIPS = """
import sys
from pathlib import Path
import torch
from torch import distributed as dist
import outlast
session = outlast.init()
left_out = Path(__file__).with_suffix(".left_out")  # a retry puts the script's variables back
def both():
    if session.rank == 2 and calls == 5 and (sys.argv[1] == "always" or not left_out.exists()):
        left_out.touch()
        return
    dist.all_reduce(torch.ones(3))
for calls in range(1, 8):
    session.run(both)
"""


@pytest.mark.parametrize(
    ("often", "exit_code"), [("once", 0), pytest.param("always", 3, marks=pytest.mark.long)]
)
def test_who_leaves_a_collective_out_is_the_one_that_is_named(
    often: str, exit_code: int, tmp_path: Path
) -> None:
    script, run_dir = tmp_path / "job.py", tmp_path / "run"
    script.write_text(SKIPS)
    flags = (
        "--plain", "--nproc-per-node=3", "--spares=1", f"--run-dir={run_dir}",
        "--limit=hang_floor_s=2", "--limit=hang_ceiling_s=60", "--limit=attempts_max=2",
    )  # fmt: skip
    command = [sys.executable, "-m", "outlast", "run", *flags, str(script), often]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == exit_code, done.stdout + done.stderr
    found = read_events(run_dir)
    watched = [one for one in found if isinstance(one, events.Noticed) and one.how == "heartbeat"]
    noticed = [one.fault for one in watched]  # besides, connections that were cut then
    said = "rank 2 reached the vote of phase 5 after 0 collective(s), but skipped one that 2 other"
    assert noticed and all(fault.detail.startswith(said) for fault in noticed)
    assert noticed[0].kind == "transport", "the first time nobody is blamed"
    assert {(fault.kind, fault.seat) for fault in noticed} <= {("transport", -1), ("hung", 2)}
    for folder in (run_dir / "traces").iterdir():
        assert analyse_dumps(read_dumps([folder])).ranks == (2,)
    (end,) = [one for one in found if isinstance(one, events.RunEnded)]
    if often == "once":
        rungs = [one.rung for one in found if isinstance(one, events.Decided)]
        assert rungs == ["retry"] and end.cause is None, "nobody is killed for one time"
    else:
        assert end.cause is not None and (end.cause.kind, end.cause.seat) == ("hung", 2)


def _asked(
    run_dir: Path, *, left_s: float = 60.0, folder: str = "now", seat: int = 3
) -> list[messages.Traced]:
    said: list[messages.Traced] = []
    until_ns = time.monotonic_ns() + int(left_s * 1e9)
    asked = messages.Trace(folder=folder, host="node17", until_ns=until_ns)
    flight_recorder_dump.answer(
        asked, flight_recorder_dump.DumpPlace(run_dir, seat), {"group 0 @2": (1, 3)}, said.append
    )
    return said


def _written() -> None:
    for thread in threading.enumerate():
        if thread.name == "outlast-trace":
            thread.join(DEADLINE_S)


def test_a_worker_writes_what_torch_recorded_with_the_members_of_its_groups(
    tmp_path: Path,
) -> None:
    said = _asked(tmp_path)
    _written()
    assert said == [messages.Traced(folder="now")]
    (path,) = (tmp_path / "traces" / "now").iterdir()
    assert path.name == "rank_3@node17.json"
    dump = msgspec.json.decode(path.read_bytes())
    assert dump["pg_config"]["group 0"]["ranks"] == "[1, 3]"


def test_a_worker_that_cannot_write_says_why_and_one_that_is_late_says_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "traces").write_text("a file")
    full = tmp_path / "full" / "traces" / "now"
    full.mkdir(parents=True)
    (full / f"rank_3@node17.{os.getpid()}.tmp").symlink_to("/dev/full")
    for run_dir in (tmp_path, tmp_path / "full"):
        said = _asked(run_dir)
        _written()
        assert "Error" in said[0].error
    assert list(full.iterdir()) == []
    assert _asked(tmp_path / "other", left_s=-1.0) == []
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("folder", "seat"), [("../..", 3), ("..", 3), ("/a", 3), ("", 3), ("now", -1)]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, folder: str, seat: int) -> None:
    said = _asked(tmp_path / "run", folder=folder, seat=seat)
    _written()
    assert "UsageError" in said[0].error
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_answer_holds_up_nobody_who_asks(tmp_path: Path) -> None:
    folder = tmp_path / "traces" / "now"
    folder.mkdir(parents=True)
    temporary = folder / f"rank_3@node17.{os.getpid()}.tmp"
    os.mkfifo(temporary)
    said = _asked(tmp_path)  # returns, and whoever called it hears of Close
    assert said == []
    with temporary.open("rb") as reader:
        reader.read()
    _written()
    assert said == [messages.Traced(folder="now")]


def _entry(record: int, group: str) -> dict[str, object]:
    return {"record_id": record, "process_group": [group, ""], "seq": record}


@pytest.mark.parametrize(
    ("recorded", "kept"),
    [
        ([(0, "control @1"), (1, "control @2"), (2, "own")], [(0, "control"), (1, "own")]),
        ([(7, "control @1"), (8, "control @2")], [(0, "control")]),
        ([(8, "control @2"), (9, "control @2")], [(1, "control"), (2, "control")]),
    ],
)
def test_what_earlier_generations_did_is_left_out(
    recorded: list[tuple[int, str]], kept: list[tuple[int, str]]
) -> None:
    """And says that nothing of this one's was written over, which is written over last."""
    torchs = msgspec.json.encode({"entries": [_entry(*one) for one in recorded]})
    dump = msgspec.json.decode(flight_recorder_dump.with_members([torchs], {"control @2": (0, 1)}))
    found = [(one["record_id"], one["process_group"][0]) for one in dump["entries"]]
    assert found == kept
    assert dump["pg_config"] == {"control": {"name": "control", "desc": "", "ranks": "[0, 1]"}}


def _register(handler: Callable[[object, c10d._Response], None]) -> None:
    """As a handler of torch's, which no one can take back. torch lets go of it at the process's
    end, behind the interpreter's: a reference that stays keeps that from being the last one."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    c10d._register_handler(flight_recorder_dump.NCCL, handler)


def test_what_nccl_recorded_is_written_beside_it_in_the_order_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a handler as torch has one for NCCL, asked as torch is."""

    def handler(_request: object, response: c10d._Response) -> None:
        entries = [{**_entry(0, "group 0 @2"), "time_created_ns": 5}]
        response.set_content(msgspec.json.encode({"entries": entries}).decode(), "")

    monkeypatch.setattr(flight_recorder_dump, "NCCL", "nccl_of_this_test")
    _register(handler)
    said = _asked(tmp_path)
    _written()
    assert said == [messages.Traced(folder="now")]
    (path,) = (tmp_path / "traces" / "now").iterdir()
    dump = msgspec.json.decode(path.read_bytes())
    names = [one["process_group"][0] for one in dump["entries"]]  # other tests left theirs
    assert names[0] == "group 0" and names.count("group 0") == 1
    assert "version" in dump, "of torch's own"


def test_nothing_is_written_where_nccl_does_not_answer_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without its records would accuse its rank."""
    monkeypatch.setattr(flight_recorder_dump, "NCCL", "odd_nccl_of_this_test")
    _register(lambda _request, response: response.set_status(500))
    said = _asked(tmp_path)
    _written()
    assert said[0].error
    assert not (tmp_path / "traces").exists()


def test_records_of_two_recorders_are_one_and_say_if_some_were_lost() -> None:
    def one(first: int, *t_ns: int) -> bytes:
        entries = [
            {**_entry(first + at, "control @2"), "time_created_ns": each}
            for at, each in enumerate(t_ns)
        ]
        return msgspec.json.encode({"version": "2.10", "entries": entries})

    def merged(*recorded: bytes) -> list[tuple[int, int]]:
        dump = msgspec.json.decode(
            flight_recorder_dump.with_members(recorded, {"control @2": (0, 1)})
        )
        return [(each["record_id"], each["time_created_ns"]) for each in dump["entries"]]

    assert merged(one(0, 10, 30), one(0, 20)) == [(0, 10), (1, 20), (2, 30)]
    assert merged(one(0, 10), one(7, 20)) == [(1, 10), (2, 20)]
    assert merged(one(0), one(0, 20)) == [(0, 20)]
