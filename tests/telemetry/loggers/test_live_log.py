"""Loggers that follow a run: rollbacks, kills, second writers, and incidents as marks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import wait_for
from tests.telemetry.loggers.test_run_log import FakeWandb, begun, scalars, wandb
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.errors import OutlastError, StorageError, UsageError
from outlast.telemetry import event_store
from outlast.telemetry.loggers import run_log
from outlast.telemetry.loggers.run_log import LoggedSteps, log_run

__all__ = ["wandb"]  # a fixture


class Follower(threading.Thread):
    """`outlast log --follow` in a thread."""

    def __init__(self, run_dir: Path, target: str) -> None:
        super().__init__()
        self._run_dir, self._target = run_dir, target
        self.logged: LoggedSteps | None = None
        self.error = ""

    def run(self) -> None:
        try:
            self.logged = log_run(self._run_dir, self._target, follow=True)
        except OutlastError as error:
            self.error = str(error)

    def end(self) -> LoggedSteps:
        self.join(30)
        assert self.logged is not None, self.error
        return self.logged


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "POLL_S", 0.01)
    monkeypatch.setattr(event_store, "life_of", lambda *_: "running")


@contextmanager
def following(run: SyntheticRun, target: str) -> Iterator[Follower]:
    follower = Follower(run.run_dir, target)
    follower.start()
    try:
        yield follower
    finally:
        if follower.is_alive():
            run.end("interrupted", 4)
        follower.join(30)


def steps(fake: FakeWandb) -> list[int]:
    return [step for step, _ in fake.logged]


def test_steps_come_as_they_are_complete(tmp_path: Path, wandb: FakeWandb) -> None:
    run = begun(tmp_path)
    with following(run, "wandb:gpt") as follower:
        wait_for(lambda: steps(wandb) == [1, 2], "two steps")
        run.killed(0).phase(loss=4)
        wait_for(lambda: steps(wandb) == [1, 2, 3], "the third step")
        run.end()
        logged = follower.end()
    assert steps(wandb) == [1, 2, 3, 4] and (logged.points, logged.step) == (4, 4)
    assert not logged.died and wandb.exit_code == 0 and len(wandb.opened) == 1
    assert wandb.marks == {4: 1.0}  # the incident, at the step that it interrupted
    assert "rank 0 was killed" in wandb.summary["outlast/incident-1"]


@pytest.mark.parametrize("again", [[2, 3], [2, 33]])
def test_redone_steps_are_compared_before_more_is_written(
    tmp_path: Path, wandb: FakeWandb, again: list[float]
) -> None:
    run = begun(tmp_path)
    with following(run, "wandb:gpt") as follower:
        run.phase(loss=4)
        wait_for(lambda: steps(wandb) == [1, 2, 3], "three steps")
        run.broken(0, run.fault("killed", 0)).restart(n=1, step=1)
        for loss in again:
            run.phase(loss=loss)
        run.phase(loss=5).phase(loss=6)
        if again == [2, 3]:
            wait_for(lambda: steps(wandb)[-1] == 4, "a step after the redone ones")
            run.end()
            assert follower.end().points == 5
            assert wandb.logged == [(1, 1), (2, 2), (3, 3), (4, 5), (5, 6)]
        else:
            follower.join(30)
            assert "steps up to 3 are in wandb:gpt" in follower.error
            assert steps(wandb) == [1, 2, 3]


def test_tensorboard_takes_redone_steps_back(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    run = begun(tmp_path)
    read = reader.EventAccumulator(str(tmp_path / "logs"))

    def shows(*expected: tuple[int, float]) -> Callable[[], bool]:
        def look() -> bool:
            read.Reload()
            return "loss" in read.Tags()["tensors"] and scalars(read) == list(expected)

        return look

    (tmp_path / "logs").mkdir()
    with following(run, f"tensorboard:{tmp_path / 'logs'}") as follower:
        run.phase(loss=4)
        wait_for(shows((1, 1), (2, 2), (3, 3)), "three steps")
        run.broken(0, run.fault("killed", 0)).restart(n=1, step=1)
        run.phase(loss=22).phase(loss=33)
        wait_for(shows((1, 1), (2, 22)), "a redone step")
        run.end()
        follower.end()
    assert shows((1, 1), (2, 22), (3, 33))()
    assert len(read.Tensors("incidents/text_summary")) == 1


def test_a_second_writer_is_refused(tmp_path: Path, wandb: FakeWandb) -> None:
    run = begun(tmp_path)
    with following(run, "wandb:gpt"):
        wait_for(lambda: steps(wandb) == [1, 2], "two steps")
        with pytest.raises(UsageError, match="another `outlast log` writes"):
            log_run(run.run_dir, "wandb:gpt")


def test_the_death_of_the_launcher_is_named(
    tmp_path: Path,
    wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = begun(tmp_path)
    run.close()
    monkeypatch.setattr(event_store, "life_of", lambda *_: "died")
    assert main(["log", str(run.run_dir), "--to=wandb:gpt", "--follow"]) == 0
    assert "the launcher died before the run ended" in capsys.readouterr().err
    run.start(resumed_n=3, resumed_step=3).phase(loss=4).end()
    assert log_run(run.run_dir, "wandb:gpt", follow=True).points == 2
    assert steps(wandb) == [1, 2, 3, 4]
    assert main(["log", str(tmp_path / "no"), "--to=wandb:gpt", "--follow"]) == 1


class Broken:
    """A function that fails at its `count`th call, before or after it has done its work."""

    def __init__(self, inner: Callable[..., Any], count: int, *, after: bool) -> None:
        self._inner, self._count, self._after = inner, count, after

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._count -= 1
        if self._count == 0 and not self._after:
            raise ConnectionError("away")
        result = self._inner(*given, **named)
        if self._count == 0:
            raise ConnectionError("away")
        return result


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_interrupted_call_is_continued_without_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, after: bool
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(run_log, "_BATCH", 2)
    target = f"mlflow:file:{tmp_path / 'store'}"
    run = begun(tmp_path).phase(loss=4).killed(0).phase(loss=5).phase(loss=6).end()
    with monkeypatch.context() as broken:
        inner = mlflow.MlflowClient.log_batch
        half = Broken(inner, count, after=after)
        broken.setattr(mlflow.MlflowClient, "log_batch", lambda *a, **k: half(*a, **k))
        with pytest.raises(StorageError, match="ConnectionError: away"):
            log_run(run.run_dir, target)
    logged = log_run(run.run_dir, target)
    client = mlflow.MlflowClient(tracking_uri=target.removeprefix("mlflow:"))
    history = client.get_metric_history(logged.identity, "loss")
    assert [(one.step, one.value) for one in history] == [(step, step) for step in range(1, 7)]
    marks = client.get_metric_history(logged.identity, "outlast/incident")
    assert [(one.step, one.value) for one in marks] == [(5, 1)]
    assert "outlast.incident.1" in client.get_run(logged.identity).data.tags


@pytest.mark.parametrize("count", [1, 3, 6])
def test_trackio_continues_behind_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    project = f"live-{count}"  # trackio reads its directory once
    run = begun(tmp_path).phase(loss=4).killed(0).phase(loss=5).phase(loss=6).end()
    with monkeypatch.context() as broken:
        half = Broken(trackio.Run.log, count, after=False)
        broken.setattr(trackio.Run, "log", lambda *a, **k: half(*a, **k))
        with pytest.raises(StorageError, match="ConnectionError: away"):
            log_run(run.run_dir, f"trackio:{project}")
        trackio.finish()
    log_run(run.run_dir, f"trackio:{project}")
    logs = storage.get_logs(project, "story")
    assert [(one["step"], one["loss"]) for one in logs] == [(step, step) for step in range(1, 7)]
    assert [one["step"] for one in logs if "outlast/incident" in one] == [5]
    (alert,) = storage.get_alerts(project)
    assert "rank 0 was killed" in alert["text"]


def test_wandbs_server_says_what_it_has(tmp_path: Path, wandb: FakeWandb) -> None:
    run = begun(tmp_path).phase(loss=4).end()
    wandb.breaks = True
    with pytest.raises(StorageError):
        log_run(run.run_dir, "wandb:gpt")
    wandb.breaks, wandb.offline, wandb.step = False, False, 3  # two steps arrived
    wandb.logged.clear()
    log_run(run.run_dir, "wandb:gpt")
    assert steps(wandb) == [3, 4]
