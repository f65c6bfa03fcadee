"""Hot spares: ranks that die beside them, and scripts that depend on their rank after all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner, wait_for

from outlast import events
from outlast.telemetry.event_store import read_events

pytestmark = pytest.mark.process
JOBS = Path(__file__).with_name("jobs")
JOB, SHARDED_JOB = JOBS / "hot_job.py", JOBS / "hot_sharded_job.py"
WORLDS = {JOB: 2, SHARDED_JOB: 4}


def undisturbed(
    folder: Path, *job: str, script: Path = JOB, flags: tuple[str, ...] = ()
) -> Outcome:
    folder.mkdir()
    outcome = Runner(folder, WORLDS[script]).run(*flags, job=job, script=script)
    assert outcome.code == 0, outcome.output
    return outcome


def killed(
    folder: Path,
    ranks: tuple[int, ...],
    place: str,
    *job: str,
    script: Path = JOB,
    flags: tuple[str, ...] = ("--spares=1",),
    rung: str = "replace",
    lost: int = 0,
) -> Outcome:
    """Kill a rank, and later another, each once a spare has been prepared up to `place`."""
    folder.mkdir()
    world = WORLDS[script]
    runner = Runner(folder, world)
    holds = [folder / f"hold{number}" for number, _ in enumerate(ranks)]
    for name, hold in zip(("--hold", "--second-hold"), holds, strict=False):
        job = (name, str(hold), *job)
    process = runner.start(*flags, job=job, script=script)
    for number, (rank, hold) in enumerate(zip(ranks, holds, strict=True)):
        marks = [hold.with_suffix(f".{each}") for each in range(world)]
        wait_for(lambda marks=marks: all(mark.exists() for mark in marks), "the step to hold at")
        wait_for(lambda count=number: len(prepared(folder, place)) > count, "a hot spare")
        story = read_events(folder / "run")
        workers = {e.worker: e.pid for e in story if isinstance(e, events.WorkerSpawned)}
        seats = {e.seat: e.worker for e in story if isinstance(e, events.WorkerSeated)}
        hold.touch()
        os.kill(workers[seats[rank]], signal.SIGKILL)
    outcome = runner.end(process)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["committed_steps_lost"] == lost
    rungs = [incident["rung"] for incident in outcome.summary["incidents"]]
    assert rungs == [rung] * len(ranks), outcome.output
    return outcome


def prepared(folder: Path, place: str) -> list[str]:
    """Return the workers that were prepared up to `place`."""
    notes = (event for event in read_events(folder / "run") if isinstance(event, events.Note))
    return [note.worker for note in notes if f"prepared up to {place}" in note.text]


def successors(outcome: Outcome) -> list[str]:
    """Return the workers that have taken a rank after the start."""
    seated = [event for event in outcome.events if isinstance(event, events.WorkerSeated)]
    return [event.worker for event in seated if event.generation > 1]


@pytest.mark.parametrize(
    ("rank", "job"),
    [(1, ()), pytest.param(0, ("--compiled",), marks=pytest.mark.extended)],
    ids=["plain", "compiled"],
)
def test_a_hot_spare_takes_the_rank(tmp_path: Path, rank: int, job: tuple[str, ...]) -> None:
    expected = undisturbed(tmp_path / "undisturbed", *job)
    outcome = killed(tmp_path / "killed", (rank,), "the training loop", *job)
    assert outcome.ranks == expected.ranks


@pytest.mark.extended
@pytest.mark.parametrize(
    ("lie", "place"), [("branch", "the rank"), ("variable", "the environment variable RANK")]
)
def test_a_broken_promise_is_slower_and_equal(tmp_path: Path, lie: str, place: str) -> None:
    expected = undisturbed(tmp_path / "undisturbed", "--lie", lie)
    outcome = killed(tmp_path / "killed", (1,), place, "--lie", lie)
    assert outcome.ranks == expected.ranks


LOOP = "the training loop"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return undisturbed(tmp_path_factory.mktemp("sharded") / "run", script=SHARDED_JOB)


@pytest.mark.parametrize(
    "rank", [pytest.param(rank, marks=pytest.mark.extended) for rank in (0, 1)] + [2]
)
def test_a_hot_spare_with_a_mesh_takes_replicas_of_its_stand_in(
    tmp_path: Path, sharded: Outcome, rank: int
) -> None:
    place, is_replica = f"{LOOP} as rank 0, for ranks 0, 2", rank in (0, 2)
    rung = "replace" if is_replica else "respawn"
    outcome = killed(tmp_path / "killed", (rank,), place, script=SHARDED_JOB, rung=rung)
    assert outcome.ranks == sharded.ranks
    hot = prepared(tmp_path / "killed", place)
    assert (successors(outcome)[0] == hot[0]) == is_replica


@pytest.mark.extended
@pytest.mark.parametrize("job", [("--compiled",), ("--width=23",)], ids=["compiled", "uneven"])
@pytest.mark.parametrize("ranks", [(0, 2), (3, 1)], ids=["0 and 2", "3 and 1"])
def test_two_ranks_of_a_mesh_are_lost_in_turn_beside_two_spares(
    tmp_path: Path, job: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    expected = undisturbed(tmp_path / "undisturbed", *job, script=SHARDED_JOB)
    fitting = "0, 2" if 0 in ranks else "1, 3"
    place, flags = f"{LOOP} as rank {min(ranks) % 2}, for ranks {fitting}", ("--spares=2",)
    outcome = killed(tmp_path / "killed", ranks, place, *job, script=SHARDED_JOB, flags=flags)
    assert outcome.ranks == expected.ranks
    assert successors(outcome) == prepared(tmp_path / "killed", place)[:2]


@pytest.mark.extended
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("keep", "place"),
    [
        ("local rank", "the rank, read in"),
        ("row", "the rank, read in"),
        ("own group", "the rank, read in"),
        ("coordinate", f"{LOOP} as rank 0 alone"),
    ],
)
def test_a_script_that_keeps_its_place_in_a_mesh_is_slower_and_equal(
    tmp_path: Path, keep: str, place: str, rank: int
) -> None:
    expected = undisturbed(tmp_path / "undisturbed", "--keep", keep, script=SHARDED_JOB)
    rung = "respawn" if keep == "coordinate" else "replace"  # others wait above fully_shard
    keeps = ("--keep", keep)
    outcome = killed(tmp_path / "killed", (rank,), place, *keeps, script=SHARDED_JOB, rung=rung)
    assert outcome.ranks == expected.ranks


@pytest.mark.extended
def test_a_shard_without_a_replica_is_rebuilt_in_a_spare_that_waits_at_its_mesh(
    tmp_path: Path,
) -> None:
    job, flags = ("--one-dimensional",), ("--snapshot-every=1", "--copies=2", "--spares=1")
    expected = undisturbed(tmp_path / "undisturbed", *job, script=SHARDED_JOB)
    place, folder = "the rank, read in", tmp_path / "killed"
    outcome = killed(  # behind a step, before its copy: that step is counted as lost
        folder, (2,), place, *job, script=SHARDED_JOB, flags=flags, rung="rebuild", lost=1
    )
    assert outcome.ranks == expected.ranks
    assert successors(outcome) == prepared(folder, place)[:1]
