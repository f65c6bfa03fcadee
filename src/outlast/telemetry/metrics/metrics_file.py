"""Metrics in a file, for the textfile collector of Prometheus' node exporter.

Needs prometheus-client (extra `metrics`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outlast.atomic_files import replace_file
from outlast.errors import StorageError, UsageError

__all__ = ["Metric", "check_metrics_file", "gauge", "write_metrics"]


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


def check_metrics_file(path: Path, kept: str) -> Path:
    """Return the absolute path of `--metrics-file`. `kept`: how the message ends.

    Raises UsageError where no file can be there.
    """
    whole = path.absolute()
    if not whole.parent.is_dir():
        raise UsageError(f"--metrics-file {path}: its directory is missing; {kept}")
    if os.path.lexists(whole) and not stat.S_ISREG(whole.lstat().st_mode):
        raise UsageError(
            f"--metrics-file {path}: it is replaced at each write, and is no plain file now (a"
            f" directory, a device, a link); {kept}"
        )
    return whole


def write_metrics(path: Path, families: Iterable[Metric]) -> None:
    """Write a file of metrics, or replace it: a reader sees the old one or the new one.

    Raises StorageError.
    """
    try:
        replace_file(path, generate_latest(_Families(families)), durable=False)
    except OSError as error:
        raise StorageError(f"{path}: metrics not written: {error.strerror or error}") from error


def gauge(
    name: str,
    description: str,
    values: float | Mapping[tuple[str, ...], float],
    labels: tuple[str, ...] = (),
) -> Metric:
    """Return a gauge. `values`: one, or one for each tuple of values of the labels."""
    by_labels = values if isinstance(values, Mapping) else {(): values}
    family = GaugeMetricFamily(f"outlast_{name}", description, labels=labels)
    for texts, value in by_labels.items():
        family.add_metric([_readable(text) for text in texts], float(value))
    return family


def _readable(text: str) -> str:
    """Return a text without what UTF-8 cannot hold (bytes of a file's name)."""
    return text.encode("utf-8", "replace").decode()
