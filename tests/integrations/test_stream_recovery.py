"""Jobs over streams of other libraries lose ranks, and train each sample once."""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end import conftest
from tests.end_to_end.conftest import Runner
from tests.end_to_end.test_fewer_ranks import (
    ONE_RESPAWN,
    TWO_LOST,
    must_be_replicas,
    trained,
    wait_until_absent,
)
from tests.integrations.stream_kinds import WRITERS, batches_of

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED
from outlast.events import Decided, RunStarted

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]
JOB = Path(__file__).parents[1] / "end_to_end" / "jobs" / "dealt_job.py"
WORLD, EPOCHS = 3, 3
LIBRARIES = {"mosaic": "streaming", "hugging face": "datasets", "webdataset": "webdataset"}
KINDS = [
    ("mosaic", 0),
    ("stateful mosaic", 2),
    ("hugging face", 2),
    pytest.param("stateful hugging face", 0, marks=pytest.mark.extended),
    ("stateful webdataset", 2),
    pytest.param("webdataset", 0, marks=pytest.mark.extended),
]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.setattr(conftest, "DEADLINE_S", 280.0)  # libraries that take their time to import
    run = Runner(tmp_path, WORLD)
    yield run
    for process in run.processes:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@pytest.fixture
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind = request.getfixturevalue("kind").removeprefix("stateful ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(LIBRARIES[kind], reason=f"{LIBRARIES[kind]} is not installed")
    WRITERS[kind](tmp_path / "data")
    return tmp_path / "data"


def job(kind: str, workers: int, data: Path, *more: str) -> tuple[str, ...]:
    epochs = f"--epochs={EPOCHS}"
    return (f"--kind={kind}", f"--workers={workers}", f"--data={data}", epochs, *more)


def counted(out: Path) -> Counter[int]:
    return Counter(sample for _, _, samples in trained(out) for sample in samples)


def samples_of(kind: str, data: Path, workers: int) -> Counter[int]:
    steps = batches_of(kind, data, WORLD, workers, EPOCHS)
    return Counter(sample for step in steps for batch in step for sample in batch)


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_a_replacement_changes_nothing(runner: Runner, data: Path, kind: str, workers: int) -> None:
    """Each rank trains in each step what an undisturbed one reads, to the same bits."""
    arguments = job(kind, workers, data)
    undisturbed = runner.end(runner.start(job=arguments, name="calm", script=JOB), "calm")
    assert undisturbed.code == EXIT_DONE, undisturbed.output[-6000:]
    undisturbed.out.rename(runner.folder / "undisturbed")
    faults = ("--fault=kill:rank=1,step=4", "--fault=kill:rank=0,step=13")
    ended = runner.run("--spares=1", *faults, job=arguments, script=JOB)
    assert ended.code == EXIT_DONE, ended.output[-6000:]
    for rank in range(WORLD):
        report = (ended.out / f"{rank}.json").read_bytes()
        assert report == (runner.folder / "undisturbed" / f"{rank}.json").read_bytes()
    steps = batches_of(kind, data, WORLD, workers, EPOCHS)
    assert trained(ended.out) == [
        (number, rank, batch)
        for number, step in enumerate(steps)
        for rank, batch in enumerate(step)
    ]
    must_be_replicas(ended.out, WORLD)


@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_a_rank_leaves_and_comes_back(runner: Runner, data: Path, kind: str, workers: int) -> None:
    ended = runner.run(
        "--policy=elastic",
        ONE_RESPAWN,
        *TWO_LOST,
        job=job(kind, workers, data, "--pace=0.5"),
        script=JOB,
    )
    assert ended.code == EXIT_DONE, ended.output[-6000:]
    decisions = [each.rung for each in ended.events if isinstance(each, Decided)]
    assert decisions == ["shrink", "regrow"]
    assert counted(ended.out) == samples_of(kind, data, workers)
    must_be_replicas(ended.out, WORLD)


@pytest.mark.parametrize(
    ("kind", "workers"), [("stateful mosaic", 2), ("hugging face", 1), ("webdataset", 2)]
)
def test_a_drain_without_a_rank_loses_nothing(
    runner: Runner, data: Path, kind: str, workers: int
) -> None:
    gate = runner.folder / "gate"
    flags = ("--policy=torchft-like", "--fault=kill:rank=0,step=4")
    arguments = job(kind, workers, data, "--pace=0.1")
    process = runner.start(*flags, job=(*arguments, f"--gate={gate}"), script=JOB)
    wait_until_absent(runner, 0, steps=2)
    process.send_signal(signal.SIGTERM)
    drained = runner.end(process)
    assert drained.code == EXIT_INTERRUPTED, drained.output[-4000:]
    before = max(step for step, _, _ in trained(drained.out)) + 1
    gate.unlink()
    resumed = runner.end(runner.start("--policy=elastic", job=arguments, script=JOB))
    assert resumed.code == EXIT_DONE, resumed.output[-4000:]
    (*_, started) = [each for each in resumed.events if isinstance(each, RunStarted)]
    assert started.resumed_step == before, "a committed step was lost"
    assert counted(resumed.out) == samples_of(kind, data, workers)
    must_be_replicas(resumed.out, WORLD)
