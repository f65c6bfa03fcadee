"""Titles of workers in the process table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
SHOW = """
import sys
from pathlib import Path
from outlast.worker.above_init.process_title import set_title
before = Path("/proc/self/environ").read_bytes()
set_title({rank}, {generation})
assert Path("/proc/self/environ").read_bytes() == before
title = Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0")
print(repr(title), Path("/proc/self/comm").read_text())
"""


def titled(tmp_path: Path, *args: str, rank: int = 2, generation: int = 3) -> tuple[bytes, str]:
    script = tmp_path / "train.py"
    script.write_text(SHOW.format(rank=rank, generation=generation))
    command = [sys.executable, "-u", str(script), *args]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    title, comm = out.split("' ")
    return eval(f"{title}'"), comm.strip()


def test_rank_generation_and_script(tmp_path: Path) -> None:
    title, comm = titled(tmp_path, "--lr", "0.1", "x" * 99)
    script = str(tmp_path / "train.py").encode()
    assert title.startswith(b"outlast rank 2 gen 3 " + script + b" --lr 0.1 xxx")
    assert comm == "rank2 gen3"
    assert titled(tmp_path, "x" * 99, rank=16383, generation=120)[1] == "rank16383 gen12"


def test_a_long_title_is_cut(tmp_path: Path) -> None:
    title, _ = titled(tmp_path, rank=10**60)
    assert title.startswith(b"outlast rank 1000") and b"\0" not in title
