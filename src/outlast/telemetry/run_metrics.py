"""Metrics of a running job for Prometheus, from the board that its display shows.

Needs prometheus-client (extra `metrics`). docs/metrics.md lists the names.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outlast.atomic_files import replace_file
from outlast.errors import UsageError
from outlast.events import (
    AnyEvent,
    RunEnded,
    RunStarted,
    Warned,
)
from outlast.telemetry.live_view import LineDisplay, LiveDisplay
from outlast.telemetry.run_board import Beats

FILE_S = 5.0
LAST_SCRAPE_S = 60.0
_ANSWER_S = 10.0  # for a client that does not read
_TIERS = ("memory", "disk", "durable")
_NS = 1e9


class _Handler(WSGIRequestHandler):
    timeout = _ANSWER_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Log nothing: the terminal is the run's."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = False  # closing waits for answers


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


class MetricsEndpoint(Collector):
    """Server of metrics, which listens before the run begins. `port`: the one that it got.

    Raises UsageError where the address cannot be used.
    """

    def __init__(self, host: str, port: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        kind = _ServerOfIPv6 if ":" in host else _Server
        try:
            app = make_wsgi_app(self.registry)
            self._server = make_server(host, port, app, kind, handler_class=_Handler)
        except OSError as error:
            raise UsageError(
                f"--metrics-port {port}: cannot listen on {host}: {error.strerror or error};"
                " nothing was started"
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._scraped = threading.Event()
        self._scrape_s = 0.0  # time of the newest scrape
        self._gap_s = 0.0  # between the two newest ones
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Record the time of a scrape; there are no metrics of it."""
        now_s = time.monotonic()
        if self._scrape_s:
            self._gap_s = now_s - self._scrape_s
        self._scrape_s = now_s
        self._scraped.set()
        return ()

    def last_scrape_due_s(self) -> float:
        """Return how long to wait for a scrape that sees the end of the run: one and a half times
        the interval of scrapes, at most LAST_SCRAPE_S; 0 if there were fewer than two."""
        self._scraped.clear()
        return min(1.5 * self._gap_s, LAST_SCRAPE_S)

    def close(self, wait_s: float = 0.0) -> None:
        """Listen no more, once there was a scrape, or `wait_s` are over."""
        self._scraped.wait(wait_s)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class RunMetrics(Collector):
    """A display that passes everything on to another one, and offers its board as metrics.

    A file that cannot be written is tried again with the next beat; the run goes on.
    """

    def __init__(
        self,
        inner: LiveDisplay | LineDisplay,
        file: str = "",
        endpoint: MetricsEndpoint | None = None,
    ) -> None:
        self._inner, self._feed = inner, inner.feed
        self._file = Path(file).absolute() if file else None
        self._next_ns = 0
        self._spares = 0
        self._commit: tuple[int, int] = (-1, 0)  # step, and when it was first seen
        self._findings: Counter[tuple[str, str]] = Counter()
        self._outcome = ""
        self._registry = CollectorRegistry(auto_describe=False)  # of the file
        for registry in (self._registry, *([endpoint.registry] if endpoint else [])):
            registry.register(self)

    # --- the display ---

    def event(self, event: AnyEvent) -> None:
        """Pass an event on, and count it."""
        self._inner.event(event)
        with self._feed.lock:
            if isinstance(event, RunStarted):
                self._spares = event.spares
            elif isinstance(event, Warned):
                self._findings[event.check, event.severity] += 1
            elif isinstance(event, RunEnded):
                self._outcome = event.outcome

    def beats(self, beats: Beats) -> None:
        """Pass the workers' positions on, and write the file when it is due."""
        self._inner.beats(beats)
        now_ns = self._feed.now_ns()
        with self._feed.lock:
            self._feed.poll()
            if self._feed.board.step != self._commit[0]:
                self._commit = (self._feed.board.step, now_ns)
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + round(FILE_S * _NS)
            self._write()

    def line(self, rank: int, text: str) -> None:
        """Pass a line of a rank's output on."""
        self._inner.line(rank, text)

    def close(self) -> None:
        """Write the file once more, and end."""
        self._write()
        self._inner.close()

    def _write(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                replace_file(self._file, generate_latest(self._registry), durable=False)

    # --- the metrics ---

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics as of now."""
        with self._feed.lock:
            return [*self._of_run(), *self._of_incidents(), *self._of_state()]

    def _of_run(self) -> Iterator[Metric]:
        board, now_ns = self._feed.board, self._feed.now_ns()
        about = GaugeMetricFamily("outlast_run", "The run; always 1.", labels=["run", "script"])
        about.add_metric([board.run, board.script], 1)
        yield about
        outcome = GaugeMetricFamily(
            "outlast_run_outcome", "1 with the outcome of an ended run.", labels=["outcome"]
        )
        if self._outcome:
            outcome.add_metric([self._outcome], 1)
        yield outcome
        training = not self._outcome and board.generation > 0 and not board.recovering
        yield _gauge("training", "1 while a generation is open.", training)
        yield _gauge("term", "Number of the newest launcher or controller.", board.term)
        yield _gauge("generation", "Number of the newest generation.", board.generation)
        yield _gauge("ranks", "Number of ranks.", board.world)
        yield _gauge("ranks_absent", "Ranks without a worker.", len(board.absent))
        yield _gauge("spares_planned", "Spares that the run was started with.", self._spares)
        yield _gauge("spares", "Workers without a rank.", len(board.spares))
        yield _gauge("step", "Steps that every rank has committed.", board.step)
        if board.steps_total:
            yield _gauge("steps_planned", "Steps at the loop's end.", board.steps_total)
        if rate := board.steps_per_s():
            yield _gauge("step_seconds", "Time of a step, over the last 15 seconds.", 1 / rate)
        if self._commit[0] > 0:
            when_s = self._commit[1] / _NS
            yield _gauge("last_commit_timestamp_seconds", "Time of the newest commit.", when_s)
        if board.loss is not None:
            yield _gauge("loss", "Newest loss of the first rank that reports one.", board.loss)
        goodput = board.goodput(now_ns)
        if goodput is not None:
            yield _gauge("goodput_ratio", "Step time over wall x ranks, this launch.", goodput)

    def _of_incidents(self) -> Iterator[Metric]:
        board = self._feed.board
        found = CounterMetricFamily(
            "outlast_incidents", "Incidents over the run's life.", labels=["cause", "rung"]
        )
        seconds = CounterMetricFamily(
            "outlast_incident_seconds", "Time from fault to recovery.", labels=["cause"]
        )
        counts, times = Counter[tuple[str, str]](), Counter[str]()
        steps_lost = 0
        for one in board.tracker.found():
            if one.is_request:
                continue
            counts[one.cause.kind, one.rung or "open"] += 1
            times[one.cause.kind] += round(one.total_ms)
            steps_lost += one.committed_steps_lost
        for labels, count in counts.items():
            found.add_metric(labels, count)
        for cause, ms in times.items():
            seconds.add_metric([cause], ms / 1e3)
        yield found
        yield seconds
        lost = CounterMetricFamily("outlast_committed_steps_lost", "Committed steps lost.")
        lost.add_metric([], steps_lost)
        yield lost

    def _of_state(self) -> Iterator[Metric]:
        step = GaugeMetricFamily(
            "outlast_checkpoint_step", "Step of the newest checkpoint.", labels=["tier"]
        )
        when = GaugeMetricFamily(
            "outlast_checkpoint_timestamp_seconds",
            "Time of the newest checkpoint.",
            labels=["tier"],
        )
        for tier, (saved_step, t_ns) in self._feed.board.saved.items():
            step.add_metric([tier], saved_step)
            when.add_metric([tier], t_ns / _NS)
        yield step
        yield when
        failed = CounterMetricFamily(
            "outlast_checkpoint_failures", "Saves that failed.", labels=["tier"]
        )
        for tier in _TIERS:
            failed.add_metric([tier], self._feed.board.failed_saves.get(tier, 0))
        yield failed
        findings = CounterMetricFamily(
            "outlast_findings", "Findings of checks and sentinels.", labels=["check", "severity"]
        )
        for labels, count in self._findings.items():
            findings.add_metric(labels, count)
        yield findings


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"outlast_{name}", what, float(value))
