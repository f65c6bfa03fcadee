"""Durations and failures of a run, as the plan and the fleet count them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="jobs are tables: pip install 'outlast[plan]'")

from outlast.launch.policies.policy_files import read_policy
from outlast.plan.answers.policy_trial import MeasuredJob, simulated
from outlast.plan.simulate.narrator import narrate
from outlast.plan.simulate.scheduled_failures import FailureSchedule, ScheduledFailure
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.run_costs import run_costs
from outlast.telemetry.run_summary import summarise


def test_a_return_of_absent_ranks_is_no_failure(tmp_path: Path) -> None:
    kills = tuple(ScheduledFailure(t_s=t_s, kind="killed", seats=(1,)) for t_s in (5.0, 20.0))
    job = MeasuredJob(
        world=4, spares=0, steps=400, step_s=0.1, interval=0, copy_interval=0, save_s=0.0,
        flush_s=0.0, start_s=3.0, rungs_s={"shrink": (0.5,)}, failures=kills,
    )  # fmt: skip
    schedule = FailureSchedule(failures=kills, rung_s=job.rung_s())
    policy = read_policy("torchft-like")
    told = narrate(simulated(job), run_dir=tmp_path, recovery=policy, schedule=schedule)
    assert told.rungs == {"shrink": 2, "regrow": 2}
    assert [one.rung for one in run_costs(read_history(tmp_path)).survived] == ["shrink", "shrink"]
    found = summarise(tmp_path)
    assert {kind: cause.count for kind, cause in found.causes.items()} == {"killed": 2}
    assert len(found.incidents) == 4, "returns are shown"
