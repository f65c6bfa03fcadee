"""Run directory: one job, one launcher at a time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.errors import RunDirError
from outlast.launch import run_directory
from outlast.launch.host import reaper


def test_fresh_then_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = run_directory.take(path, "train.py", ("--lr", "1"), 4)
    assert first.job.term == 1 and not first.resumed and first.notes == ()
    assert {p.name for p in path.iterdir()} >= {
        "run.json", "lock", "events", "journal", "logs", "checkpoints", "faults",
    }  # fmt: skip
    first.release()
    second = run_directory.take(path, "train.py", ("--lr", "1"), 4)
    assert second.job.term == 2 and second.resumed and second.job.run == first.job.run
    second.release()


def test_in_use(tmp_path: Path) -> None:
    holder = run_directory.take(tmp_path, "train.py", (), 2)
    with pytest.raises(RunDirError, match=f"in use by pid {os.getpid()}"):
        run_directory.take(tmp_path, "train.py", (), 2)
    holder.release()


@pytest.mark.parametrize("end", ["gone", "zombie", "number taken"])
def test_a_dead_launchers_warden_is_waited_for(tmp_path: Path, end: str) -> None:
    """The lock is still held, but not by the pid in it: that is the warden cleaning up."""
    holder = run_directory.take(tmp_path, "train.py", (), 2)
    with subprocess.Popen([sys.executable, "-c", ""]) as launcher:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
        if end == "gone":
            launcher.wait(10)
        pid = os.getpid() if end == "number taken" else launcher.pid
        os.ftruncate(holder.lock_fd, 0)
        os.pwrite(holder.lock_fd, f"{pid} 1\n".encode() if end != "zombie" else b"%d\n" % pid, 0)
        with pytest.raises(RunDirError, match=f"pid {pid}. is not alive on this host"):
            run_directory.take(tmp_path, "train.py", (), 2, wait_s=0.2)
    fcntl.flock(holder.lock_fd, fcntl.LOCK_UN)
    run_directory.take(tmp_path, "train.py", (), 2, wait_s=0.2).release()
    holder.release()


def test_the_wait_is_longer_than_a_wardens_sweep() -> None:
    assert run_directory.LOCK_S > reaper.SWEEP_S


@pytest.mark.parametrize(
    ("script", "world", "says"), [("other.py", 2, "script"), ("train.py", 3, "world size")]
)
def test_another_job(tmp_path: Path, script: str, world: int, says: str) -> None:
    run_directory.take(tmp_path, "train.py", (), 2).release()
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(RunDirError, match=f"another job: its {says}"):
        run_directory.take(tmp_path, script, (), world)
    assert (tmp_path / "run.json").read_bytes() == before
    run_directory.take(tmp_path, "train.py", (), 2).release()


def test_other_arguments_are_noted(tmp_path: Path) -> None:
    run_directory.take(tmp_path, "train.py", ("--lr", "1"), 2).release()
    resumed = run_directory.take(tmp_path, "train.py", ("--lr", "2"), 2)
    assert "--lr 2 instead of --lr 1" in resumed.notes[0]
    resumed.release()


def test_a_damaged_run_json_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunDirError, match=r"run\.json cannot be read"):
        run_directory.take(tmp_path, "train.py", (), 2)
    assert (tmp_path / "run.json").read_text() == "{"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="cannot be written"):
        run_directory.take(tmp_path / "file" / "run", "train.py", (), 2)


def test_a_full_disk_is_said_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "FREE_BYTES_MIN", 1 << 60)
    with pytest.raises(RunDirError, match="are free under"):
        run_directory.take(tmp_path, "train.py", (), 2)
    assert not (tmp_path / "run.json").exists()


def test_logs_elsewhere_and_a_spares_seat(tmp_path: Path) -> None:
    run_dir = run_directory.take(tmp_path / "run", "train.py", (), 2)
    run_directory.place_logs(run_dir, str(tmp_path / "logs"), "none")
    directory = run_dir.log_dir(-1, "w1-2")
    (directory / "stdout.log").write_text("hello")
    run_dir.seat_log(0, "w1-2")
    run_dir.seat_log(0, "w1-2")
    assert (tmp_path / "run/logs/0/w1-2/stdout.log").read_text() == "hello"
    assert len(list((tmp_path / "logs").glob("*/spare/w1-2/stdout.log"))) == 1
    run_dir.release()
