"""What reaches TensorBoard, W&B, MLflow and trackio, by their own readers where they are there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.errors import StorageError, UsageError
from outlast.events import Metrics
from outlast.telemetry.loggers import metric_logs
from outlast.telemetry.loggers.run_log import log_run


class FakeWandb(SimpleNamespace):
    """The calls of wandb, which only records."""

    def __init__(self) -> None:
        super().__init__(logged=[], opened=[], summary={}, marks={}, breaks=False, offline=True)

    def init(self, **settings: Any) -> FakeWandb:
        self.opened.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if self.breaks:
            raise ConnectionError("away")
        self.logged.append((step, values["loss"]))
        if "outlast/incident" in values:
            self.marks[step] = values["outlast/incident"]

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def begun(folder: Path) -> SyntheticRun:
    run = SyntheticRun(folder / "run", world=2, spares=1)
    return run.start().phase(loss=1).phase(loss=2).phase(loss=3)


def test_later_calls_append_to_the_same_run(tmp_path: Path, wandb: FakeWandb) -> None:
    run = begun(tmp_path)
    assert log_run(run.run_dir, "wandb:gpt").step == 2
    run.killed(0).phase(loss=4).end("interrupted", 4)
    assert log_run(run.run_dir, "wandb:gpt").points == 2
    assert log_run(run.run_dir, "wandb:gpt").points == 0
    run.start(resumed_n=4, resumed_step=4).phase(loss=5).end()
    assert log_run(run.run_dir, "wandb:gpt").points == 1
    assert wandb.logged == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    assert {each["id"] for each in wandb.opened} == {"story"} and wandb.exit_code == 0
    assert "rank 0 was killed" in wandb.summary["outlast/incident-1"]


def test_redone_steps_with_equal_values_are_no_difference(tmp_path: Path, wandb: FakeWandb) -> None:
    run = begun(tmp_path).end("interrupted", 4)
    log_run(run.run_dir, "wandb:gpt")
    run.start(resumed_n=1, resumed_step=1).phase(loss=2).phase(loss=3).phase(loss=4).end()
    assert log_run(run.run_dir, "wandb:gpt").points == 1
    assert [step for step, _ in wandb.logged] == [1, 2, 3, 4]


@pytest.mark.parametrize("values", [(2.0, 33.0), (2.0,)])
def test_logged_steps_that_the_run_took_back_are_refused(
    tmp_path: Path, wandb: FakeWandb, values: tuple[float, ...]
) -> None:
    run = begun(tmp_path).end("interrupted", 4)
    log_run(run.run_dir, "wandb:gpt")
    run.start(resumed_n=1, resumed_step=1)
    for value in values:
        run.phase(loss=value)
    run.end()
    with pytest.raises(UsageError, match="gone back since"):
        log_run(run.run_dir, "wandb:gpt")
    assert log_run(run.run_dir, "wandb:gpt", name="again").points == 1 + len(values)
    assert [each["id"] for each in wandb.opened] == ["story", "story-again"]


def test_a_call_after_an_interrupted_one_is_refused(tmp_path: Path, wandb: FakeWandb) -> None:
    run = begun(tmp_path).end()
    wandb.breaks = True
    with pytest.raises(StorageError, match="ConnectionError: away"):
        log_run(run.run_dir, "wandb:gpt")
    wandb.breaks = False
    with pytest.raises(UsageError, match="interrupted while it wrote"):
        log_run(run.run_dir, "wandb:gpt")
    assert log_run(run.run_dir, "wandb:gpt", rank=1).identity == "story-rank1"


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = str(begun(tmp_path).end().run_dir)
    monkeypatch.setitem(sys.modules, "wandb", None)
    wrong = {
        "neptune:x": "the targets are",
        "tensorboard:": "the targets are",
        "tensorboard:s3://bucket/x": "and no URL",
        "mlflow:https://user:s3cret@a.example": "leave user and password out",
        "wandb:gpt": "pip install wandb",
    }
    for target, why in wrong.items():
        assert main(["log", run_dir, "--to", target]) == 2
        shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert why in shown and "s3cret" not in shown
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    for flags in (["--rank=7"], ["--name=a/b"]):
        assert main(["log", run_dir, "--to=wandb:gpt", *flags]) == 2
        assert flags[0].split("=")[0].strip("-") in capsys.readouterr().err
    assert main(["log", run_dir, "--to=wandb:gpt"]) == 0
    assert "3 steps written, up to step 3, as story" in capsys.readouterr().out


def taken_back(folder: Path, target: str) -> SyntheticRun:
    """Log a run twice, which goes back between the calls."""
    run = begun(folder)
    run.killed(0).phase(loss=4).phase(loss=9).end("interrupted", 4)
    log_run(run.run_dir, target)
    run.start(resumed_n=4, resumed_step=4).phase(loss=5).phase(loss=6).end()
    log_run(run.run_dir, target)
    return run


def scalars(read: Any) -> list[tuple[int, float]]:
    return [(one.step, one.tensor_proto.float_val[0]) for one in read.Tensors("loss")]


def test_tensorboard_reads_the_course_that_counts(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    target = f"tensorboard:{tmp_path / 'logs'}"
    log_run(taken_back(tmp_path, target).run_dir, target)
    assert len(list((tmp_path / "logs").iterdir())) == 2
    read = reader.EventAccumulator(str(tmp_path / "logs"))
    read.Reload()
    assert scalars(read) == [(step, step) for step in range(1, 7)]
    (text,) = read.Tensors("incidents/text_summary")
    assert b"rank 0 was killed" in text.tensor_proto.string_val[0]


def test_an_open_tensorboard_drops_what_was_taken_back(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    run = begun(tmp_path).end("interrupted", 4)
    target = f"tensorboard:{tmp_path / 'logs'}"
    log_run(run.run_dir, target)
    read = reader.EventAccumulator(str(tmp_path / "logs"))
    read.Reload()
    run.start(resumed_n=1, resumed_step=1).phase(loss=22).end()
    log_run(run.run_dir, target)
    read.Reload()
    assert scalars(read) == [(1, 1), (2, 22)]


def test_mlflow_has_one_run_with_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = f"file:{tmp_path / 'store'}"
    run = begun(tmp_path)
    log_run(run.run_dir, f"mlflow:{uri}")
    run.killed(0).phase(loss=4).end()
    logged = log_run(run.run_dir, f"mlflow:{uri}")
    client = mlflow.MlflowClient(tracking_uri=uri)
    place = client.get_experiment_by_name("outlast")
    (found,) = client.search_runs([place.experiment_id])
    assert found.info.run_id == logged.identity and found.info.status == "FINISHED"
    history = client.get_metric_history(logged.identity, "loss")
    assert [(one.step, one.value) for one in history] == [(step, step) for step in range(1, 5)]
    assert "rank 0 was killed" in found.data.tags["outlast.incident.1"]


def test_wandb_offline_keeps_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = begun(tmp_path)
    assert log_run(run.run_dir, "wandb:gpt").points == 2
    run.killed(0).phase(loss=4).end()
    assert log_run(run.run_dir, "wandb:gpt").points == 2
    parts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(parts) == 2 and all((part / "run-story.wandb").stat().st_size for part in parts)


def test_trackio_has_one_run_with_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage")
    run = begun(tmp_path)
    log_run(run.run_dir, "trackio:gpt")
    run.killed(0).phase(loss=4).end()
    log_run(run.run_dir, "trackio:gpt")
    assert storage.SQLiteStorage.get_runs("gpt") == ["story"]
    logs = storage.SQLiteStorage.get_logs("gpt", "story")
    assert [(one["step"], one["loss"]) for one in logs] == [(step, step) for step in range(1, 5)]


def test_a_metric_with_the_name_of_marks_is_refused(tmp_path: Path, wandb: FakeWandb) -> None:
    run = begun(tmp_path)
    worker, values = run.seats[0], {"outlast/incident": 7.0}
    run.write(worker, Metrics(t_ns=run.t_ns, worker=worker, seat=0, step=3, values=values))
    run.end()
    with pytest.raises(UsageError, match="a metric 'outlast/incident' in step 3"):
        log_run(run.run_dir, "wandb:gpt")
    assert wandb.logged == []


def test_every_target_has_a_log() -> None:
    kinds = (metric_logs.TensorBoardLog, metric_logs.WandbLog)
    kinds += (metric_logs.MLflowLog, metric_logs.TrackioLog)
    assert [kind.rewrites for kind in kinds] == [True, False, False, False]
