"""Jobs that go on with fewer ranks, and take them back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from outlast.errors import EXIT_DONE
from outlast.events import Decided, Note
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
    assert "0 committed steps lost" in text and "no worker, the others went" in text
    assert runner.left_behind() == []


def test_what_needs_all_ranks_does_not_shrink(runner: Runner) -> None:
    for kind, why in (
        ("gathers", "its phases call allgather"),
        ("random", "RandomSampler"),
        ("table", "each element comes from one rank (shrinking_job.py:"),
    ):
        process = runner.start(
            "--policy=elastic",
            ONE_RESPAWN,
            *TWO_LOST,
            job=(f"--kind={kind}",),
            script=JOB,
            name=kind,
        )
        assert process.wait(150) != EXIT_DONE
        text = (runner.folder / f"{kind}.txt").read_text()
        assert why in " ".join(text.split()), text[-4000:]
        decisions = [
            each for each in read_events(runner.folder / kind) if isinstance(each, Decided)
        ]
        assert all(not each.absent for each in decisions)


def test_no_checkpoint_is_made_without_all_ranks(runner: Runner) -> None:
    flags = ("--policy=elastic", ONE_RESPAWN, "--checkpoint-every=1")
    run(runner, *flags, *TWO_LOST, job=("--pace=0.2",))
    notes = [e.text for e in read_events(runner.folder / "run") if isinstance(e, Note)]
    assert any("rank 2 is absent, and a checkpoint has the state of all" in each for each in notes)
    must_be_replicas(runner.folder / "out")
    assert Counter(ids for _, _, ids in trained(runner.folder / "out")) == expected(3)
