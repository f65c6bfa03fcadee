"""What a run must survive, with real signals: the same bits, nothing left, the truth told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.survive.conftest import Outcome, Runner, faults_told, same, wait_for

pytestmark = pytest.mark.process

FAST_WATCH = ("--limit", "hang_floor_s=2", "--limit", "hang_ceiling_s=20")
ONE_FAULT = {
    "killed in forward": ("kill:rank=2,step=8,phase=forward", ("killed", 2)),
    "killed in backward": ("kill:rank=2,step=8,phase=backward", ("killed", 2)),
    "killed in the vote": ("kill:rank=1,step=8,phase=vote", ("killed", 1)),
    "killed while applying": ("kill:rank=3,step=8,phase=apply", ("killed", 3)),
    "killed when done": ("kill:rank=2,step=8,phase=done", ("killed", 2)),
    "killed between phases": ("kill:rank=2,step=8,phase=between", ("killed", 2)),
    "killed in an evaluation": ("kill:rank=1,step=10,phase=eval", ("killed", 1)),
    "killed at the first step": ("kill:rank=1,step=1,phase=backward", ("killed", 1)),
    "rank 0 killed in backward": ("kill:rank=0,step=8,phase=backward", ("killed", 0)),
    "rank 0 killed in the vote": ("kill:rank=0,step=8,phase=vote", ("killed", 0)),
    "rank 0 killed while applying": ("kill:rank=0,step=8,phase=apply", ("killed", 0)),
    "an exception in forward": ("raise:rank=1,step=8,phase=forward", ("raised", 1)),
    "an exception in backward": ("raise:rank=1,step=8,phase=backward", ("raised", 1)),
}


@pytest.mark.parametrize(("spec", "told"), ONE_FAULT.values(), ids=ONE_FAULT.keys())
def test_one_fault(runner: Runner, undisturbed: Outcome, spec: str, told: tuple[str, int]) -> None:
    outcome = runner.run("--spares=1", "--fault", spec)
    same(outcome, undisturbed)
    assert faults_told(outcome) == {told}
    assert outcome.summary["committed_steps_lost"] == 0
    assert f"rank {told[1]}" in outcome.explain()


def test_a_reset_connection_costs_no_worker(runner: Runner, undisturbed: Outcome) -> None:
    outcome = runner.run("--fault", "reset:rank=1,step=8,phase=backward")
    same(outcome, undisturbed)
    assert faults_told(outcome) == set()
    assert [i["rung"] for i in outcome.summary["incidents"]] == ["retry"]
    assert outcome.summary["respawns"] == 0


def test_a_stopped_worker_is_fenced_and_waking_it_changes_nothing(
    runner: Runner, undisturbed: Outcome
) -> None:
    spec = "stop:rank=2,step=8,phase=forward,for=6"
    outcome = runner.run("--spares=1", *FAST_WATCH, "--fault", spec)
    same(outcome, undisturbed)
    assert {kind for kind, seat in faults_told(outcome) if seat == 2} & {"stopped", "hung"}


def test_a_hung_worker_is_found_by_the_runs_own_pace(runner: Runner, undisturbed: Outcome) -> None:
    outcome = runner.run("--spares=1", *FAST_WATCH, "--fault", "hang:rank=1,step=8,phase=forward")
    same(outcome, undisturbed)
    assert ("hung", 1) in faults_told(outcome)


def test_two_ranks_at_once(runner: Runner, undisturbed: Outcome) -> None:
    outcome = runner.run(
        "--spares=2", "--fault", "kill:rank=1,step=8,phase=backward",
        "--fault", "kill:rank=3,step=8,phase=backward",
    )  # fmt: skip
    same(outcome, undisturbed)
    assert {("killed", 1), ("killed", 3)} == faults_told(outcome)


SECOND_FAULTS = {
    "another rank while it heals": "kill:rank=1,step=8,phase=heal",
    "the donor in the middle of a transfer": "kill:step=8,phase=transfer",
    "the joiner in the middle of a transfer": "kill:rank=2,step=8,phase=receive",
}


@pytest.mark.parametrize("second", SECOND_FAULTS.values(), ids=SECOND_FAULTS.keys())
def test_a_second_failure_during_recovery(
    runner: Runner, undisturbed: Outcome, second: str
) -> None:
    first = "kill:rank=2,step=8,phase=backward"
    outcome = runner.run("--spares=2", "--fault", first, "--fault", second)
    same(outcome, undisturbed)
    assert len([f for f in faults_told(outcome) if f[0] == "killed"]) >= 1
    assert outcome.summary["committed_steps_lost"] == 0


def test_the_spare_itself_and_more_failures_than_spares(
    runner: Runner, undisturbed: Outcome
) -> None:
    outcome = runner.run(
        "--spares=1", "--fault", "kill:spare=0", "--fault", "kill:rank=2,step=4,phase=backward",
        "--fault", "kill:rank=1,step=9,phase=forward",
    )  # fmt: skip
    same(outcome, undisturbed)
    assert outcome.summary["committed_steps_lost"] == 0
    assert outcome.summary["respawns"] >= 1


def test_all_ranks_at_once_restart_from_the_newest_checkpoint(
    runner: Runner, undisturbed: Outcome
) -> None:
    kills = [f"--fault=kill:rank={rank},step=8,phase=forward" for rank in range(4)]
    outcome = runner.run("--checkpoint-every=3", *kills)
    same(outcome, undisturbed)
    assert outcome.summary["committed_steps_lost"] == 1
    assert outcome.summary["incidents"][0]["rung"] == "restart"


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    runner: Runner, undisturbed: Outcome
) -> None:
    outcome = runner.run("--checkpoint-every=4", "--fault", "full:rank=1,step=8,phase=checkpoint")
    same(outcome, undisturbed)
    kept = sorted(p.name[:14] for p in (outcome.run_dir / "checkpoints").iterdir())
    assert kept == ["step-000000004", "step-000000012"]
    assert any(type(e).__name__ == "CheckpointFailed" for e in outcome.events)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stopped_launcher_leaves_a_run_that_goes_on(
    runner: Runner, undisturbed: Outcome, tmp_path: Path, number: signal.Signals
) -> None:
    hold = tmp_path / "hold"
    process = runner.start("--spares=1", job=("--hold", str(hold)))
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 8")
    process.send_signal(number)
    hold.touch()
    stopped = runner.end(process)
    assert stopped.code == 4, stopped.output
    assert runner.left_behind() == []
    assert list((stopped.run_dir / "checkpoints").glob("step-*"))
    resumed = runner.run(job=("--hold", str(hold)))
    same(resumed, undisturbed)
    assert resumed.summary["committed_steps_lost"] == 0


def test_a_killed_launcher_leaves_no_orphan_and_a_run_that_goes_on(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    process = runner.start("--spares=1", "--checkpoint-every=3", job=("--hold", str(hold)))
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 8")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    wait_for(lambda: not runner.left_behind(), "no orphans", 15)
    hold.touch()
    resumed = runner.run("--checkpoint-every=3", job=("--hold", str(hold)))
    same(resumed, undisturbed)
