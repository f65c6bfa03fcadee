"""Jobs whose ranks leave in units: one is lost, its replica leaves, and comes back together."""

from __future__ import annotations

import json
import runpy
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.end_to_end.conftest import Runner as Launcher
from tests.end_to_end.test_fewer_ranks import wait_until_absent
from torch.utils.data import BatchSampler, DistributedSampler

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED
from outlast.events import Decided, RunStarted
from outlast.telemetry.committed_history import check_run
from outlast.telemetry.event_store import read_events

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Runner

pytestmark = pytest.mark.process
EXTENDED = pytest.mark.extended
JOB = Path(__file__).parent / "jobs" / "units_job.py"
EPOCHS, BATCH = 3, 2
Step = dict[int, tuple[tuple[int, ...], float]]


def run(runner: Runner, *flags: str, job: tuple[str, ...] = (), name: str = "run") -> str:
    process = runner.start(*flags, job=job, script=JOB, name=name)
    outcome = process.wait(150)
    text = (runner.folder / f"{name}.txt").read_text()
    assert outcome == EXIT_DONE, text[-6000:]
    assert check_run(runner.folder / name) == []
    return text


def trained(out: Path) -> dict[int, Step]:
    """Return by step and rank the samples that counted, and the loss that the rank returned."""
    steps: dict[int, Step] = {}
    for path in sorted(out.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            step, rank, ids, _, idle, loss = json.loads(text)
            if not idle:
                known = steps.setdefault(step, {}).setdefault(rank, (tuple(ids), loss))
                assert known == (tuple(ids), loss), f"step {step} of rank {rank} is there twice"
    return dict(sorted(steps.items()))


def must_equal_a_plain_run(out: Path, steps: dict[int, Step], world: int, clip: float) -> None:
    """Train a plain model with the samples of each step: equal to rounding, weights as well."""
    job = runpy.run_path(str(JOB))
    model, data = job["make_model"](), job["Samples"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, ranks in steps.items():
        optimizer.zero_grad()
        losses = []
        for ids, _ in ranks.values():
            x = torch.stack([data[index][1] for index in ids])
            losses.append(job["loss_of"](model, [torch.tensor(ids), x]))
        mean = torch.stack(losses).mean()
        mean.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        for _, loss in ranks.values():
            assert loss == pytest.approx(mean.item(), rel=1e-4), f"step {step}"
    expected = [float(each.detach().double().abs().sum()) for each in model.parameters()]
    for rank in range(world):
        report = json.loads((out / f"{rank}.json").read_text())
        assert report["weights"] == pytest.approx(expected, rel=1e-4)
        assert report["present"] == [*range(world)]


def must_be_each_sample_once(
    steps: dict[int, Step], replicas: int, shared: int = 1, epochs: int = EPOCHS
) -> None:
    """Check the batches of all epochs. `shared`: ranks that train the same ones."""
    expected: Counter[tuple[int, ...]] = Counter()
    for epoch in range(epochs):
        for rank in range(replicas):
            sampler = DistributedSampler(range(96), replicas, rank, seed=1)
            sampler.set_epoch(epoch)
            for batch in BatchSampler(sampler, BATCH, True):
                expected[tuple(batch)] += shared
    found = Counter(ids for ranks in steps.values() for ids, _ in ranks.values())
    assert found == expected, "a sample was lost, or repeated"


def decisions(run_dir: Path) -> list[Decided]:
    return [each for each in read_events(run_dir) if isinstance(each, Decided)]


@pytest.mark.parametrize(
    ("kind", "clip", "policy", "faults"),
    [
        pytest.param("hsdp", 0.0, "torchft-like", "3", marks=EXTENDED),
        pytest.param("hsdp", 0.3, "elastic", "23", marks=EXTENDED),
        pytest.param("tensor", 0.0, "torchft-like", "2", marks=EXTENDED),
    ],
)
def test_a_replica_leaves_and_comes_back(
    kind: str, clip: float, policy: str, faults: str, runner: Runner
) -> None:
    kills = [f"--fault=kill:rank={rank},step=5" for rank in faults]
    few = ["--limit=respawns_max=1"] if policy == "elastic" else []
    job = ("--pace=0.25", f"--kind={kind}", f"--clip={clip}")
    text = run(runner, f"--policy={policy}", *few, *kills, job=job)
    out = runner.folder / "out"
    taken = decisions(runner.folder / "run")
    assert [each.rung for each in taken] == ["shrink", "regrow"]
    assert [each.absent for each in taken] == [(2, 3), ()]
    if len(faults) == 1:
        healthy = 5 - int(faults)
        assert "ranks 2, 3 leave together" in taken[0].reason
        assert f"(healthy: rank {healthy})" in taken[0].reason
    steps = trained(out)
    assert {*steps[3]} == {0, 1, 2, 3} and {*steps[4]} == {*steps[5]} == {0, 1}
    if kind == "tensor":
        must_be_each_sample_once(steps, 2, shared=2)
    else:
        must_be_each_sample_once(steps, 4)
    must_equal_a_plain_run(out, steps, 4, clip)
    assert "0 committed steps lost" in text
    assert runner.left_behind() == []


def drained(runner: Runner, kind: str, lost: int) -> str:
    """Drain a run while the replica of a rank is absent; return its output."""
    job = ("--pace=0.1", f"--kind={kind}", f"--gate={runner.folder / 'gate'}")
    flags = ("--policy=torchft-like", f"--fault=kill:rank={lost},step=5")
    process = runner.start(*flags, job=job, script=JOB)
    wait_until_absent(runner, *((0, 1) if lost < 2 else (2, 3)))
    process.send_signal(signal.SIGTERM)
    outcome = runner.end(process)
    assert outcome.code == EXIT_INTERRUPTED
    return " ".join(outcome.output.replace("\u2502", " ").split())


@pytest.mark.extended
def test_a_drain_without_a_replica_loses_nothing(runner: Runner) -> None:
    drained(runner, "hsdp", 1)
    before = max(trained(runner.folder / "out")) + 1
    (runner.folder / "gate").unlink()
    run(runner, "--policy=elastic", job=("--pace=0.1",))
    (*_, started) = [e for e in read_events(runner.folder / "run") if isinstance(e, RunStarted)]
    assert started.resumed_step == before, "a committed step was lost"
    steps = trained(runner.folder / "out")
    must_be_each_sample_once(steps, 4)
    must_equal_a_plain_run(runner.folder / "out", steps, 4, 0.0)


def test_a_part_that_nobody_can_write_is_refused(runner: Runner) -> None:
    text = drained(runner, "tensor", 3)
    assert "rank 2 is absent, and no other rank can write its part of a checkpoint" in text


@pytest.mark.extended
def test_the_replicas_with_most_losses_leave(tmp_path: Path) -> None:
    runner = Launcher(tmp_path, 6)
    kills = [f"--fault=kill:rank={rank},step=4" for rank in (1, 2, 3)]
    run(runner, "--policy=elastic", "--limit=respawns_max=1", *kills,
        job=("--pace=0.25", "--replicas=3"))  # fmt: skip
    taken = decisions(tmp_path / "run")
    assert next(each.rung for each in taken) == "shrink" and taken[0].absent == (2, 3)
    rungs = [each.rung for each in taken]  # rank 1 may come to its kill later
    assert "regrow" in rungs and taken[-1].absent == ()
    steps = trained(tmp_path / "out")
    must_be_each_sample_once(steps, 6)
    must_equal_a_plain_run(tmp_path / "out", steps, 6, 0.0)


@pytest.mark.parametrize(
    ("kind", "killed", "why"),
    [
        ("counts", (2, 3), "SUM of whole numbers"),
        pytest.param("root", (2, 3), "rank 2 is the root of a collective", marks=EXTENDED),
        pytest.param("hsdp", (1, 3), "a rank of each replica is lost", marks=EXTENDED),
    ],
)
def test_what_needs_all_replicas_is_refused(
    kind: str, killed: tuple[int, ...], why: str, runner: Runner
) -> None:
    kills = [f"--fault=kill:rank={rank},step=5" for rank in killed]
    flags = ("--policy=elastic", "--limit=respawns_max=1", *kills)
    process = runner.start(*flags, job=(f"--kind={kind}",), script=JOB)
    process.wait(150)  # it may have begun anew
    taken = decisions(runner.folder / "run")
    assert why in taken[0].reason
    assert all(not each.absent for each in taken)
