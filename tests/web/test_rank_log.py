"""Logs of ranks, whole and followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.errors import CorruptionError
from outlast.web.rank_log import TAIL_BYTES, RankLog


def write(run_dir: Path, worker: str, text: str, stream: str = "stdout") -> None:
    path = run_dir / "logs" / "0" / worker / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_a_log_is_followed_to_another_worker(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    assert log.read_on() == ""
    write(tmp_path, "w1-0", "one\n")
    assert log.read_on() == "w1-0 stdout:\none\n"
    assert log.read_on() == ""
    write(tmp_path, "w1-0", "two\n")
    assert log.read_on() == "two\n"
    write(tmp_path, "w1-5", "three\n")
    assert log.read_on() == "w1-5 stdout:\nthree\n"
    write(tmp_path, "w1-5", "bad\n", "stderr")
    assert log.read_on() == "w1-5 stderr:\nbad\n"


def test_a_long_and_a_truncated_log(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    write(tmp_path, "w1-0", "x" * 3 * TAIL_BYTES)
    assert len(log.read_on()) == TAIL_BYTES + len("w1-0 stdout:\n")
    (tmp_path / "logs" / "0" / "w1-0" / "stdout.log").write_text("anew\n")
    assert log.read_on() == "anew\n"


def test_a_log_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("x")
    folder = tmp_path / "run" / "logs" / "0" / "w1-0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to(tmp_path / "secret.log")
    with pytest.raises(CorruptionError, match="leads out"):
        RankLog(tmp_path / "run", 0).read_on()
