"""Recovery from real signals: same bits, no leftovers, and correct reports."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner, faults_told, same, wait_for

from outlast import events
from outlast.telemetry.event_store import read_events

pytestmark = pytest.mark.process

WATCH = ("--limit", "hang_floor_s=2", "--limit", "hang_ceiling_s=20")
# Several faults a run, at steps apart: each is an incident of its own, and the bits at the end
# forgive none of them. (flags, what must be told, rungs that must have been taken)
STORIES: dict[str, tuple[tuple[str, ...], set[tuple[str, int]]]] = {
    "killed in forward, backward, the vote, and between phases": (
        (
            "--spares=2",
            "--fault=kill:rank=2,step=3,phase=forward",
            "--fault=kill:rank=0,step=6,phase=backward",
            "--fault=kill:rank=3,step=9,phase=vote",
            "--fault=kill:rank=0,step=12,phase=between",
        ),
        {("killed", 2), ("killed", 0), ("killed", 3)},
    ),
    "killed at the first step, while applying, when done, in an evaluation": (
        (
            "--spares=2",
            "--snapshot-every=2",
            "--checkpoint-every=6",
            "--fault=kill:rank=1,step=1,phase=backward",
            "--fault=kill:rank=0,step=4,phase=apply",
            "--fault=kill:rank=2,step=7,phase=done",
            "--fault=kill:rank=1,step=10,phase=eval",
        ),
        {("killed", 1), ("killed", 0), ("killed", 2)},
    ),
    "stopped and woken after its fencing, and hung": (
        (
            "--spares=2",
            *WATCH,
            "--fault=stop:rank=2,step=5,phase=forward,for=6",
            "--fault=hang:rank=1,step=9,phase=forward",
        ),
        {("stopped", 2), ("hung", 1)},
    ),
    "two at once, then the donor in the middle of a transfer": (
        (
            "--spares=2",
            "--fault=kill:rank=1,step=4,phase=backward",
            "--fault=kill:rank=3,step=4,phase=backward",
            "--fault=kill:rank=2,step=9,phase=backward",
            "--fault=kill:step=9,phase=transfer",
        ),
        {("killed", 1), ("killed", 3), ("killed", 2)},
    ),
    "a second rank while the first heals, then the joiner while it receives": (
        (
            "--spares=2",
            "--fault=kill:rank=2,step=4,phase=backward",
            "--fault=kill:rank=1,step=4,phase=heal",
            "--fault=kill:rank=2,step=9,phase=backward",
            "--fault=kill:rank=2,step=9,phase=receive",
        ),
        {("killed", 2), ("killed", 1)},
    ),
    "killed where an epoch ends and an evaluation is due": (
        (
            "--spares=2",
            "--fault=kill:rank=2,step=5,phase=between",
            "--fault=kill:rank=3,step=10,phase=between",
            "--fault=kill:rank=0,step=11,phase=vote",
        ),
        {("killed", 2), ("killed", 0), ("killed", 3)},
    ),
    "the spare itself, and more failures than spares": (
        (
            "--spares=1",
            "--checkpoint-every=2",
            "--fault=kill:spare=0",
            "--fault=kill:rank=2,step=4,phase=backward",
            "--fault=kill:rank=1,step=5,phase=forward",
            "--fault=kill:rank=3,step=8,phase=checkpoint",
        ),
        {("killed", 2), ("killed", 1), ("killed", 3)},
    ),
}


LONG = ("killed where an epoch ends and an evaluation is due",)
QUICK = ("killed in forward, backward, the vote, and between phases",)


def _marks(story: str) -> list[pytest.MarkDecorator]:
    if story in LONG:
        return [pytest.mark.long]
    return [] if story in QUICK else [pytest.mark.extended]


@pytest.mark.parametrize(
    ("flags", "told"),
    [pytest.param(*story, id=name, marks=_marks(name)) for name, story in STORIES.items()],
)
def test_a_run_outlasts(
    runner: Runner, undisturbed: Outcome, flags: tuple[str, ...], told: set[tuple[str, int]]
) -> None:
    outcome = runner.run(*flags)
    same(outcome, undisturbed)
    assert told <= faults_told(outcome)
    summary = outcome.summary
    assert summary["committed_steps_lost"] == 0
    assert {i["rung"] for i in summary["incidents"]} <= {"replace", "respawn", "restart"}
    story = outcome.explain()
    for _, seat in told:
        assert f"rank {seat}" in story


def test_no_worker_is_lost_to_an_exception_or_a_broken_connection(
    runner: Runner, undisturbed: Outcome
) -> None:
    outcome = runner.run(
        "--fault=raise:rank=1,step=3,phase=forward",
        "--fault=raise:rank=2,step=6,phase=backward",
        "--fault=reset:rank=1,step=8,phase=forward",
        "--fault=reset:rank=3,step=11,phase=backward",
    )
    same(outcome, undisturbed)
    assert {("raised", 1), ("raised", 2)} <= faults_told(outcome)
    rungs = [i["rung"] for i in outcome.summary["incidents"]]
    # gloo now and then never wakes a sender that was cut; that worker says so and is replaced.
    assert set(rungs) <= {"retry", "respawn"} and rungs.count("retry") >= 2
    assert outcome.summary["respawns"] == rungs.count("respawn") <= 2


def all_die(runner: Runner, tmp_path: Path, *flags: str, keepers: bool) -> Outcome:
    """Every rank dies behind step 7; with `keepers`, who holds their copies does, too."""
    hold = tmp_path / "hold"
    process = runner.start("--checkpoint-every=3", *flags, job=("--hold", str(hold)))
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 8")
    wait_for(lambda: ended(tmp_path, 6), "the checkpoint of step 6")
    told = read_events(tmp_path / "run")
    pids = [event.pid for event in told if isinstance(event, events.WorkerSpawned)]
    assert len(pids) == 4
    # While it is stopped the launcher cannot find one survivor between two of the kills.
    process.send_signal(signal.SIGSTOP)
    for pid in pids + (keepers_of(process.pid) if keepers else []):
        os.kill(pid, signal.SIGKILL)
    hold.touch()
    process.send_signal(signal.SIGCONT)
    return runner.end(process)


def ended(tmp_path: Path, step: int) -> bool:
    kinds = events.CheckpointSaved | events.CheckpointFailed
    return any(isinstance(e, kinds) and e.step == step for e in read_events(tmp_path / "run"))


def keepers_of(launcher: int) -> list[int]:
    """Return the keepers among the launcher's children. Threads and other children may end."""
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    children = [pid for task in tasks for pid in read_of(task / "children").split()]
    found = [int(pid) for pid in children if "keeper" in read_of(Path(f"/proc/{pid}/cmdline"))]
    assert len(found) == 4
    return found


def read_of(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.extended
def test_a_full_disk_costs_nothing_where_copies_are_in_memory(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    full = "--fault=full:rank=1,step=6,phase=checkpoint"
    outcome = all_die(runner, tmp_path, full, keepers=False)
    same(outcome, undisturbed)
    assert [i["rung"] for i in outcome.summary["incidents"]] == ["rollback"]
    assert outcome.summary["committed_steps_lost"] == 1
    failed = [e for e in outcome.events if isinstance(e, events.CheckpointFailed)]
    assert [e.step for e in failed] == [6]
    assert "rank 1" in failed[0].error and "No space left" in failed[0].error
    assert "copy in memory at phase" in outcome.explain()


@pytest.mark.extended
def test_when_memory_is_gone_the_disk_costs_the_steps_since_the_last_checkpoint(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    full = "--fault=full:rank=1,step=6,phase=checkpoint"
    outcome = all_die(runner, tmp_path, full, keepers=True)
    same(outcome, undisturbed)
    assert [i["rung"] for i in outcome.summary["incidents"]] == ["restart"]
    assert "copy in memory at phase" in outcome.explain()
    assert outcome.summary["committed_steps_lost"] == 4
    assert "the keeper of rank 2 was killed by signal 9" in outcome.output


@pytest.mark.long
def test_a_save_on_request_is_no_phase_of_the_script(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    process = runner.start(
        "--fault=kill:rank=1,step=8,phase=done",  # behind the vote of the save, before a step
        "--fault=kill:rank=2,step=8,phase=forward",
        job=("--hold", str(hold)),
    )
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 8")
    process.send_signal(signal.SIGUSR1)
    wait_for(
        lambda: any(
            isinstance(e, events.GenerationClosed) for e in read_events(runner.folder / "run")
        ),
        "it was heard",
    )
    hold.touch()
    outcome = runner.end(process)
    same(outcome, undisturbed)
    saved = [e.step for e in outcome.events if isinstance(e, events.CheckpointSaved)]
    assert saved == [7]
    assert faults_told(outcome) == {("save", -1), ("killed", 1), ("killed", 2)}


@pytest.mark.extended
def test_a_stopped_launcher_leaves_a_run_that_goes_on(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    process = runner.start("--spares=1", job=("--hold", str(hold)))
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 8")
    process.send_signal(signal.SIGTERM)
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
