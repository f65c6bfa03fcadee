"""Policies on recorded, scheduled and simulated failures, decided by the real controller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from outlast.cli.main import main
from outlast.controller.recovery.recovery_policy import RecoveryPolicy, plain_rules
from outlast.events import FaultKind
from outlast.launch.policies.policy_files import PRESETS, read_policy
from outlast.plan.answers.policy_trial import (
    MeasuredJob,
    PolicyTrial,
    measure,
    quantile,
    simulated,
    try_on_scenario,
    try_on_schedule,
)
from outlast.plan.model.scenario import scenario_of
from outlast.plan.simulate.narrator import narrate
from outlast.plan.simulate.scheduled_failures import FailureSchedule, ScheduledFailure
from outlast.plan.simulate.simulated_job import STORAGE
from outlast.telemetry.event_store import read_events

JOB = MeasuredJob(
    world=4, spares=1, steps=600, step_s=0.1, interval=50, copy_interval=10, save_s=0.01,
    flush_s=0.2, start_s=6.0, failures=(),
    rungs_s={"replace": (0.7,), "respawn": (3.0,), "restart": (6.0,), "rollback": (4.0,),
             "migrate": (0.3,)},
)  # fmt: skip

LEAVE_ONLY = RecoveryPolicy(
    name="leave", default=plain_rules("retry", "replace", "shrink", "restart", "stop")
)


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


def alone(*failures: ScheduledFailure, **how: Any) -> MeasuredJob:
    return replace(JOB, failures=failures, spares=0, **how)


KILL = ScheduledFailure(t_s=7.0, kind="killed", seats=(1,))


def test_ranks_leave_and_come_back() -> None:
    """A kill: two pauses, and a quarter of the work less until a worker is there after 3 s."""
    trial = try_on_schedule(alone(KILL), read_policy("torchft-like"))
    assert trial.rungs == {"shrink": 1, "regrow": 1}
    assert trial.slow_s == pytest.approx(3.0 / 4, abs=0.01)  # a save is as long as with all
    assert trial.wall_s == pytest.approx(60 + 0.6 + 0.2 + 2 * 0.7 + 3.0 / 4, abs=0.1)
    assert trial.steps_redone == 0
    respawned = try_on_schedule(alone(KILL), read_policy("elastic"))
    assert respawned.rungs == {"respawn": 1} and respawned.slow_s == 0


def test_a_step_with_fewer_ranks_may_be_shorter() -> None:
    """Ranks that share processors do the same work in the same time."""
    trial = try_on_schedule(alone(KILL, step_shares={1: 0.75}), read_policy("torchft-like"))
    assert trial.slow_s == 0 and trial.rungs == {"shrink": 1, "regrow": 1}


def test_saves_go_on_while_ranks_are_absent() -> None:
    """A restart long after the kill goes back to the newest checkpoint, not to before the kill."""
    late = {**JOB.rungs_s, "respawn": (20.0,)}
    all_lost = ScheduledFailure(t_s=20.0, kind="killed", seats=(0, 1, 2, 3), source=STORAGE)
    found = alone(KILL, all_lost, rungs_s=late)
    trial = try_on_schedule(found, read_policy("torchft-like"))
    assert trial.rungs == {"shrink": 1, "restart": 1}
    # The checkpoint of step 150 is the newest one: a step takes 4/3 of its time behind the kill.
    done = (7.0 + (20.0 - 7.0 - 0.7) * 3 / 4) / 0.1
    assert trial.steps_redone == pytest.approx(done - 150, abs=4)


def test_several_ranks_leave_and_lost_ones_are_struck_in_vain() -> None:
    kills = [(7.0, (1,)), (8.0, (2,)), (8.5, (2,)), (20.0, (0, 1, 2)), (40.0, (3,))]
    found = [ScheduledFailure(t_s=t_s, kind="killed", seats=seats) for t_s, seats in kills]
    trial = try_on_schedule(alone(*found), read_policy("torchft-like"))
    assert trial.outcome == "done"
    assert trial.rungs["shrink"] == 4 and 3 <= trial.rungs["regrow"] <= 5


def test_ranks_that_hold_shards_do_not_leave(tmp_path: Path) -> None:
    scenario = tmp_path / "sharded.toml"
    text = 'gpus = 64\nfailures = "400h"\nwork = "1d"\nspares = 0\nrepair = "30min"\n'
    found: dict[str, PolicyTrial] = {}
    for name, gpus in (("sharded", 16), ("whole", 8)):  # a node has 8
        scenario.write_text(f"{text}replica-gpus = {gpus}\n")
        known = scenario_of({}, scenario)
        found[name] = try_on_scenario(known, read_policy("elastic"), replications=3)
    assert "shrink" not in found["sharded"].rungs and found["sharded"].outcome == "done"
    assert found["whole"].rungs["shrink"] and found["whole"].rungs["regrow"]
    assert 0 < found["whole"].slow_s < found["whole"].ended_s - found["whole"].work_s


@settings(max_examples=60, deadline=None)
@example(
    times=[1.0, 1.0, 1.0, 33.0, 36.5],
    ranks=[set(), set(), set(), {0}, set(), set(), set(), set()],
    name="torchft-like",
    spares=0,
)
@given(
    times=st.lists(st.floats(0.1, 70.0), max_size=8),
    ranks=st.lists(st.sets(st.integers(0, 3), max_size=4), min_size=8, max_size=8),
    name=st.sampled_from(["torchft-like", "elastic", "default", "memory-restart"]),
    spares=st.integers(0, 2),
)
def test_any_schedule_ends_and_every_second_has_its_account(
    times: list[float], ranks: list[set[int]], name: str, spares: int
) -> None:
    """Time is work, or in one of the accounts; absent ranks that come back are no failures."""
    found = tuple(
        ScheduledFailure(t_s=t_s, kind="killed", seats=tuple(seats), detect_s=0.2)
        for t_s, seats in zip(sorted(times), ranks, strict=False)
    )
    job = simulated(replace(JOB, spares=spares))
    schedule = FailureSchedule(failures=found, rung_s=JOB.rung_s(), refill_s=2.0)
    run = narrate(job, recovery=read_policy(name), schedule=schedule)
    assert run.outcome == "done", run.reason
    accounts = ("redo_s", "save_s", "detect_s", "restart_s", "wait_s", "slow_s")
    spent_s = sum(run.tallies[each] for each in accounts)
    assert run.ended_s == pytest.approx(job.work_s + spent_s, abs=1e-6)
    assert name in ("torchft-like", "elastic") or not run.rungs.keys() & {"shrink", "regrow"}


def test_a_run_that_shrank_is_measured(tmp_path: Path) -> None:
    """A return is no failure; its time, and the pace without a rank, are measured."""
    job = alone(KILL, replace(KILL, t_s=30.0), step_shares={1: 0.9})
    schedule = FailureSchedule(
        failures=job.failures, rung_s=job.rung_s(), step_shares=job.step_shares
    )
    told = narrate(
        simulated(job), run_dir=tmp_path, recovery=read_policy("torchft-like"), schedule=schedule
    )
    measured = measure(read_events(tmp_path))
    assert [one.kind for one in measured.failures] == ["killed", "killed"]
    assert {"shrink", "regrow"} <= measured.rungs_s.keys()
    assert measured.rungs_s["respawn"] == pytest.approx((3.7, 3.7), abs=0.05), "from the loss on"
    assert measured.step_s == pytest.approx(0.1, rel=0.02)
    assert measured.step_shares[1] == pytest.approx(0.9 / 0.75, rel=0.1)
    assert told.rungs == {"shrink": 2, "regrow": 2}


@pytest.mark.parametrize("spares", [0, 1])
def test_fewer_ranks_are_as_the_kernel_has_dropped_replicas(spares: int) -> None:
    """The same failures and repairs, replication by replication, in another simulator."""
    pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")
    from outlast.plan.simulate.replications import simulate

    job = simulated(JOB)._replace(
        work_s=2e5, interval_s=1e9, versions=1, step_s=0.0, memory_cost_s=0.0, flush_s=0.0,
        copies=0, software_from=STORAGE, nodes=8, replicas=8, spares=spares, node_rate=1e-5,
        stay_share=0.0, repair_s=3000.0, repair_shape=1.0, detect_s=30.0,
        restart_s=(20.0, 60.0, 300.0), failures_max=100_000,
    )  # fmt: skip
    rows = simulate(job._replace(drop=True), 12, seed=3)
    walls = [narrate(job, seed=3, replication=k, recovery=LEAVE_ONLY).ended_s for k in range(12)]
    assert walls == pytest.approx(list(rows["wall_s"]), rel=0.01)


@pytest.mark.parametrize(
    ("rungs", "taken"),
    [
        ('{ rung = "migrate", spares_min = 2 }, "stop"', {}),
        ('{ rung = "migrate", spares_min = 1 }, "stop"', {"migrate": 1}),
        ('"restart", "migrate", "stop"', {"migrate": 1}),
        ('"restart", "stop"', {}),
    ],
)
def test_a_notice_moves_ranks_or_changes_nothing(
    tmp_path: Path, rungs: str, taken: dict[str, int]
) -> None:
    """Whatever the policy has besides migrate, and whatever its conditions: nothing failed."""
    path = tmp_path / "mine.toml"
    path.write_text(f'[default]\nrungs = ["replace", "stop"]\n[notice]\nrungs = [{rungs}]\n')
    trial = try_on_schedule(failing((30.0, "requested")), read_policy(str(path)))
    assert (trial.outcome, trial.rungs) == ("done", taken)


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
        ((), 2, "give either --run RUN_DIR, --lake LAKE or"),
        (("--run", "a", "--simulate", "b"), 2, "give either"),
        (("--run", "nothing"), 1, "holds no events"),
        (("--simulate", "nothing.toml"), 2, "No such file"),
        (("--run", "a", "--lake", "b"), 2, "give either"),
        (("--lake", "nothing"), 1, "is no lake"),
        (("--run", "a", "--spares", "1"), 2, "--spares and --cluster are for --lake"),
        (("--lake", "a", "--spares", "-1"), 2, "from 0 to"),
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
