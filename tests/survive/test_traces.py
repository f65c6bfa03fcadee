"""A hang's flight recorders, collected by `outlast run` before it kills anybody."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from outlast import events, wire
from outlast.cli.traced import traced
from outlast.fleet.trace.files import read
from outlast.fleet.trace.report import analyse
from outlast.observe.incidents import incidents
from outlast.observe.store import read_events
from outlast.worker import recorder

pytestmark = pytest.mark.process
DEADLINE_S = 200
# In its fifth phase rank 1 stays away from the second all-reduce of its group, once.
JOB = """
import sys, threading
from pathlib import Path
import torch
from torch import distributed as dist
import outlast
session = outlast.init()
pair = dist.new_group([1, 2])
marker, calls = Path(sys.argv[1]), 0
def both():
    dist.all_reduce(torch.ones(3))
    if session.rank == 1 and calls == 5 and not marker.exists():
        marker.touch()
        threading.Event().wait()
    if session.rank:
        dist.all_reduce(torch.ones(5, dtype=torch.float64), group=pair)
for calls in range(1, 7):
    session.run(both)
"""


def test_who_was_missed_is_told_afterwards(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "job.py", tmp_path / "run"
    script.write_text(JOB)
    flags = (
        "--plain", "--nproc-per-node=3", "--spares=1", f"--run-dir={run_dir}",
        "--limit=hang_floor_s=2", "--limit=hang_ceiling_s=60",
    )  # fmt: skip
    command = [sys.executable, "-m", "outlast", "run", *flags, str(script), str(tmp_path / "hung")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_events(run_dir)
    noticed = next(one for one in found if isinstance(one, events.Noticed))
    folder = min((run_dir / "traces").iterdir())
    assert (noticed.fault.kind, noticed.fault.seat) == ("hung", 1)
    assert str(folder) in noticed.fault.detail
    assert sorted(path.name.partition("@")[0] for path in folder.iterdir()) == [
        "rank_0", "rank_1", "rank_2",
    ]  # fmt: skip
    report = analyse(read([folder]))
    assert (report.ranks, report.confidence, report.missing) == ((1,), "sure", ())
    assert (report.stuck[0].members, report.stuck[0].seq) == ((1, 2), 5)
    assert report.hosts.keys() == {0, 1, 2}
    line = next(traced(run_dir, incidents(found)))
    assert line.startswith("incident 1: Rank 1 never entered all_reduce")


def _asked(run_dir: Path, *, left_s: float = 60.0) -> list[wire.Traced]:
    said: list[wire.Traced] = []
    until_ns = time.monotonic_ns() + int(left_s * 1e9)
    asked = wire.Trace(folder="traces/now", host="node17", until_ns=until_ns)
    recorder.answer(asked, run_dir, 3, {"group 0": (1, 3)}, said.append)
    return said


def test_a_worker_writes_what_torch_recorded_with_the_members_of_its_groups(
    tmp_path: Path,
) -> None:
    assert _asked(tmp_path) == [wire.Traced()]
    (path,) = (tmp_path / "traces" / "now").iterdir()
    assert path.name == "rank_3@node17.json"
    dump = msgspec.json.decode(path.read_bytes())
    assert dump["pg_config"]["group 0"]["ranks"] == "[1, 3]"


def test_a_worker_that_cannot_write_says_why_and_one_that_is_late_says_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "traces").write_text("a file")
    assert "Error" in _asked(tmp_path)[0].error
    assert _asked(tmp_path / "other", left_s=-1.0) == []
    assert not (tmp_path / "other").exists()
