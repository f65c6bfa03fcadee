"""Flags of metrics for Prometheus."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable

import msgspec

_PORT_MAX = 65535


class MetricsFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Where the launcher offers metrics: a file, a port of `host`, both, or neither."""

    file: str = ""
    port: int = -1  # 0: any free one; -1: none
    host: str = "127.0.0.1"

    @property
    def is_on(self) -> bool:
        """Return whether metrics were asked for."""
        return bool(self.file) or self.port >= 0


def add_metrics_flags(add: Callable[..., object]) -> None:
    """Add the flags to the parser."""
    add(
        "--metrics-file",
        "--metrics_file",
        default="",
        metavar="FILE",
        help="Write metrics of the run into FILE every 5 seconds, for the textfile collector of"
        " Prometheus' node exporter (default: none; docs/metrics.md).",
    )
    add(
        "--metrics-port",
        "--metrics_port",
        type=_port,
        default=-1,
        metavar="PORT",
        help="Serve metrics of the run at http://127.0.0.1:PORT/metrics (0: any free port;"
        " default: none).",
    )
    add(
        "--metrics-host",
        "--metrics_host",
        default=MetricsFlags().host,
        metavar="ADDRESS",
        help="Address to listen on for --metrics-port (default 127.0.0.1). Whoever reaches it can"
        " read the metrics.",
    )


def read(given: Namespace) -> MetricsFlags:
    """Return the flags as they were given."""
    return MetricsFlags(file=given.metrics_file, port=given.metrics_port, host=given.metrics_host)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _PORT_MAX:
        raise ArgumentTypeError(f"{text!r} is not a port from 0 to {_PORT_MAX}")
    return int(text)
