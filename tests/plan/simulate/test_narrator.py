"""Narrated runs: equal to the kernel, decided by the real controller, readable as runs."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("numpy", reason="jobs are tables: pip install 'outlast[plan]'")

from outlast import events
from outlast.config import Limits
from outlast.errors import RunDirError, UsageError
from outlast.plan.simulate.narrator import NODES_MAX, NarratedRun, narrate
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob
from outlast.telemetry.event_store import read_events
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.incident_explanation import explain
from outlast.telemetry.run_summary import summarise

NODES = 8
SPENT = ("redo_s", "save_s", "detect_s", "restart_s", "wait_s", "slow_s")


def job(mtbf_s: float = 1e4, **how: object) -> SimulatedJob:
    """One of its nodes fails every `mtbf_s`, about twenty times in all."""
    plain = SimulatedJob(
        work_s=20 * mtbf_s, interval_s=1000.0, versions=1, step_s=0.0, memory_cost_s=0.0,
        cost_s=100.0, flush_s=0.0, nodes=NODES, spares=12, replicas=1, copies=0, window_s=0.0,
        node_rate=1 / mtbf_s / NODES, stay_share=0.0, lemons=0.0, lemon_factor=1.0, cure_share=0.0,
        software_rate=0.0, rack_rate=0.0, rack_nodes=8, shape=1.0, scale_s=0.0, age_s=0.0,
        repair_s=10.0, repair_shape=1.0, detect_s=60.0, restart_s=(20.0, 60.0, 300.0),
        software_from=STORAGE, node_from=STORAGE, drop=False, failures_max=1_000_000,
    )  # fmt: skip
    return plain._replace(**how)  # pyright: ignore[reportArgumentType]


LADDER = job(
    4e3, versions=5, memory_cost_s=1.0, step_s=10.0, spares=2, replicas=2, copies=4,
    window_s=100.0, stay_share=0.4, repair_s=6e3, repair_shape=2.0, node_from=LIVE,
    software_from=MEMORY, software_rate=5e-5, work_s=60_000.0,
)  # fmt: skip
RACKS = LADDER._replace(
    nodes=16, rack_nodes=4, rack_rate=1e-5, lemons=0.2, lemon_factor=10.0, cure_share=0.5,
    repair_shape=0.5, step_s=0.0, flush_s=150.0,
)  # fmt: skip
JOBS = {
    "storage": job(),
    "as long as its time between failures": job(1e3, cost_s=1000.0, work_s=5000.0),
    "a last interval that is shorter": job(versions=4, memory_cost_s=5.0, work_s=100_300.0),
    "slow flushes": job(flush_s=900.0),
    "software, live": job(software_rate=1e-4, software_from=LIVE),
    "copies": job(node_from=MEMORY, copies=4, versions=4, memory_cost_s=5.0, window_s=5000.0),
    "no spares": job(spares=0, repair_s=2e4, repair_shape=0.0),
    "the last replica, while the other recovers": job(
        500.0, nodes=4, replicas=2, node_from=LIVE, cost_s=20.0, work_s=10_000.0
    ),
    "the ladder": LADDER,
    "racks and lemons": RACKS,
    "ageing": LADDER._replace(shape=0.7, scale_s=3e4, age_s=1e4),
}
RUNGS = {"retry", "replace", "respawn", "rollback", "restart"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[NarratedRun, Path]:
    """A story with most of what there is, written."""
    run_dir = tmp_path_factory.mktemp("told")
    return narrate(LADDER, seed=3, run_dir=run_dir), run_dir


@pytest.mark.parametrize("name", JOBS)
def test_as_the_kernel_has_it(name: str) -> None:
    """The same failures, and the same seconds and counts, in every replication."""
    pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")
    from outlast.plan.simulate.replications import simulate

    one = JOBS[name]
    rows = simulate(one, 6, seed=5)
    failures = 0.0
    for replication, row in enumerate(rows):
        story = narrate(one, seed=5, replication=replication)
        assert story.outcome == "done"
        kernel = {key: float(row[key]) for key in row.dtype.names}
        assert story.tallies == pytest.approx(kernel, rel=1e-9, abs=1e-3)
        failures += story.tallies["failures"]
    assert failures > 20


def test_every_rung_is_taken_and_every_second_is_in_one_account() -> None:
    rungs: set[str] = set()
    for one in JOBS.values():
        story = narrate(one, seed=9)
        rungs |= set(story.rungs)
        spent = sum(story.tallies[name] for name in SPENT)
        assert story.tallies["wall_s"] == pytest.approx(one.work_s + spent, abs=1e-3)
        assert sum(story.rungs.values()) == story.tallies["incidents"]
    assert rungs == RUNGS


def test_a_written_story_adds_up_like_a_run(told: tuple[NarratedRun, Path]) -> None:
    story, run_dir = told
    result = summarise(run_dir)
    assert (result.outcome, result.exit_code, result.notes) == ("done", 0, ())
    assert len(result.incidents) == story.tallies["incidents"]
    assert result.wall_s == pytest.approx(story.tallies["wall_s"], abs=1e-6)
    seat_s = {name: rank_s / NODES for name, rank_s in result.buckets_s.items()}
    assert seat_s["step"] == pytest.approx(LADDER.work_s, abs=1e-3)
    assert seat_s["start"] == seat_s["script"] == seat_s["down"] == 0
    saving = seat_s["checkpoint"] + seat_s["stop"]  # the last flush is after the last phase
    assert saving <= story.tallies["save_s"] + 1e-3  # saves that were undone are lost
    assert result.goodput == pytest.approx(LADDER.work_s / story.tallies["wall_s"])
    assert result.step_s == LADDER.step_s
    done = [one for one in read_events(run_dir) if isinstance(one, events.PhaseDone)]
    steps = sum(one.steps for one in done if one.kind == "step") / NODES
    assert steps == result.steps + result.committed_steps_lost
    assert result.steps == LADDER.work_s / LADDER.step_s
    saved = [one for one in read_events(run_dir) if isinstance(one, events.CheckpointSaved)]
    assert len(saved) >= LADDER.work_s / LADDER.interval_s


def test_a_written_story_is_explained(told: tuple[NarratedRun, Path]) -> None:
    found = incidents(read_history(told[1]))
    assert {one.state for one in found} == {"recovered"}
    assert {one.rung for one in found} == set(told[0].rungs)
    noticed = {round(one.phases_ms["notice"] / 1e3, 3) for one in found}
    assert LADDER.detect_s in noticed
    page = io.StringIO()
    explain(found, Console(file=page, width=160))
    for one in found:  # one step or one save, unless the next failure came before that was over
        if one.rung in ("retry", "replace", "respawn"):
            assert one.phases_ms["redo"] <= 1e3 * max(LADDER.step_s, LADDER.cost_s)
    steps_ms = {round(one.phases_ms["redo"]) for one in found if one.kind == "step"}
    assert 1e3 * LADDER.step_s in steps_ms
    for words in (
        "node failed",
        "process crashed; node is healthy",
        "warm spares take over",
        "the own state of rank",
        "was replaced by",
    ):
        assert words in page.getvalue()


def test_the_same_seed_writes_the_same_bytes(
    told: tuple[NarratedRun, Path], tmp_path: Path
) -> None:
    again = narrate(LADDER, seed=3, run_dir=tmp_path)
    assert again == told[0]
    names = [path.name for path in (tmp_path / "events").iterdir()]
    for name in names:
        assert (tmp_path / "events" / name).read_bytes() == (told[1] / "events" / name).read_bytes()


def test_with_a_runs_own_limits_it_gives_up_where_a_run_would(tmp_path: Path) -> None:
    """For want of a node, after restarts without progress, and where a join takes too long."""
    waits = job(spares=0, repair_s=2e4)
    assert narrate(waits, seed=1).outcome == "done"
    story = narrate(waits, seed=1, limits=Limits(), run_dir=tmp_path)
    assert story.outcome == "gave_up" and "no agent had room" in story.reason
    assert story.tallies["wall_s"] == math.inf and story.tallies["done_s"] < waits.work_s
    assert summarise(tmp_path).outcome == "gave_up"
    hopeless = narrate(job(300.0, cost_s=1000.0), seed=1, limits=Limits())
    assert hopeless.outcome == "gave_up" and "3 restarts in a row" in hopeless.reason
    late = narrate(job(restart_s=(0.0, 0.0, 900.0)), seed=1, limits=Limits())
    assert late.outcome == "gave_up" and "was not ready within 600 s" in late.reason


def test_a_run_that_cannot_finish_states_the_reason() -> None:
    hopeless = narrate(job(10.0, work_s=1e5, failures_max=200))
    assert (hopeless.outcome, hopeless.tallies["wall_s"]) == ("interrupted", math.inf)
    assert "200 failures" in hopeless.reason
    never = narrate(job(spares=0, repair_s=1e30))
    assert (never.outcome, never.tallies["wall_s"]) == ("gave_up", math.inf)


def test_it_stops_where_that_was_enough(tmp_path: Path) -> None:
    """Between two failures, and in a recovery that never ends."""
    asked = iter([False] * 30)
    story = narrate(LADDER, seed=3, run_dir=tmp_path / "a", stopped=lambda: next(asked, True))
    assert story.outcome == "interrupted" and story.reason.startswith("interrupted: ")
    result = summarise(tmp_path / "a")
    assert (result.outcome, result.wall_s) == ("interrupted", pytest.approx(story.ended_s))
    assert 0 < result.steps < LADDER.work_s / LADDER.step_s
    asked = iter([False] * 30)
    hopeless = job(1.0, work_s=1e5)
    assert narrate(hopeless, stopped=lambda: next(asked, True)).tallies["incidents"] == 1


def test_impossible_jobs_are_refused_by_name(tmp_path: Path) -> None:
    for how, told in (
        ({"drop": True, "node_from": LIVE}, "drop"),
        ({"nodes": NODES_MAX + 8}, "nodes"),
        ({"cost_s": -1.0}, "cost_s"),
        ({"replicas": 3}, "replicas"),
    ):
        with pytest.raises(UsageError, match=told):
            narrate(job(**how))
    with pytest.raises(UsageError, match="run_dir"):
        narrate(job(work_s=1e9), run_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    narrate(job(work_s=2000.0), run_dir=tmp_path)
    with pytest.raises(RunDirError, match="another directory"):
        narrate(job(work_s=2000.0), run_dir=tmp_path)
