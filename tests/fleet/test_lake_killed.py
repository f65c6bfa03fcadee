"""A writer that is killed before any one of its renames and deletions leaves the old lake or the
new one, and nothing that a later reading would see."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.fleet.lake import Lake

MAPPING = """rows = "jobs"
[columns]
job = "job"
state = "state"
start = "start"
end = "end"
"""
MONDAY = "job,state,start,end\n1,RUNNING,2024-05-17,2024-05-18\n2,FAILED,2024-05-17,2024-05-18\n"
TUESDAY = "job,state,start,end\n1,NODE_FAIL,2024-05-17,2024-05-19\n3,LOST,2024-05-17,2024-05-19\n"
OLD = [("1", "RUNNING"), ("2", "FAILED")]
NEW = [("1", "NODE_FAIL"), ("2", "FAILED")]
# Python tells of each rename and each deletion before it is done.
KILLED = """
import os, signal, sys
from outlast.cli.main import main
left = int(sys.argv.pop(1))
def told(event, arguments):
    global left
    if event in ("os.rename", "os.remove") and {lake!r} in str(arguments):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(told)
sys.exit(main(sys.argv[1:]))
"""


def known(lake: Path) -> list[tuple[str, str]]:
    jobs = Lake.open(lake).tables().jobs.collect()
    return sorted(zip(jobs["job"], jobs["state"].cast(str), strict=True))


@pytest.mark.process
def test_a_writer_killed_anywhere_leaves_the_old_lake_or_the_new_one(tmp_path: Path) -> None:
    for name, text in {"monday": MONDAY, "tuesday": TUESDAY}.items():
        (tmp_path / f"{name}.csv").write_text(text)
        (tmp_path / f"{name}.toml").write_text(MAPPING)
    ends: list[list[tuple[str, str]]] = []
    while len(ends) < 20:
        lake = tmp_path / f"lake{len(ends)}"
        assert main(["fleet", "ingest", str(lake), str(tmp_path / "monday.csv")]) == 0
        words = ["fleet", "ingest", str(lake), str(tmp_path / "tuesday.csv")]
        program = KILLED.format(lake=str(lake))
        command = [sys.executable, "-c", program, str(len(ends)), *words]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        ends.append(known(lake))
        assert main(words) == 0
        assert known(lake) == NEW
        parts = {f"{part.kind}/day={part.day}" for part in Lake.open(lake).manifest.parts}
        assert {str(file.parent.relative_to(lake)) for file in lake.rglob("*.parquet")} == parts
        assert len(list(lake.rglob("*.parquet"))) == len(parts)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert ends == sorted(ends, key=[OLD, NEW].index)
    assert OLD in ends and ends.count(NEW) > 1, "killed before and after the moment that counts"
