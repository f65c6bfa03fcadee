"""`outlast plan story`: one narrated run, and its errors."""

from __future__ import annotations

import json
import math
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="jobs are tables: pip install 'outlast[plan]'")

from tests.plan.plan_command import Plan

from outlast.cli.main import main
from outlast.process_pool import interruption
from outlast.telemetry.run_summary import summarise

SAID = ("--gpus", "64", "--failures", "300h", "--work", "2d")


def explained(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["explain", str(run_dir), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["incidents"]


@pytest.mark.parametrize("strategy", ["outlast", "checkpoint-restart", "peer-memory"])
def test_it_is_one_of_the_runs_that_are_simulated(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    told = plan("story", *SAID, "--strategy", strategy, "--to", str(tmp_path), "--json").json
    assert told["outcome"] == "done" and told["tallies"]["failures"] > 3
    found = explained(tmp_path, capsys)
    assert len(found) == told["tallies"]["incidents"]
    assert {one["rung"] for one in found} == set(told["rungs"])
    result = summarise(tmp_path)
    assert result.wall_s == pytest.approx(told["tallies"]["wall_s"]) == told["ended_s"]
    assert result.step_s == 10.0  # as is assumed
    kinds = {"agent_lost": "lease", "exited": "pidfd"}
    for one in found:
        assert one["how"] == [kinds[fault["kind"]] for fault in one["faults"]]


def test_the_command_names_the_next_command(plan: Plan, tmp_path: Path) -> None:
    said = plan("story", *SAID, "--to", str(tmp_path / "new"), "--replication", "3")
    assert said.code == 0 and said.out.startswith("done after 2.")
    assert f"outlast explain {tmp_path / 'new'}" in said.out and "--step 10s" in said.out
    again = plan("story", *SAID, "--to", str(tmp_path / "new"))
    assert again.code == 2 and "exists already; nothing was written" in again.err


def test_invalid_arguments_are_reported_in_one_frame(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for to, words, code in (
        (tmp_path / "file", "exists already", 2),
        (tmp_path / "file" / "x", "Not a directory; nothing was written", 1),
        (tmp_path / ("x" * 300), "File name too long; nothing was written", 2),
    ):
        said = plan("story", *SAID, "--to", str(to))
        assert (said.code, said.out) == (code, "") and words in said.err
    for flag, value in (("--seed", "-1"), ("--replication", "-1"), ("--strategy", "drop")):
        said = plan("story", *SAID, "--to", str(tmp_path / "x"), flag, value)
        assert said.code == 2 and value in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_keeps_the_events_written_before(plan: Plan, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        said = plan("story", *SAID, "--to", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said.code == 1 and "events written before are readable" in said.err
    assert summarise(tmp_path).steps > 0


def test_ctrl_c_leaves_a_run_directory_that_can_be_read(plan: Plan, tmp_path: Path) -> None:
    """Too much to be told at once: it is pressed when some checkpoints have been told of."""
    over = threading.Event()

    def press() -> None:
        while sum(path.stat().st_size for path in tmp_path.glob("events/*.seg")) < 100_000:
            if over.wait(0.01):
                return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    try:
        said = plan(
            "story", "--gpus", "64", "--failures", "100000kh", "--work", "1000d",
            "--strategy", "checkpoint-restart", "--interval", "10min", "--to", str(tmp_path),
        )  # fmt: skip
    finally:
        over.set()
        presses.join()
    assert said.code == 4 and "interrupted: " in said.out
    result = summarise(tmp_path)
    assert result.outcome == "interrupted" and 0 < result.wall_s < math.inf
    assert result.steps > 0


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with interruption() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
