"""Clock jumps of hours: committed checkpoints stay, load, and keep their order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.checkpoint.stores.folder_store import Folder

pytestmark = pytest.mark.process
TIMEOUT_S = 100
SHIM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
    char hours[16] = "";
    int failed = syscall(SYS_clock_gettime, clock, at);
    if (failed || clock != CLOCK_REALTIME) return failed;
    int file = open(getenv("CLOCK_IS_OFF_BY"), O_RDONLY | O_CLOEXEC);
    if (file >= 0 && read(file, hours, sizeof hours - 1) > 0) at->tv_sec += 3600 * atol(hours);
    if (file >= 0) close(file);
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
SCRIPT = """
import sys, time
from pathlib import Path
import torch
from outlast.checkpoint.upkeep.drain_to_target import CheckpointClock as Calendar
from outlast.checkpoint.stores.catalog import checkpoint_places as places
from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep.retention_policy import prune_store as prune
from outlast.checkpoint.upkeep.retention_policy import Keep

def jump(hours):
    Path(sys.argv[2]).write_text(str(hours))

root = Path(sys.argv[1])
state = {"weights": torch.zeros(1000)}
began, calendar = time.time(), Calendar()
with Checkpointer(root) as saves:
    jump(720)
    saves.save(1, state)  # looks for what it may remove
for attempt, hours in enumerate((-700, 5, 800)):
    jump(hours)
    assert abs(time.time() - began - 3600 * hours) < 600, "the clock did not jump"
    assert calendar.now_ns() / 1e9 - began < min(600, 3600 * hours + 600)
    with Checkpointer(root, on_failure="raise", save_s=60.0, branch=True) as saves:
        state["weights"].fill_(attempt)
        saves.save(3, state)
        jump(-hours)  # in the middle of a save, for both sides
        saves.save(4, state)
        saves.wait()
        jump(hours)
    with Checkpointer(root) as saves:
        state["weights"].fill_(-1)
        found = saves.load(state)
    assert found.step == 4 and state["weights"][0] == attempt, (found, attempt, state)
old = len(places(Folder(root)))
for hours in (3000, -3000):
    jump(hours)
    verdicts = prune(Folder(root), Keep(last=1, age_s=60 * 86400), calendar.now_ns())
    newest = [verdict.place.step for verdict in verdicts if verdict.keep]
    assert len(newest) == old and newest[0] == 4, verdicts
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library under which the clock is off by as many hours as a file says."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler to make a clock that jumps")
    room = tmp_path_factory.mktemp("shim")
    (room / "shim.c").write_text(SHIM)
    made = room / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, room / "shim.c"], check=True)
    return made


def test_a_clock_that_jumps(shim: Path, tmp_path: Path) -> None:
    """For trainer and keeper, in the middle of saves; the file system has its own."""
    root = tmp_path / "root"
    written, dead = root / "step-000000009-n9-a", root / "step-000000008-n8-a"
    for directory in (written, dead):
        directory.mkdir(parents=True)
        (directory / "shard-00000.part").write_bytes(b"half")
    os.utime(dead, (time.time() - 3600,) * 2)
    off_by = tmp_path / "off_by"
    environment = os.environ | {"LD_PRELOAD": str(shim), "CLOCK_IS_OFF_BY": str(off_by)}
    command = [sys.executable, "-c", SCRIPT, str(root), str(off_by)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert written.is_dir(), "what a keeper may be at was deleted"
    assert not dead.exists()


def test_a_directory_that_is_younger_than_now(tmp_path: Path) -> None:
    """The file system's clock was set back since: its keeper may still be at it."""
    store = Folder(tmp_path)
    store.put("a", "shard", [b"x"], 1)
    os.utime(tmp_path / "a", (time.time() + 7200,) * 2)
    assert store.quiet_s("a") < 0
