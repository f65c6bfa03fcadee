"""Metrics of a running job for Prometheus, from the board that its display shows.

Needs prometheus-client (extra `metrics`). docs/metrics.md lists the names.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from outlast.errors import StorageError
from outlast.events import (
    AnyEvent,
    Note,
    RunEnded,
    RunStarted,
    Warned,
)
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.live_view import LineDisplay, LiveDisplay
from outlast.telemetry.metrics.incident_identity import span_id, trace_id
from outlast.telemetry.metrics.metrics_endpoint import MetricsEndpoint
from outlast.telemetry.metrics.metrics_file import gauge, write_metrics
from outlast.telemetry.run_board import Beats

FILE_S = 5.0
_TIERS = ("memory", "disk", "durable")
_NS = 1e9


class RunMetrics(Collector):
    """A display that passes everything on to another one, and offers its board as metrics.

    A file that cannot be written is tried again with the next beat; the run goes on. `notes`
    returns a text for the display, or "".
    """

    def __init__(
        self,
        inner: LiveDisplay | LineDisplay,
        file: str = "",
        endpoint: MetricsEndpoint | None = None,
    ) -> None:
        self._inner, self.feed = inner, inner.feed
        self.notes: Callable[[], str] = str
        self._file = Path(file).absolute() if file else None
        self._next_ns = 0
        self._spares = 0
        self._commit: tuple[int, int] = (-1, 0)  # step, and when it was first seen
        self._findings: Counter[tuple[str, str]] = Counter()
        self._outcome = ""
        if endpoint:
            endpoint.registry.register(self)

    # --- the display ---

    def event(self, event: AnyEvent) -> None:
        """Pass an event on, and count it."""
        self._inner.event(event)
        with self.feed.lock:
            if isinstance(event, RunStarted):
                self._spares = event.spares
            elif isinstance(event, Warned):
                self._findings[event.check, event.severity] += 1
            elif isinstance(event, RunEnded):
                self._outcome = event.outcome

    def beats(self, beats: Beats) -> None:
        """Pass the workers' positions on, and write the file when it is due."""
        self._inner.beats(beats)
        now_ns = self.feed.now_ns()
        with self.feed.lock:
            self.feed.poll()
            if self.feed.board.step != self._commit[0]:
                self._commit = (self.feed.board.step, now_ns)
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + round(FILE_S * _NS)
            self._write()
        if text := self.notes():
            self._inner.event(Note(t_ns=now_ns, worker="", seat=-1, text=text))

    def line(self, text: str, *, is_error: bool) -> None:
        """Pass a line of a worker's output on."""
        self._inner.line(text, is_error=is_error)

    def close(self) -> None:
        """Write the file once more, and end."""
        self._write()
        self._inner.close()

    def _write(self) -> None:
        if self._file is not None:
            with contextlib.suppress(StorageError):
                write_metrics(self._file, self.collect())

    # --- the metrics ---

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics as of now."""
        with self.feed.lock:
            return [*self._of_run(), *self._of_incidents(), *self._of_state()]

    def _of_run(self) -> Iterator[Metric]:
        board, now_ns = self.feed.board, self.feed.now_ns()
        about = {(board.run, board.script): 1}
        yield gauge("run", "The run; always 1.", about, ("run", "script"))
        outcome = {(self._outcome,): 1} if self._outcome else {}
        yield gauge("run_outcome", "1 with the outcome of an ended run.", outcome, ("outcome",))
        training = not self._outcome and board.generation > 0 and not board.recovering
        yield gauge("training", "1 while a generation is open.", training)
        yield gauge("term", "Number of the newest launcher or controller.", board.term)
        yield gauge("generation", "Number of the newest generation.", board.generation)
        yield gauge("ranks", "Number of ranks.", board.world)
        yield gauge("ranks_absent", "Ranks without a worker.", len(board.absent))
        yield gauge("spares_planned", "Spares that the run was started with.", self._spares)
        yield gauge("spares", "Workers without a rank.", len(board.spares))
        yield gauge("step", "Steps that every rank has committed.", board.step)
        if board.steps_total:
            yield gauge("steps_planned", "Steps at the loop's end.", board.steps_total)
        if rate := board.steps_per_s():
            yield gauge("step_seconds", "Time of a step, over the last 15 seconds.", 1 / rate)
        if self._commit[0] > 0:
            when_s = self._commit[1] / _NS
            yield gauge("last_commit_timestamp_seconds", "Time of the newest commit.", when_s)
        if board.loss is not None:
            yield gauge("loss", "Newest loss of the first rank that reports one.", board.loss)
        goodput = board.goodput(now_ns)
        if goodput is not None:
            yield gauge("goodput_ratio", "Step time over wall x ranks, this launch.", goodput)

    def _of_incidents(self) -> Iterator[Metric]:
        board = self.feed.board
        found = CounterMetricFamily(
            "outlast_incidents", "Incidents over the run's life.", labels=["cause", "rung"]
        )
        seconds = CounterMetricFamily(
            "outlast_incident_seconds", "Time from fault to recovery.", labels=["cause"]
        )
        counts, times = Counter[tuple[str, str]](), Counter[str]()
        newest: dict[tuple[str, str], Incident] = {}
        steps_lost = 0
        for one in board.tracker.found():
            if one.is_request:
                continue
            counts[one.cause.kind, one.rung or "open"] += 1
            newest[one.cause.kind, one.rung or "open"] = one
            times[one.cause.kind] += round(one.total_ms)
            steps_lost += one.committed_steps_lost
        for labels, count in counts.items():
            found.add_metric(labels, count, exemplar=_exemplar(board.run, newest[labels]))
        for cause, ms in times.items():
            seconds.add_metric([cause], ms / 1e3)
        yield found
        yield seconds
        lost = CounterMetricFamily("outlast_committed_steps_lost", "Committed steps lost.")
        lost.add_metric([], steps_lost)
        yield lost

    def _of_state(self) -> Iterator[Metric]:
        saved = self.feed.board.saved.items()
        steps = {(tier,): float(step) for tier, (step, _) in saved}
        times = {(tier,): t_ns / _NS for tier, (_, t_ns) in saved}
        yield gauge("checkpoint_step", "Step of the newest checkpoint.", steps, ("tier",))
        name = "checkpoint_timestamp_seconds"
        yield gauge(name, "Time of the newest checkpoint.", times, ("tier",))
        failed = CounterMetricFamily(
            "outlast_checkpoint_failures", "Saves that failed.", labels=["tier"]
        )
        for tier in _TIERS:
            failed.add_metric([tier], self.feed.board.failed_saves.get(tier, 0))
        yield failed
        findings = CounterMetricFamily(
            "outlast_findings", "Findings of checks and sentinels.", labels=["check", "severity"]
        )
        for labels, count in self._findings.items():
            findings.add_metric(labels, count)
        yield findings


def _exemplar(run: str, one: Incident) -> Exemplar:
    """Return an incident's number, and its place in the traces that `--otlp` sends."""
    labels = {
        "incident": str(one.number),
        "trace_id": f"{trace_id(run, one.number):032x}",
        "span_id": f"{span_id(run, one.number):016x}",
    }
    return Exemplar(labels, 1.0, one.t_ns / _NS)
