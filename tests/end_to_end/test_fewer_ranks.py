"""Jobs that go on with fewer ranks, and take them back."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.end_to_end.conftest import wait_for
from torch.utils.data import BatchSampler, DistributedSampler

from outlast.checkpoint.stores.catalog import checkpoint_places
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, RunDirError
from outlast.events import AnyEvent, CheckpointSaved, Decided, PhaseDone, RunStarted
from outlast.telemetry.committed_history import check_run
from outlast.telemetry.event_store import read_events

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Runner

pytestmark = pytest.mark.process
JOB = Path(__file__).parent / "jobs" / "shrinking_job.py"
WORLD, SAMPLES, BATCH = 4, 90, 3
TWO_LOST = ("--fault=kill:rank=1,step=5", "--fault=kill:rank=2,step=5")
ONE_RESPAWN = "--limit=respawns_max=1"  # without progress: one of the two cannot be taken at once


def run(runner: Runner, *flags: str, job: tuple[str, ...] = (), code: int = EXIT_DONE) -> Any:
    process = runner.start(*flags, job=job, script=JOB)
    outcome = process.wait(150)
    text = (runner.folder / "run.txt").read_text()
    assert outcome == code, text[-6000:]
    return text


def trained(out: Path) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return step, rank and samples of each batch that counted, each once."""
    texts = [path.read_text() for path in out.glob("*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return sorted({(step, rank, tuple(ids)) for step, rank, ids, _, idle in lines if not idle})


def expected(epochs: int, world: int = WORLD) -> Counter[tuple[int, ...]]:
    """Return the batches of all ranks in these epochs."""
    batches: Counter[tuple[int, ...]] = Counter()
    for epoch in range(epochs):
        for rank in range(world):
            sampler = DistributedSampler(range(SAMPLES), world, rank, seed=1)
            sampler.set_epoch(epoch)
            batches.update(map(tuple, BatchSampler(sampler, BATCH, True)))
    return batches


def must_be_replicas(out: Path, world: int = WORLD) -> None:
    """Compare weights and last results of all ranks, none of which is absent."""
    reports = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
    for each in reports:
        assert each["present"] == list(range(world))
        assert (
            each["weights"] == reports[0]["weights"]
            and each["losses"][-5:] == reports[0]["losses"][-5:]
        )


def test_a_rank_leaves_and_comes_back(runner: Runner) -> None:
    text = run(runner, "--policy=elastic", ONE_RESPAWN, *TWO_LOST, job=("--pace=0.2",))
    out, run_dir = runner.folder / "out", runner.folder / "run"
    assert check_run(run_dir) == []
    decisions = [each for each in read_events(run_dir) if isinstance(each, Decided)]
    assert [each.rung for each in decisions] == ["shrink", "regrow"]
    assert [each.absent for each in decisions] == [(2,), ()]
    steps = trained(out)
    counts = Counter(step for step, _, _ in steps)
    assert min(counts[step] for step in range(4)) == WORLD, "all ranks, before the loss"
    assert counts[4] == WORLD - 1
    assert Counter(ids for _, _, ids in steps) == expected(3), "a sample was lost, or repeated"
    must_be_replicas(out)
    assert "0 committed steps lost" in text and "no worker, the others" in text
    assert runner.left_behind() == []


@pytest.mark.extended
def test_a_rank_without_a_batch_has_none_in_any_phase(runner: Runner) -> None:
    """Other optimizers and metrics of the same batch count each sample once as well."""
    flags = ("--policy=elastic", ONE_RESPAWN, *TWO_LOST)
    run(runner, *flags, job=("--pace=0.2", "--kind=phases"))
    out = runner.folder / "out"
    steps = trained(out)
    assert Counter(ids for _, _, ids in steps) == expected(3), "a sample was lost, or repeated"
    means: dict[int, list[int]] = {}
    for step, _, ids in steps:
        means.setdefault(step, []).extend(ids)
    idle = [step for step in means if step > 4 and len(means[step]) < BATCH * WORLD]
    for rank in (0, 3):
        report = json.loads((out / f"{rank}.json").read_text())
        assert report["twins"][0] == pytest.approx(report["twins"][1], abs=1e-6)
        found = [sum(ids) / len(ids) for _, ids in sorted(means.items())]
        assert report["means"] == pytest.approx(found), idle
    assert idle, "no rank was idle, so that nothing was tested"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        pytest.param("gathers", "its phases call allgather", marks=pytest.mark.extended),
        ("random", "RandomSampler"),
        pytest.param(
            "table",
            "each element comes from one rank (shrinking_job.py:",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_what_needs_all_ranks_does_not_shrink(runner: Runner, kind: str, why: str) -> None:
    flags = ("--policy=elastic", ONE_RESPAWN, *TWO_LOST)
    ended = runner.end(runner.start(*flags, job=(f"--kind={kind}",), script=JOB))
    assert ended.code != EXIT_DONE
    assert why in " ".join(ended.output.split()), ended.output[-4000:]
    assert not any(each.absent for each in ended.events if isinstance(each, Decided))


def wait_until_absent(runner: Runner, *ranks: int, steps: int = 3) -> None:
    """Wait until these ranks are absent, and the others have made some steps since."""

    def is_so() -> bool:
        places: list[int] = []
        with suppress(RunDirError):  # nothing is written yet
            events[:] = read_events(runner.folder / "run")
        for event in events:
            if isinstance(event, Decided):
                places[:] = [event.n] if event.absent == ranks else []
            elif isinstance(event, PhaseDone) and places and event.n >= places[0] + steps:
                return True
        return False

    events: list[AnyEvent] = []
    wait_for(is_so, f"steps without ranks {ranks}")


def trained_for_good(out: Path, resumed: int) -> Counter[tuple[int, ...]]:
    """Return the batches that count after a restart from a step: others were trained again."""
    batches: set[tuple[int, int, tuple[int, ...]]] = set()
    for path in out.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lasts = not lines or lines[0][0] >= resumed
        batches |= {
            (step, rank, tuple(ids))
            for step, rank, ids, _, idle in lines
            if not idle and (lasts or step < resumed)
        }
    return Counter(ids for _, _, ids in batches)


@pytest.mark.extended
@pytest.mark.parametrize("lost", [2, 0])
def test_a_drain_without_a_rank_loses_nothing(runner: Runner, lost: int) -> None:
    """And a later start of all ranks trains each sample of the epoch once."""
    gate = runner.folder / "gate"
    job = ("--pace=0.1", f"--gate={gate}")
    flags = ("--policy=torchft-like", f"--fault=kill:rank={lost},step=5")
    process = runner.start(*flags, job=job, script=JOB)
    wait_until_absent(runner, lost)
    process.send_signal(signal.SIGTERM)
    drained = runner.end(process)
    assert drained.code == EXIT_INTERRUPTED, drained.output[-4000:]
    before = max(step for step, _, _ in trained(drained.out)) + 1
    gate.unlink()
    resumed = runner.end(runner.start("--policy=elastic", job=job[:1], script=JOB))
    assert resumed.code == EXIT_DONE, resumed.output[-4000:]
    (*_, started) = [each for each in resumed.events if isinstance(each, RunStarted)]
    assert started.resumed_step == before, "a committed step was lost"
    assert Counter(ids for _, _, ids in trained(resumed.out)) == expected(3)
    counts = Counter(step for step, _, _ in trained(resumed.out))
    assert counts[before] == WORLD - 1, "a rank that comes back is idle in its first step"
    assert counts[before + 1] == WORLD
    must_be_replicas(resumed.out)


def _is_rollback(event: AnyEvent) -> bool:
    return isinstance(event, Decided) and event.rung == "rollback"


@pytest.mark.extended
def test_a_restart_from_a_copy_without_a_rank(runner: Runner) -> None:
    """All ranks are lost; the copy in memory has the part of the absent one, and of rank 0."""
    gate = runner.folder / "gate"
    job = ("--pace=0.05", f"--gate={gate}")
    kills = [f"--fault=kill:rank={rank},step=11" for rank in (1, 2, 3)]
    policy = runner.folder / "policy.toml"
    policy.write_text('[default]\nrungs = ["retry", "shrink", "rollback", "stop"]\n')
    flags = (f"--policy={policy}", "--checkpoint-every=4", "--snapshot-every=3", *kills)
    process = runner.start(*flags, "--fault=kill:rank=0,step=5", job=job, script=JOB)
    wait_until_absent(runner, 0)
    run_dir = runner.folder / "run"
    wait_for(lambda: any(map(_is_rollback, read_events(run_dir))), "a rollback")
    gate.unlink()
    assert runner.end(process).code == EXIT_DONE
    events = read_events(runner.folder / "run")
    decisions = [each for each in events if isinstance(each, Decided)]
    assert [each.rung for each in decisions] == ["shrink", "rollback"]
    assert decisions[1].step == 9, decisions[1].reason
    assert {each.step for each in events if isinstance(each, CheckpointSaved)} >= {8, 12}
    assert trained_for_good(runner.folder / "out", resumed=9) == expected(3)
    must_be_replicas(runner.folder / "out")


@pytest.mark.extended
def test_a_restart_is_a_return_at_that_place(runner: Runner) -> None:
    """Start again from the checkpoint of the step behind which a rank has come back: the bits are
    those of the run in which it has. Without random numbers, since it has come back behind a draw
    or before it."""
    job = ("--pace=1.2", "--steps=10", "--kind=plain")
    every = ("--checkpoint-every=1", "--keep=last=100")
    run(runner, "--policy=elastic", *every, ONE_RESPAWN, *TWO_LOST, job=job)
    out, run_dir = runner.folder / "out", runner.folder / "run"
    decisions = [each for each in read_events(run_dir) if isinstance(each, Decided)]
    assert [each.rung for each in decisions] == ["shrink", "regrow"]
    live = [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]
    shutil.rmtree(out)
    places = {place.step: place for place in checkpoint_places(Folder(run_dir / "checkpoints"))}
    assert decisions[1].step in places
    for step, place in places.items():
        if step > decisions[1].step:
            shutil.rmtree(run_dir / "checkpoints" / place.directory)
    run(runner, "--policy=elastic", *every, job=job)
    resumed = [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]
    assert [each["weights"] for each in resumed] == [each["weights"] for each in live]
    assert [each["losses"][-8:] for each in resumed] == [each["losses"][-8:] for each in live]
