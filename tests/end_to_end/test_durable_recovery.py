"""Recovery from durable storage after the loss of local checkpoints."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.bucket_server import BUCKET, BucketServer
from tests.end_to_end.conftest import Outcome, Runner, same, wait_for

from outlast import events
from outlast.checkpoint.format import codec
from outlast.controller.inputs import SharedValueStored
from outlast.launch.run_journal import read_journal
from outlast.telemetry.event_store import read_events

pytestmark = pytest.mark.process


@pytest.fixture
def server(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BucketServer]:
    server = BucketServer(tmp_path_factory.mktemp("s3") / "root")  # it is nothing of the run's
    server.into(monkeypatch)
    yield server
    server.kill()


def killed_at_step_8(runner: Runner, tmp_path: Path, *flags: str, drained: int) -> None:
    """Once the checkpoint of step `drained` is in durable storage; then nobody lives any more."""
    hold = tmp_path / "hold"
    process = runner.start(*flags, job=("--hold", str(hold)))
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 8")
    wait_for(lambda: drained in steps_drained(tmp_path), f"step {drained} in durable storage")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    wait_for(lambda: not runner.left_behind(), "no orphans", 15)
    hold.touch()


def steps_drained(tmp_path: Path) -> set[int]:
    return {e.step for e in read_events(tmp_path / "run") if isinstance(e, events.Drained)}


@pytest.mark.extended
def test_checkpoints_that_were_lost_come_back_and_intervals_follow_what_they_cost(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    flags = ("--checkpoint-every=auto", "--snapshot-every=auto", f"--durable={tmp_path / 'far'}")
    killed_at_step_8(runner, tmp_path, *flags, drained=4)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    resumed = runner.run(*flags, job=("--hold", str(tmp_path / "hold")))
    same(resumed, undisturbed)
    assert "the checkpoint of step 4 is copied here from" in resumed.output
    (*_, started) = [e for e in resumed.events if isinstance(e, events.RunStarted)]
    assert (started.term, started.resumed_step) == (2, 4)
    # Every fourth step is tried until costs are known; then nothing is due for a long while.
    (scheduled,) = [e for e in resumed.events if isinstance(e, events.Scheduled)]
    assert scheduled.memory > 4 and scheduled.disk > 4
    told = " ".join(resumed.explain().replace("│", " ").split())
    assert "saves" in told and "llama3-405b" in told and "C = " in told
    assert steps_drained(tmp_path) >= {4, 8}
    assert (tmp_path / "far" / "latest").exists()


@pytest.mark.extended
def test_another_machine_takes_the_run_up_from_a_bucket(
    runner: Runner, undisturbed: Outcome, tmp_path: Path, server: BucketServer
) -> None:
    bucket, mirror = f"s3://{BUCKET}/run-1", tmp_path / "mirror"
    targets = (f"--durable={bucket}", f"--durable={mirror} every=6 rate=100MB/s")
    flags = ("--checkpoint-every=3", *targets, "--keep=last=1")
    killed_at_step_8(runner, tmp_path, *flags, drained=6)
    journal = read_journal(tmp_path / "run" / "journal", lambda _: None)
    names = {codec.decode(entry.value) for entry in journal if isinstance(entry, SharedValueStored)}
    shutil.rmtree(tmp_path / "run")
    resumed = runner.run(*flags, job=("--hold", str(tmp_path / "hold")))
    same(resumed, undisturbed)
    assert {rank["name"] for rank in resumed.ranks} == names  # drawn once in the job's life
    assert "goes on here, at step 6" in resumed.output
    (started,) = [e for e in resumed.events if isinstance(e, events.RunStarted)]
    assert (started.term, started.resumed_step) == (2, 6)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    for root in (server.bucket / "run-1", mirror):
        assert [path.name[:14] for path in root.glob("step-*")] == ["step-000000012"]
    assert resumed.summary["durable"][bucket] >= 2 and resumed.summary["durable"][str(mirror)] == 1


@pytest.mark.extended
def test_a_failed_save_ends_the_run_where_its_owner_wants_that(runner: Runner) -> None:
    outcome = runner.run(
        "--checkpoint-every=3", "--on-save-failure=stop", "--fault=full:rank=1,step=6"
        ",phase=checkpoint",
    )  # fmt: skip
    assert outcome.code == 3, outcome.output
    cause = outcome.summary["cause"]
    assert cause["kind"] == "storage" and "No space left" in cause["detail"]
    assert "rank 1" in cause["detail"] and cause["seat"] == -1
    assert list((outcome.run_dir / "checkpoints").glob("step-000000003*"))
