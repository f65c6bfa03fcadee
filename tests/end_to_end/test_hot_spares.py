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
JOB = Path(__file__).with_name("jobs") / "hot_job.py"
WORLD = 2


def undisturbed(folder: Path, *job: str) -> Outcome:
    folder.mkdir()
    outcome = Runner(folder, WORLD).run(job=job, script=JOB)
    assert outcome.code == 0, outcome.output
    return outcome


def killed(folder: Path, rank: int, place: str, *job: str) -> Outcome:
    """Kill a rank once the spare waits at `place`."""
    folder.mkdir()
    runner, hold = Runner(folder, WORLD), folder / "hold"
    process = runner.start("--spares=1", job=("--hold", str(hold), *job), script=JOB)

    def notes() -> list[str]:
        story = read_events(folder / "run")
        return [event.text for event in story if isinstance(event, events.Note)]

    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(WORLD)), "step 5")
    wait_for(lambda: any(f"prepared up to {place}" in note for note in notes()), "a hot spare")
    story = read_events(folder / "run")
    workers = {e.worker: e.pid for e in story if isinstance(e, events.WorkerSpawned)}
    seats = {e.seat: e.worker for e in story if isinstance(e, events.WorkerSeated)}
    hold.touch()
    os.kill(workers[seats[rank]], signal.SIGKILL)
    outcome = runner.end(process)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["committed_steps_lost"] == 0
    assert {incident["rung"] for incident in outcome.summary["incidents"]} == {"replace"}
    return outcome


@pytest.mark.parametrize(
    ("rank", "job"),
    [(1, ()), pytest.param(0, ("--compiled",), marks=pytest.mark.extended)],
    ids=["plain", "compiled"],
)
def test_a_hot_spare_takes_the_rank(tmp_path: Path, rank: int, job: tuple[str, ...]) -> None:
    expected = undisturbed(tmp_path / "undisturbed", *job)
    outcome = killed(tmp_path / "killed", rank, "the training loop", *job)
    assert outcome.ranks == expected.ranks


@pytest.mark.extended
@pytest.mark.parametrize(
    ("lie", "place"), [("branch", "the rank"), ("variable", "the environment variable RANK")]
)
def test_a_broken_promise_is_slower_and_equal(tmp_path: Path, lie: str, place: str) -> None:
    expected = undisturbed(tmp_path / "undisturbed", "--lie", lie)
    outcome = killed(tmp_path / "killed", 1, place, "--lie", lie)
    assert outcome.ranks == expected.ranks
