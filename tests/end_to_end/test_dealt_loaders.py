"""Jobs with loaders of several kinds go on with fewer ranks, and train each sample once."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.data.dealt_kinds import DEALT
from tests.data.test_dealt_loaders import plain
from tests.end_to_end.test_fewer_ranks import (
    ONE_RESPAWN,
    TWO_LOST,
    must_be_replicas,
    trained,
    wait_until_absent,
)

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED
from outlast.events import Decided, RunStarted
from outlast.telemetry.committed_history import check_run

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Runner

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
JOB = Path(__file__).parent / "jobs" / "dealt_job.py"
WORLD, SAMPLES = 4, 90


def expected(kind: str, workers: int) -> Counter[int]:
    def make(rank: int) -> Any:
        return DEALT[kind](SAMPLES, WORLD, rank, 3, num_workers=workers)

    return sum((plain(make, WORLD, epoch) for epoch in range(3)), Counter())


def counted(out: Path) -> Counter[int]:
    """Return how often each sample was trained."""
    return Counter(sample for _, _, samples in trained(out) for sample in samples)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("StatefulDistributedSampler", 2, marks=pytest.mark.extended),
        pytest.param("subclass", 0, marks=pytest.mark.extended),
        pytest.param("buckets", 0, marks=pytest.mark.extended),
        pytest.param("splits", 2, marks=pytest.mark.extended),
        pytest.param("splits with a position", 1, marks=pytest.mark.extended),
    ],
)
def test_a_rank_leaves_and_comes_back(runner: Runner, kind: str, workers: int) -> None:
    job = ("--pace=0.2", f"--kind={kind}", f"--workers={workers}")
    later = "--fault=kill:rank=3,step=24"  # a new worker finds its place in its own data
    flags = ("--policy=elastic", ONE_RESPAWN, *TWO_LOST, later)
    ended = runner.end(runner.start(*flags, job=job, script=JOB))
    assert ended.code == EXIT_DONE, ended.output[-6000:]
    assert check_run(runner.folder / "run") == []
    decisions = [each for each in ended.events if isinstance(each, Decided)]
    assert [each.rung for each in decisions] == ["shrink", "regrow", "respawn"]
    assert counted(ended.out) == expected(kind, workers), "a sample was lost, or repeated"
    must_be_replicas(ended.out)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "workers"), [("buckets", 1), ("splits with a position", 2)])
def test_a_drain_without_a_rank_loses_nothing(runner: Runner, kind: str, workers: int) -> None:
    gate = runner.folder / "gate"
    job = (f"--kind={kind}", f"--workers={workers}", "--pace=0.1")
    flags = ("--policy=torchft-like", "--fault=kill:rank=0,step=4")
    process = runner.start(*flags, job=(*job, f"--gate={gate}"), script=JOB)
    wait_until_absent(runner, 0, steps=2)
    process.send_signal(signal.SIGTERM)
    drained = runner.end(process)
    assert drained.code == EXIT_INTERRUPTED, drained.output[-4000:]
    before = max(step for step, _, _ in trained(drained.out)) + 1
    gate.unlink()
    resumed = runner.end(runner.start("--policy=elastic", job=job, script=JOB))
    assert resumed.code == EXIT_DONE, resumed.output[-4000:]
    (*_, started) = [each for each in resumed.events if isinstance(each, RunStarted)]
    assert started.resumed_step == before, "a committed step was lost"
    assert counted(resumed.out) == expected(kind, workers)
    must_be_replicas(resumed.out)
