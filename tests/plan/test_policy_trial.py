"""Policies on recorded, scheduled and simulated failures, decided by the real controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from outlast.cli.main import main
from outlast.errors import UsageError
from outlast.events import FaultKind
from outlast.launch.policies.policy_files import PRESETS, read_policy
from outlast.plan.answers.policy_trial import (
    MeasuredJob,
    measure,
    quantile,
    simulated,
    try_on_schedule,
)
from outlast.plan.simulate.narrator import narrate
from outlast.plan.simulate.scheduled_failures import FailureSchedule, ScheduledFailure
from outlast.telemetry.event_store import read_events

JOB = MeasuredJob(
    world=4, spares=1, steps=600, step_s=0.1, interval=50, copy_interval=10, save_s=0.01,
    flush_s=0.2, start_s=6.0, failures=(),
    rungs_s={"replace": (0.7,), "respawn": (3.0,), "restart": (6.0,), "rollback": (4.0,),
             "migrate": (0.3,)},
)  # fmt: skip


def failing(*failures: tuple[float, FaultKind]) -> MeasuredJob:
    found = tuple(ScheduledFailure(t_s=t_s, kind=kind, seats=(1,)) for t_s, kind in failures)
    return replace(JOB, failures=found)


KILLS = failing((7.33, "killed"), (17.1, "killed"), (41.0, "hung"))


@pytest.mark.parametrize(
    ("policy", "rungs", "redone"),
    [
        ("default", {"replace": 3}, 0),
        ("exact", {"replace": 3}, 0),
        ("torchft-like", {"replace": 3}, 0),
        ("checkpoint-restart", {"restart": 3}, 75),  # 25 of 50 on the average
        ("memory-restart", {"rollback": 3}, 15),
    ],
)
def test_the_controller_answers_a_schedule(policy: str, rungs: dict[str, int], redone: int) -> None:
    trial = try_on_schedule(KILLS, read_policy(policy))
    assert (trial.outcome, trial.rungs) == ("done", rungs)
    assert trial.wall_s is not None
    each_s = {"replace": 0.7, "restart": 6.0, "rollback": 4.0}[next(iter(rungs))]
    spent_s = 60 + 60 * 0.01 + 3 * each_s + trial.steps_redone * 0.1
    assert trial.wall_s == pytest.approx(spent_s, abs=0.5)
    assert trial.steps_redone == pytest.approx(redone, abs=20 if redone > 20 else 12)


def test_without_failures_the_time_is_that_of_steps_and_saves() -> None:
    trial = try_on_schedule(JOB, read_policy("exact"), usd_per_rank_hour=3600.0)
    assert trial.wall_s == pytest.approx(60 + 60 * 0.01 + 0.2)  # the last save is waited for
    assert trial.cost_usd == pytest.approx(5 * trial.ended_s)
    assert (trial.rungs, trial.steps_redone) == ({}, 0)


def test_a_spare_that_is_not_back_yet_is_a_respawn() -> None:
    soon = failing((7.0, "killed"), (9.0, "killed"))
    trial = try_on_schedule(soon, read_policy("exact"), refill_s=5.0)
    assert trial.rungs == {"replace": 1, "respawn": 1}


def test_a_notice_moves_a_rank_or_nobody() -> None:
    notice = failing((30.0, "requested"))
    assert try_on_schedule(notice, read_policy("exact")).rungs == {"migrate": 1}
    stays = try_on_schedule(notice, read_policy("checkpoint-restart"))
    assert stays.rungs == {} and stays.wall_s == pytest.approx(60.8, abs=0.05)


def test_ranks_that_would_leave_are_refused_by_name() -> None:
    alone = replace(failing((7.0, "killed")), spares=0)
    with pytest.raises(UsageError, match="ranks would leave"):
        try_on_schedule(alone, read_policy("torchft-like"))


def test_a_budget_ends_the_job_where_the_policy_says_so() -> None:
    kills = failing(*((5.0 + 9 * k, "killed") for k in range(6)))
    cheap = replace(read_policy("checkpoint-restart"), name="few", budgets={"restart": 2})
    trial = try_on_schedule(kills, cheap)
    assert trial.outcome == "gave_up" and trial.wall_s is None
    assert "its budget is 2" in trial.reason
    assert trial.rungs == {"restart": 2, "stop": 1}


@pytest.mark.parametrize("name", ["default", "checkpoint-restart", "memory-restart"])
def test_a_recorded_run_is_measured_and_played_again(tmp_path: Path, name: str) -> None:
    policy = read_policy(name)
    schedule = FailureSchedule(failures=KILLS.failures, rung_s=KILLS.rung_s())
    told = narrate(simulated(KILLS), run_dir=tmp_path, recovery=policy, schedule=schedule)
    measured = measure(read_events(tmp_path))
    assert (measured.world, measured.spares, measured.steps) == (4, 1, 600)
    assert measured.step_s == pytest.approx(0.1, rel=0.05)
    assert [one.t_s for one in measured.failures] == pytest.approx([7.33, 17.1, 41.0], abs=0.01)
    again = try_on_schedule(measured, policy)
    assert again.rungs == told.rungs
    assert again.wall_s == pytest.approx(told.ended_s, rel=0.05)


def test_quantiles_are_interpolated() -> None:
    assert [quantile([3.0, 1.0], share) for share in (0, 0.25, 1)] == [1.0, 1.5, 3.0]


def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = FailureSchedule(failures=KILLS.failures, rung_s=KILLS.rung_s())
    narrate(simulated(KILLS), run_dir=tmp_path, schedule=schedule)
    flags = [f"--policy={name}" for name in PRESETS]
    assert main(["policy", "try", "--run", str(tmp_path), "--json", "--price", "$2", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    wall_s = {one["policy"]: one["wall_s"] for one in found["trials"]}
    assert wall_s.keys() == set(PRESETS)
    assert wall_s["checkpoint-restart"] > wall_s["exact"] > 60
    assert all(one["cost_usd"] > 0 for one in found["trials"])
    assert "restart" in found["assumed"] and "replace" not in found["assumed"]
    assert main(["policy", "try", "--run", str(tmp_path)]) == 0
    assert "3 replace" in capsys.readouterr().out


def test_a_scenario_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text('gpus = 64\nfailures = "200h"\nwork = "2d"\nreplica-gpus = 16\n')
    words = ["policy", "try", "--simulate", str(scenario), "--replications", "2", "--json"]
    assert main([*words, "--policy", "exact", "--policy", "checkpoint-restart"]) == 0
    exact, restart = json.loads(capsys.readouterr().out)["trials"]
    assert exact["outcome"] == restart["outcome"] == "done"
    assert restart["wall_s"] > exact["wall_s"] > 2 * 86400
    assert set(restart["rungs"]) == {"restart"}
    assert exact["rungs"]["replace"] > exact["rungs"].get("restart", 0)  # of fatal failures


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ((), 2, "give either --run RUN_DIR or --simulate"),
        (("--run", "a", "--simulate", "b"), 2, "give either"),
        (("--run", "nothing"), 1, "holds no events"),
        (("--simulate", "nothing.toml"), 2, "No such file"),
        (("--simulate", "x.toml", "--price", "$1"), 2, "--price is for --run"),
        (("--simulate", "x.toml", "--replications", "0"), 2, "from 1 to"),
        (("--run", ".", "--policy", "chepest"), 2, "did you mean cheapest?"),
    ],
)
def test_bad_input_is_named(
    flags: tuple[str, ...], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "try", *flags]) == code
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())
