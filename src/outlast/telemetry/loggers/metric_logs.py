"""Logs of experiment loggers, and their packages, which are imported at use."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from outlast.errors import UsageError
from outlast.telemetry.loggers.metric_course import MetricPoint

_BATCH = 500  # metrics of a request to MLflow, which takes at most 1,000
_EXPERIMENT = "outlast"


class LoggedRun(NamedTuple):
    """A run, as loggers name it. `outcome`: of RunEnded; "": none yet."""

    name: str
    script: str
    world: int
    outcome: str


class LoggedIncident(NamedTuple):
    """An incident as a text at a step."""

    number: int
    step: int
    t_ns: int
    text: str


class MetricLog(Protocol):
    """One run in an experiment logger: `begin`, then `write`.

    `known`: identity that the first call's `begin` returned, "" at the first call. Points are
    appended, in order of steps. Incidents are given all, each time, and are written over.
    """

    rewrites: bool  # each call writes all points anew

    def begin(self, run: LoggedRun, known: str) -> str:
        """Open the run there, or make it; return its identity."""
        ...

    def write(
        self, run: LoggedRun, points: list[MetricPoint], incidents: list[LoggedIncident]
    ) -> None:
        """Write points and incidents, and close the run there."""
        ...


def open_log(target: str) -> MetricLog:
    """Return the log of a target. Raises UsageError."""
    kind, _, place = target.partition(":")
    kinds = {
        "tensorboard": TensorBoardLog,
        "wandb": WandbLog,
        "mlflow": MLflowLog,
        "trackio": TrackioLog,
    }
    if kind not in kinds or not place:
        names = "tensorboard:DIR, wandb:PROJECT, mlflow:URI and trackio:PROJECT"
        raise UsageError(f"--to {target}: the targets are {names}")
    if "://" in place and (kind == "tensorboard" or "@" in place):
        raise UsageError(
            f"--to {kind}: a directory is needed, and no URL"
            if kind == "tensorboard"
            else f"--to {kind}: leave user and password out; MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD give them"
        )
    return kinds[kind](place)


def _package(name: str, package: str = "") -> Any:
    package = package or name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{package} is not installed ({error}); nothing was logged; add it with:"
            f" pip install {package}"
        ) from error


class TensorBoardLog:
    """Event files of a run in a directory. Their names end with the run's; the newest one has
    all points, and takes back those of the one before."""

    rewrites = True

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._writers = _package("tensorboard.summary.writer.event_file_writer")
        self._events = _package("tensorboard.compat.proto.event_pb2")
        self._summaries = _package("tensorboard.compat.proto.summary_pb2")
        self._tensors = _package("tensorboard.compat.proto.tensor_pb2")

    def begin(self, run: LoggedRun, known: str) -> str:
        """See MetricLog.begin."""
        return known or run.name

    def write(
        self, run: LoggedRun, points: list[MetricPoint], incidents: list[LoggedIncident]
    ) -> None:
        """See MetricLog.write."""
        suffix = f".outlast-{run.name}"
        earlier = sorted(
            self._directory.glob(f"events.out.tfevents.*{suffix}"),
            key=lambda path: path.stat().st_mtime_ns,
        )
        writer = self._writers.EventFileWriter(str(self._directory), filename_suffix=suffix)
        begin_s = points[0].t_ns / 1e9 if points else 0.0
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        writer.add_event(self._events.Event(wall_time=begin_s, step=0, session_log=session))
        for point in points:
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in point.values.items()
            ]
            self._add(writer, point.t_ns, point.step, values)
        for incident in incidents:
            self._add(writer, incident.t_ns, incident.step, [self._text(incident.text)])
        writer.close()
        for path in earlier[:-1]:  # an open TensorBoard stays for ever at a file that is removed
            path.unlink(missing_ok=True)

    def _add(self, writer: Any, t_ns: int, step: int, values: list[Any]) -> None:
        summary = self._summaries.Summary(value=values)
        writer.add_event(self._events.Event(wall_time=t_ns / 1e9, step=step, summary=summary))

    def _text(self, text: str) -> Any:
        """Return a text as the plugin "text" reads it (its own writer needs TensorFlow)."""
        metadata = self._summaries.SummaryMetadata
        plugin = metadata.PluginData(plugin_name="text")
        tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        return self._summaries.Summary.Value(
            tag="incidents/text_summary", metadata=metadata(plugin_data=plugin), tensor=tensor
        )


class WandbLog:
    """A run of Weights & Biases with the id of the run."""

    rewrites = False

    def __init__(self, project: str) -> None:
        self._project = project
        self._wandb = _package("wandb")
        self._run: Any = None

    def begin(self, run: LoggedRun, known: str) -> str:
        """See MetricLog.begin."""
        identity = known or run.name
        settings = {"script": run.script, "world": run.world}
        self._run = self._wandb.init(
            project=self._project, id=identity, name=identity, resume="allow", config=settings
        )
        return identity

    def write(
        self, run: LoggedRun, points: list[MetricPoint], incidents: list[LoggedIncident]
    ) -> None:
        """See MetricLog.write."""
        for point in points:
            self._run.log(point.values, step=point.step)
        for incident in incidents:
            self._run.summary[f"outlast/incident-{incident.number}"] = incident.text
        self._run.finish(exit_code=0 if run.outcome in ("", "done") else 1)


class MLflowLog:
    """A run in a tracking store of MLflow."""

    rewrites = False

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._mlflow, self._entities = _package("mlflow"), _package("mlflow.entities")
        self._client: Any = None
        self._identity = ""

    def begin(self, run: LoggedRun, known: str) -> str:
        """See MetricLog.begin."""
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if not known:
            place = client.get_experiment_by_name(_EXPERIMENT)
            place_id = place.experiment_id if place else client.create_experiment(_EXPERIMENT)
            tags = {"outlast.run": run.name, "outlast.script": run.script}
            known = client.create_run(place_id, run_name=run.name, tags=tags).info.run_id
        self._identity = known
        return known

    def write(
        self, run: LoggedRun, points: list[MetricPoint], incidents: list[LoggedIncident]
    ) -> None:
        """See MetricLog.write."""
        client, identity = self._client, self._identity
        metrics = [
            self._entities.Metric(name, value, point.t_ns // 1_000_000, point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for begin in range(0, len(metrics), _BATCH):
            client.log_batch(identity, metrics=metrics[begin : begin + _BATCH])
        for incident in incidents:
            client.set_tag(identity, f"outlast.incident.{incident.number}", incident.text)
        ends = {"": "RUNNING", "done": "FINISHED", "interrupted": "KILLED"}
        status = ends.get(run.outcome, "FAILED")
        if status == "RUNNING":
            client.update_run(identity, status=status)
        else:
            client.set_terminated(identity, status=status)


class TrackioLog:
    """A run of a project of trackio."""

    rewrites = False

    def __init__(self, project: str) -> None:
        self._project = project
        self._trackio = _package("trackio")
        self._identity = ""

    def begin(self, run: LoggedRun, known: str) -> str:
        """See MetricLog.begin."""
        self._identity = known or run.name
        return self._identity

    def write(
        self, run: LoggedRun, points: list[MetricPoint], incidents: list[LoggedIncident]
    ) -> None:
        """See MetricLog.write."""
        settings: dict[str, object] = {"script": run.script, "world": run.world}
        settings |= {f"incident-{one.number}": one.text for one in incidents}
        self._trackio.init(
            project=self._project, name=self._identity, resume="allow", config=settings
        )
        for point in points:
            self._trackio.log(point.values, step=point.step)
        self._trackio.finish()
