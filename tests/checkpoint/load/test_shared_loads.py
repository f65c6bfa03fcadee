"""Shared loads: chunks that several ranks need are read once, with equal results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.bucket_server import BucketServer
from tests.checkpoint.load.shared_load_cases import LOADS, WORLD

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 150.0


def run(root: Path, *cases: str, debug: str = "OFF") -> tuple[list[int], list[dict[str, str]]]:
    """Exit codes, and what ranks that have ended well tell of each case."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.checkpoint.load.shared_load_ranks",
        str(root),
        *cases,
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, timeout=DEADLINE_S, capture_output=True, text=True, check=False,
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": debug},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    files = [root / f"{rank}.json" for rank in range(WORLD)]
    told = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return json.loads(done.stdout), told


def test_data_that_several_ranks_need_is_read_once(tmp_path: Path) -> None:
    cases = [case.__name__ for case in LOADS]
    codes, told = run(tmp_path, *cases)
    assert told == [dict.fromkeys(cases, "")] * WORLD and codes == [0] * WORLD


@pytest.mark.long
def test_a_bucket_is_read_once_by_default(
    tmp_path: Path, server: BucketServer, address: str
) -> None:
    _, told = run(tmp_path, f"bucket={address}")
    assert told == [{f"bucket={address}": ""}] * WORLD
    gets = [path for path, _ in server.requests("GET", tmp_path.name) if "/shard-" in path]
    by_load_and_after_the_copy = 2
    assert len(gets) == by_load_and_after_the_copy * len(set(gets)) == 2 * WORLD, gets


@pytest.mark.long
def test_layouts_of_torch_are_read_once(tmp_path: Path) -> None:
    _, told = run(tmp_path, case := "layouts_of_torch")
    assert told == [{case: ""}] * WORLD


@pytest.mark.long
def test_torch_may_compare_the_collectives_of_ranks(tmp_path: Path) -> None:
    codes, _ = run(tmp_path, "own_saves", "unlike", debug="DETAIL")
    assert codes == [0] * WORLD


@pytest.mark.long
def test_random_wants_and_troubles(tmp_path: Path) -> None:
    codes, told = run(tmp_path, case := "whatever=80")
    assert told == [{case: ""}] * WORLD and codes == [0] * WORLD


@pytest.mark.long
def test_a_killed_rank_fails_the_load_on_all_others(tmp_path: Path) -> None:
    codes, told = run(tmp_path, case := "killed=2=4")
    assert codes == [0, 0, -signal.SIGKILL, 0]
    said = [each[case] for each in told]
    assert len(said) == WORLD - 1 and all("GroupError" in each for each in said), said
    assert any("rank 2" in each for each in said), said


@pytest.mark.long
def test_a_rank_that_fails_is_named_to_all(tmp_path: Path) -> None:
    codes, told = run(tmp_path, case := "raises=2=4")
    assert codes == [0] * WORLD
    said = [each[case] for each in told]
    assert said.pop(2) == "RuntimeError: a bug"
    assert all("rank 2 failed: a bug" in each for each in said), said


@pytest.mark.long
def test_a_disk_that_hangs_on_one_rank_fails_the_load_on_all(tmp_path: Path) -> None:
    codes, told = run(tmp_path, "hangs")
    assert codes == [0] * WORLD
    assert all("rank 2: " in t["hangs"] and "not answered" in t["hangs"] for t in told), told
