"""Server of metrics for Prometheus.

Needs prometheus-client (extra `metrics`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outlast.errors import UsageError

LAST_SCRAPE_S = 60.0
_ANSWER_S = 10.0  # for a client that does not read


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
