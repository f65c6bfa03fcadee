"""Log files on the console: whole lines, bounded rate, reported losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.launch import run_display
from outlast.launch.preflight import check_interface
from outlast.launch.run_display import Follower


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = Follower(path)
    assert follower.lines() == []  # not there yet
    with path.open("ab", buffering=0) as log:
        log.write(b"one\ntw")
        assert follower.lines() == ["one"]
        log.write("o\nünd \xff".encode("latin-1"))
        assert follower.lines() == ["two"]
    assert follower.lines() == []
    assert follower.lines(last=True) == ["\ufffdnd \ufffd"]


def test_a_flood_is_cut_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_display, "BURST_BYTES", 1000)
    path = tmp_path / "log"
    path.write_text("".join(f"line {number:05d}\n" for number in range(1000)))
    first, *rest = Follower(path).lines()
    assert first.startswith("... 10000 bytes not shown here") and str(path) in first
    assert rest[-1] == "line 00999" and len(rest) == 90


def test_a_line_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_display, "LINE_BYTES_MAX", 10)
    path = tmp_path / "log"
    path.write_text("x" * 50)
    assert Follower(path).lines() == ["x" * 10]


def test_interfaces_are_resolved_before_anything_starts() -> None:
    check_interface("")
    check_interface("lo")
    with pytest.raises(ConfigError, match="'nowhere0', which this host does not have"):
        check_interface("lo,nowhere0")
