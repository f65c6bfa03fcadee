"""Logs of experiment loggers, and their packages, which are imported at use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from outlast.errors import StorageError, UsageError
from outlast.telemetry.loggers.metric_course import MetricPoint

_BATCH = 500  # metrics of a request to MLflow, which takes at most 1,000
_EXPERIMENT = "outlast"
MARK = "outlast/incident"  # metric of the first step after an incident: its number


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
    """One run in an experiment logger: `begin`, any number of additions, `end`.

    Points are added in order of steps, each once; an incident is marked once, when it is over.
    """

    rewrites: bool  # each call writes all points anew, and `take_back` works
    marks: bool  # incidents are wanted as the metric MARK of a point, too
    is_synchronous: bool  # what `add` returned from is at the target; else after `end`

    def begin(self, run: LoggedRun, known: str) -> str:
        """Open the run there, or make it; return its identity. `known`: the identity that the
        first call's `begin` returned, "" at the first call."""
        ...

    def newest(self, names: Iterable[str], /) -> dict[str, int] | None:
        """Return the newest step of each metric at the target; None: it cannot be known."""
        ...

    def add(self, points: list[MetricPoint]) -> None:
        """Append points."""
        ...

    def mark(self, incidents: list[LoggedIncident]) -> None:
        """Write incidents as texts."""
        ...

    def take_back(self, step: int) -> None:
        """Take back all points and texts from a step on."""
        ...

    def end(self, outcome: str, /) -> None:
        """Close the run there, with all that was added. `outcome`: as in LoggedRun."""
        ...


class _AppendOnly:
    """Logger that takes nothing back: the caller refuses."""

    rewrites = False
    marks = True
    is_synchronous = False

    def take_back(self, step: int) -> None:
        """See MetricLog.take_back."""
        raise StorageError(f"steps from {step} on cannot be taken back")


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
    marks = False
    is_synchronous = False

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._writers = _package("tensorboard.summary.writer.event_file_writer")
        self._events = _package("tensorboard.compat.proto.event_pb2")
        self._summaries = _package("tensorboard.compat.proto.summary_pb2")
        self._tensors = _package("tensorboard.compat.proto.tensor_pb2")
        self._writer: Any = None
        self._t_ns = 0  # of the newest text or point
        self._earlier: list[Path] = []

    def begin(self, run: LoggedRun, known: str) -> str:
        """See MetricLog.begin."""
        suffix = f".outlast-{run.name}"
        self._earlier = sorted(
            self._directory.glob(f"events.out.tfevents.*{suffix}"),
            key=lambda path: path.stat().st_mtime_ns,
        )
        self._writer = self._writers.EventFileWriter(str(self._directory), filename_suffix=suffix)
        self.take_back(0)
        return known or run.name

    def newest(self, _names: Iterable[str], /) -> dict[str, int] | None:
        """See MetricLog.newest: nothing, since all is written anew."""
        return {}

    def add(self, points: list[MetricPoint]) -> None:
        """See MetricLog.add."""
        for point in points:
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in point.values.items()
            ]
            self._add(point.t_ns, point.step, values)
        self._writer.flush()

    def mark(self, incidents: list[LoggedIncident]) -> None:
        """See MetricLog.mark."""
        for incident in incidents:
            self._add(incident.t_ns, incident.step, [self._text(incident.text)])
        self._writer.flush()

    def take_back(self, step: int) -> None:
        """See MetricLog.take_back: readers drop what is at the step of a start, and above."""
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(
            self._events.Event(wall_time=self._t_ns / 1e9, step=step, session_log=session)
        )

    def end(self, _outcome: str, /) -> None:
        """See MetricLog.end."""
        self._writer.close()
        for path in self._earlier[:-1]:  # a TensorBoard stays for ever at a file that is removed
            path.unlink(missing_ok=True)

    def _add(self, t_ns: int, step: int, values: list[Any]) -> None:
        self._t_ns = t_ns
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=t_ns / 1e9, step=step, summary=summary))

    def _text(self, text: str) -> Any:
        """Return a text as the plugin "text" reads it (its own writer needs TensorFlow)."""
        metadata = self._summaries.SummaryMetadata
        plugin = metadata.PluginData(plugin_name="text")
        tensor = self._tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        return self._summaries.Summary.Value(
            tag="incidents/text_summary", metadata=metadata(plugin_data=plugin), tensor=tensor
        )


class WandbLog(_AppendOnly):
    """A run of Weights & Biases with the id of the run."""

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

    def newest(self, names: Iterable[str], /) -> dict[str, int] | None:
        """See MetricLog.newest: the server's last step; offline nobody can tell it."""
        return None if self._run.offline else dict.fromkeys(names, int(self._run.step) - 1)

    def add(self, points: list[MetricPoint]) -> None:
        """See MetricLog.add."""
        for point in points:
            self._run.log(point.values, step=point.step)

    def mark(self, incidents: list[LoggedIncident]) -> None:
        """See MetricLog.mark."""
        for incident in incidents:
            self._run.summary[f"outlast/incident-{incident.number}"] = incident.text

    def end(self, outcome: str, /) -> None:
        """See MetricLog.end."""
        self._run.finish(exit_code=0 if outcome in ("", "done") else 1)


class MLflowLog(_AppendOnly):
    """A run in a tracking store of MLflow."""

    is_synchronous = True

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

    def newest(self, names: Iterable[str], /) -> dict[str, int] | None:
        """See MetricLog.newest."""
        known = self._client.get_run(self._identity).data.metrics
        history = self._client.get_metric_history
        return {
            name: max((one.step for one in history(self._identity, name)), default=-1)
            for name in names
            if name in known
        }

    def add(self, points: list[MetricPoint]) -> None:
        """See MetricLog.add."""
        metrics = [
            self._entities.Metric(name, value, point.t_ns // 1_000_000, point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for begin in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._identity, metrics=metrics[begin : begin + _BATCH])

    def mark(self, incidents: list[LoggedIncident]) -> None:
        """See MetricLog.mark."""
        for incident in incidents:
            name = f"outlast.incident.{incident.number}"
            self._client.set_tag(self._identity, name, incident.text)

    def end(self, outcome: str, /) -> None:
        """See MetricLog.end."""
        ends = {"": "RUNNING", "done": "FINISHED", "interrupted": "KILLED"}
        status = ends.get(outcome, "FAILED")
        if status == "RUNNING":
            self._client.update_run(self._identity, status=status)
        else:
            self._client.set_terminated(self._identity, status=status)


class TrackioLog(_AppendOnly):
    """A run of a project of trackio, with incidents as alerts."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._trackio = _package("trackio")
        self._storage = _package("trackio.sqlite_storage").SQLiteStorage
        self._run: Any = None
        self._identity = ""
        self._step = -1

    def begin(self, run: LoggedRun, known: str) -> str:
        """See MetricLog.begin."""
        self._identity = known or run.name
        settings: dict[str, object] = {"script": run.script, "world": run.world}
        self._run = self._trackio.init(
            project=self._project, name=self._identity, resume="allow", config=settings
        )
        return self._identity

    def newest(self, names: Iterable[str], /) -> dict[str, int] | None:
        """See MetricLog.newest."""
        step = self._storage.get_last_step(self._project, self._identity)
        return dict.fromkeys(names, -1 if step is None else step)

    def add(self, points: list[MetricPoint]) -> None:
        """See MetricLog.add."""
        for point in points:
            self._run.log(point.values, step=point.step)
            self._step = point.step

    def mark(self, incidents: list[LoggedIncident]) -> None:
        """See MetricLog.mark."""
        alerts = self._storage.get_alerts(self._project, self._identity)
        known = {alert["title"] for alert in alerts}
        for one in incidents:
            title = f"outlast incident {one.number}"
            if title not in known:
                self._run.alert(title, one.text, step=one.step)

    def end(self, _outcome: str, /) -> None:
        """See MetricLog.end. Raises TimeoutError: trackio itself only warns of a loss."""
        self._trackio.finish()
        found = self._storage.get_last_step(self._project, self._identity)
        if self._step >= 0 and found != self._step:
            raise TimeoutError(f"trackio has written steps up to {found} of {self._step}")
