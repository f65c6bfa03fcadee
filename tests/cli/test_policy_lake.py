"""`outlast policy try --lake`: failures that a fleet's lake records, under other policies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polars", reason="lakes are tables: pip install 'outlast[fleet]'")

from msgspec.structs import replace

from outlast.cli.main import main
from outlast.events import PhaseDone, encoder
from outlast.launch.policies.policy_files import read_policy
from outlast.plan.answers.policy_trial import MeasuredJob, simulated
from outlast.plan.simulate.narrator import narrate
from outlast.plan.simulate.scheduled_failures import FailureSchedule, ScheduledFailure
from outlast.plan.simulate.simulated_job import STORAGE
from outlast.telemetry.event_store import DIRECTORY, read_events
from outlast.telemetry.segment_files import SegmentWriter

JOB = MeasuredJob(
    world=4, spares=1, steps=3000, step_s=0.1, interval=200, copy_interval=200, save_s=0.01,
    flush_s=0.2, start_s=6.0, failures=(),
    rungs_s={"replace": (0.7,), "restart": (6.0,), "rollback": (4.0,)},
)  # fmt: skip
KILLS = tuple(
    ScheduledFailure(t_s=t_s, kind="killed", seats=(1,), detect_s=0.5) for t_s in (40.3, 120.1)
)
ALL = ScheduledFailure(t_s=200.0, kind="killed", seats=(0, 1, 2, 3), source=STORAGE, detect_s=0.5)
SACCT = (
    "JobID|JobName|User|Account|Partition|QOS|State|ExitCode|Submit|Eligible|Start|End|NNodes"
    "|AllocTRES|NodeList|Restarts\n"
)


def recorded(tmp_path: Path, name: str, policy: str, *failures: ScheduledFailure) -> Path:
    job = replace(JOB, failures=failures)
    schedule = FailureSchedule(failures=failures, rung_s=job.rung_s(), refill_s=5.0)
    run_dir = tmp_path / name
    run_dir.mkdir()
    narrate(simulated(job), run_dir=run_dir, recovery=read_policy(policy), schedule=schedule)
    spread_saves(run_dir)
    return run_dir


def spread_saves(run_dir: Path) -> None:
    """Make saves differ by some microseconds, as real ones do: a lake has equal records once."""
    found = read_events(run_dir)
    shutil.rmtree(run_dir / DIRECTORY)
    writer = SegmentWriter(run_dir / DIRECTORY, "story")
    for event in found:
        if isinstance(event, PhaseDone) and event.kind == "checkpoint":
            event = replace(event, t_begin_ns=event.t_begin_ns - 1000 * event.step)
        writer.append(encoder.encode(event))
    writer.close()


def ingested(tmp_path: Path, *logs: Path) -> str:
    lake = str(tmp_path / "lake")
    assert main(["fleet", "ingest", lake, *map(str, logs)]) == 0
    return lake


def tried(
    capsys: pytest.CaptureFixture[str], lake: str, *flags: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    capsys.readouterr()
    assert main(["policy", "try", "--lake", lake, "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    return {one["policy"]: one for one in found["trials"]}, found


def test_failures_of_a_run_are_answered_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = recorded(tmp_path, "run", "default", *KILLS, ALL)
    lake = ingested(tmp_path, run_dir)
    trials, found = tried(capsys, lake, "--policy=checkpoint-restart", "--price=$2")
    assert trials.keys() == {"checkpoint-restart", "default"}, "the default is beside it"
    assert found["of"] == "lake" and "3 failures of 1 job" in found["source"]
    default, restart = trials["default"], trials["checkpoint-restart"]
    assert default["rungs"] == {"replace": 2, "restart": 1}, "as the run did"
    assert restart["rungs"] == {"restart": 3}
    assert restart["ended_s"] > default["ended_s"] > default["work_s"] > 0
    assert restart["cost_usd"] > default["cost_usd"] > 0
    assert default["ended_s"] == pytest.approx(found["recorded_s"], rel=0.05)
    for one in trials.values():
        low_s, high_s = one["band_s"]
        assert low_s <= one["ended_s"] <= high_s
    assert default["band_s"][0] < default["ended_s"], "the last failure may have left a replica"
    assert main(["policy", "try", "--lake", lake]) == 0
    assert "that the jobs ran" in capsys.readouterr().out


def test_a_return_of_absent_ranks_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(JOB, spares=0)
    schedule = FailureSchedule(failures=KILLS, rung_s=alone.rung_s())
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    policy = read_policy("torchft-like")
    told = narrate(simulated(alone), run_dir=run_dir, recovery=policy, schedule=schedule)
    assert told.rungs == {"shrink": 2, "regrow": 2}
    lake = ingested(tmp_path, run_dir)
    trials, found = tried(capsys, lake, "--policy=torchft-like")
    assert "2 failures of 1 job" in found["source"]
    assert trials["torchft-like"]["rungs"] == told.rungs
    assert trials["default"]["rungs"] == {"respawn": 2}
    assert trials["torchft-like"]["slow_s"] > 0 == trials["default"]["slow_s"]


def test_what_the_lake_does_not_know_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = ingested(tmp_path, recorded(tmp_path, "run", "default", *KILLS))
    words = ["policy", "try", "--lake", lake, "--policy", "checkpoint-restart"]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "takes restart in job story, and the lake has no time of restart" in said
    calm = tmp_path / "calm"
    calm.mkdir()
    quiet = ingested(calm, recorded(calm, "run", "default"))
    assert main(["policy", "try", "--lake", quiet]) == 2
    assert "no failures on which a policy can be tried" in " ".join(
        capsys.readouterr().err.replace("│", " ").split()
    )


def sacct_row(job: int, state: str, begin: str, end: str) -> str:
    tres = "billing=16,gres/gpu=16,node=2"
    return (
        f"{job}|train|ada|lab|gpu|normal|{state}|0:0|{begin}|{begin}|{begin}|{end}|2|{tres}"
        "|node[1-2]|0\n"
    )


def test_a_schedulers_jobs_take_their_costs_from_a_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "sacct.txt"
    rows = [
        sacct_row(7, "NODE_FAIL", "2026-01-01T00:00:00", "2026-01-01T05:00:00"),
        sacct_row(7, "COMPLETED", "2026-01-01T06:00:00", "2026-01-01T12:00:00"),
        sacct_row(8, "NODE_FAIL", "2026-01-01T00:00:00", "2026-01-01T05:00:00"),
        sacct_row(9, "COMPLETED", "2026-01-01T00:00:00", "2026-01-01T05:00:00"),
    ]
    log.write_text(SACCT + "".join(rows))
    lake = ingested(tmp_path, log)
    assert main(["policy", "try", "--lake", lake]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "1 jobs whose steps and recoveries were not measured, without --simulate" in said
    scenario = tmp_path / "costs.toml"
    scenario.write_text('gpus = 16\ninterval = "1h"\nreplica-gpus = 8\nspares = 1\n')
    flags = (f"--simulate={scenario}", "--policy=checkpoint-restart")
    trials, found = tried(capsys, lake, *flags)
    assert "1 failure of 1 job" in found["source"]
    assert any("1 jobs' last attempts that a failure ended" in note for note in found["notes"])
    assert trials["default"]["rungs"] == {"replace": 1}
    assert trials["checkpoint-restart"]["rungs"] == {"restart": 1}
    assert found["recorded_s"] == 11 * 3600, "without the queue between the attempts"
    hours = trials["default"]["cost_usd"] / 2.5 / (16 + 8)
    assert hours == pytest.approx(trials["default"]["ended_s"] / 3600, rel=1e-6)
