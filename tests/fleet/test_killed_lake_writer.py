"""Lake writers killed before any rename or deletion: the lake is the old or the new one."""

from __future__ import annotations

import shutil
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
LIVES = 10  # one more than there are renames and deletions
# Python tells of each rename and each deletion before it is done.
KILLED = """
import os, signal, sys
import outlast.cli.fleet.log_commands
from outlast.cli.main import main
log, *lakes = sys.argv[1:]
def life(lake, left):
    def told(event, arguments):
        nonlocal left
        if event in ("os.rename", "os.remove") and lake in str(arguments):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(told)
    os._exit(main(["fleet", "ingest", lake, log]))
# This process imports for all of them, and computes nothing: its threads are idle.
for left, lake in enumerate(lakes):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        life(lake, left)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def known(lake: Path) -> list[tuple[str, str]]:
    jobs = Lake.open(lake).tables().jobs.collect()
    return sorted(zip(jobs["job"], jobs["state"].cast(str), strict=True))


@pytest.mark.process
def test_a_writer_killed_anywhere_leaves_the_old_lake_or_the_new_one(tmp_path: Path) -> None:
    for name, text in {"monday": MONDAY, "tuesday": TUESDAY}.items():
        (tmp_path / f"{name}.csv").write_text(text)
        (tmp_path / f"{name}.toml").write_text(MAPPING)
    tuesday, old = str(tmp_path / "tuesday.csv"), tmp_path / "old"
    assert main(["fleet", "ingest", str(old), str(tmp_path / "monday.csv")]) == 0
    lakes = [shutil.copytree(old, tmp_path / f"lake-{k:02d}") for k in range(LIVES)]
    command = [sys.executable, "-c", KILLED, tuesday, *map(str, lakes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    codes = [int(code) for code in done.stdout.split()]
    ends: list[list[tuple[str, str]]] = []
    for lake in lakes:
        ends.append(known(lake))
        assert main(["fleet", "ingest", str(lake), tuesday]) == 0
        assert known(lake) == NEW
        parts = {f"{part.kind}/day={part.day}" for part in Lake.open(lake).manifest.parts}
        assert {str(file.parent.relative_to(lake)) for file in lake.rglob("*.parquet")} == parts
        assert len(list(lake.rglob("*.parquet"))) == len(parts)
    lived = codes.index(0)
    assert codes[:lived] == [-signal.SIGKILL] * lived and set(codes[lived:]) == {0}
    assert ends == sorted(ends, key=[OLD, NEW].index)
    assert OLD in ends and ends.count(NEW) > 1, "killed before and after the moment that counts"
