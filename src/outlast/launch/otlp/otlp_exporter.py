"""Export of a run's metrics and incidents: a thread that training does not wait for.

Needs the extra `otlp`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client import Metric as Family

from outlast.launch.bundles.secret_redaction import SecretRedaction
from outlast.launch.otlp.otlp_records import incident_spans, metrics_data, run_resource
from outlast.launch.otlp.otlp_target import OtlpTarget, read_otlp_target
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.live_view import LiveFeed
from outlast.telemetry.metrics.run_metrics import RunMetrics
from outlast.telemetry.run_board import RunBoard
from outlast.text_formatting import plural

Collect = Callable[[], Iterable[Family]]
EVERY_S = 10.0
ATTEMPT_S = 5.0
CLOSE_S = 5.0
STUCK_S = 30.0  # a server that drips is not cut: the thread waits, and no other one does
INCIDENTS_MAX = 100
TEXT_MAX = 500  # characters


class _FirstError(logging.Handler):
    """First message of the SDK about an attempt, which would be on the terminal otherwise."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.text = self.text or record.getMessage()


class OtlpExporter:
    """Thread that sends a run's metrics every `every_s`, and incidents once they are over.

    State of the thread alone: `_waiting` incidents, `_number` of the newest one that was queued,
    `_dropped` ones. `_failed`, `_first` and `_begun_s` are under `_lock`.
    """

    def __init__(
        self,
        target: OtlpTarget,
        redact: Callable[[str], str],
        every_s: float = EVERY_S,
    ) -> None:
        self._target, self._redact, self._every_s = target, redact, every_s
        self._error = _FirstError()
        session = requests.Session()
        session.max_redirects = 0  # headers are for this server alone
        common = {"headers": target.headers, "timeout": ATTEMPT_S, "session": session}
        self._of_metrics = OTLPMetricExporter(endpoint=target.metrics_url, **common)
        self._of_spans = OTLPSpanExporter(endpoint=target.traces_url, **common)
        self._waiting: deque[Incident] = deque()
        self._number = -1
        self._dropped = 0
        self._lock = threading.Lock()
        self._failed = 0
        self._first = ""
        self._begun_s = 0.0  # time of the attempt that is under way
        self._closing = threading.Event()
        self._is_complete = False
        self._thread: threading.Thread | None = None

    def begin(self, metrics: RunMetrics) -> None:
        """Begin to send the metrics of a run, and its incidents."""
        metrics.notes = self.news
        self._thread = threading.Thread(
            target=self._run, args=(metrics.feed, metrics.collect), name="otlp", daemon=True
        )
        self._thread.start()

    def news(self) -> str:
        """Return the text about the first failed export, once; "" otherwise."""
        with self._lock:
            if self._begun_s and time.monotonic() - self._begun_s > STUCK_S:
                self._begun_s = 0.0
                return f"OTLP at {self._target.host}: no answer for {STUCK_S:.0f} s"
            text, self._first = self._first, ""
        return text

    def close(self, within_s: float = CLOSE_S) -> str:
        """Export the end of the run; return a text about what was not sent, or ""."""
        if self._thread is None:
            return ""
        self._closing.set()
        self._thread.join(within_s)
        with self._lock:
            failed = plural(self._failed, "export") if self._failed else ""
            if self._is_complete and not failed:
                return ""
            cause = self._first or f"OTLP at {self._target.host}"
            end = "" if self._is_complete else "the end of the run"
        incidents = len(self._waiting) + self._dropped
        lost = plural(incidents, "incident") if incidents else ""
        return f"{cause}; not sent in all: {', '.join(filter(None, (failed, end, lost)))}"

    # --- the thread ---

    def _run(self, feed: LiveFeed, collect: Collect) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.addHandler(self._error)
        while not self._closing.wait(self._every_s):
            self._export(feed, collect)
        self._is_complete = self._export(feed, collect)
        logger.removeHandler(self._error)

    def _export(self, feed: LiveFeed, collect: Collect) -> bool:
        """Send metrics, and incidents that are over; return whether all were taken."""
        with feed.lock:
            run, now_ns = feed.board.run, feed.now_ns()
            if not run:
                return True
            families = list(collect())
            self._queue(feed.board)
        resource = run_resource(run)
        data = metrics_data(families, resource, now_ns)
        is_sent = self._attempt(lambda: self._of_metrics.export(data) is MetricExportResult.SUCCESS)
        if self._waiting:
            spans = [
                span
                for one in self._waiting
                for span in incident_spans(run, one, resource, self._clean)
            ]
            taken = self._attempt(lambda: self._of_spans.export(spans) is SpanExportResult.SUCCESS)
            if taken:
                self._waiting.clear()
            is_sent = is_sent and taken
        return is_sent

    def _queue(self, board: RunBoard) -> None:
        """Queue incidents that are over; an earlier launcher's only where it died in it."""
        if self._number < 0:
            self._number = max(0, board.incidents_before - 1)
        for one in board.tracker.found(board.tracker.count - self._number or None):
            if one.number <= self._number:
                continue
            if one.state == "open":
                break
            self._number = one.number
            earlier = one.number <= board.incidents_before
            if not one.is_request and (not earlier or one.state == "died"):
                self._waiting.append(one)
        while len(self._waiting) > INCIDENTS_MAX:
            self._waiting.popleft()
            self._dropped += 1

    def _attempt(self, export: Callable[[], bool]) -> bool:
        self._error.text = ""
        with self._lock:
            self._begun_s = time.monotonic()
        try:
            is_taken = export()
        except Exception as error:  # noqa: BLE001 - of any type; the run goes on without it
            is_taken, self._error.text = False, f"{type(error).__name__}: {error}"
        with self._lock:
            self._begun_s = 0.0
            if not is_taken and not self._failed:
                cause = self._clean(self._error.text) or "no reason was given"
                self._first = f"OTLP at {self._target.host}: export failed: {cause}"
            self._failed += not is_taken
        return is_taken

    def _clean(self, text: str) -> str:
        line = " ".join(self._redact(text).split())
        return line if len(line) <= TEXT_MAX else f"{line[: TEXT_MAX - 3]}..."


@contextlib.contextmanager
def exporting(
    text: str, environment: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[Callable[[RunMetrics], None]]:
    """Yield what starts the export of a run's metrics. At the end, send the last state within
    CLOSE_S, and tell what was not sent.

    Raises UsageError for a target that cannot be used, before anything starts.
    """
    target = read_otlp_target(text, environment)
    exporter = OtlpExporter(target, SecretRedaction(environment).text)
    try:
        yield exporter.begin
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # the run has ended: keep its exit code
            if lost := exporter.close():
                tell(f"outlast: {lost}")
