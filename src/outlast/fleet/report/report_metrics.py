"""Metrics of a fleet report for Prometheus. Needs the extra `metrics`."""

from __future__ import annotations

from typing import Any

from outlast.fleet.analysis.exposure import LARGE_GPUS
from outlast.fleet.report.fleet_report import FleetReport
from outlast.fleet.report.report_sections import LEMON, Headline
from outlast.telemetry.metrics.metrics_file import Metric, gauge

_NS = 1e9
_HOUR_S = 3600.0
_1000_DAYS_S = 1000 * 86_400.0
_SOURCE = ("cluster", "partition")
_Rows = dict[str, list[dict[str, Any]]]


def report_metrics(
    report: FleetReport, *, partition: str = "", above_gpus: int = LARGE_GPUS
) -> list[Metric]:
    """Return the metrics of a report, which all name its cluster and partition ("": all). A figure
    that the records do not give is missing, not zero. `above_gpus`: of large jobs."""
    source = (report.cluster, partition)
    heads = {one.key: one for one in report.headlines}
    rows = {one.key: one.rows for one in report.sections}
    found = [
        gauge(
            "fleet_period_begin_timestamp_seconds",
            "First time of the report's period.",
            {source: report.since_ns / _NS},
            _SOURCE,
        ),
        gauge(
            "fleet_period_end_timestamp_seconds",
            "Time at which the report's period ends.",
            {source: report.until_ns / _NS},
            _SOURCE,
        ),
        gauge(
            "fleet_records",
            "Records in the period, by kind.",
            {(*source, kind): float(count) for kind, count in report.records.items()},
            (*_SOURCE, "kind"),
        ),
        gauge(
            "fleet_failures_per_node_second",
            "Failures of large jobs by infrastructure (r_f), with its 90 % interval.",
            _rate((*source, str(above_gpus)), heads.get("r_f")),
            (*_SOURCE, "above_gpus", "bound"),
        ),
        gauge(
            "fleet_outages_per_node_second",
            "Outages of nodes, where no job shows failures, with its 90 % interval.",
            _rate(source, heads.get("outages")),
            (*_SOURCE, "bound"),
        ),
        *_of_jobs(source, rows),
    ]
    lost = heads.get("lost")
    lost_s = {source: lost.value * _HOUR_S} if lost and lost.value is not None else {}
    text = "GPU time of work lost to failures and to preemptions that they caused."
    return [
        *found,
        gauge("fleet_lost_gpu_seconds", text, lost_s, _SOURCE),
        *_lemons(source, heads, rows),
    ]


def _rate(labels: tuple[str, ...], head: Headline | None) -> dict[tuple[str, ...], float]:
    """Return the bounds of a headline in 1000 node-days as a rate per node-second."""
    if head is None:
        return {}
    per_1000_days = _interval(labels, head.value, head.low, head.high)
    return {each: one / _1000_DAYS_S for each, one in per_1000_days.items()}


def _interval(
    labels: tuple[str, ...], value: float | None, low: float | None, high: float | None
) -> dict[tuple[str, ...], float]:
    bounds = {"estimate": value, "low": low, "high": high}
    return {(*labels, name): one for name, one in bounds.items() if one is not None}


def _of_jobs(source: tuple[str, str], rows: _Rows) -> list[Metric]:
    attempts: dict[tuple[str, ...], float] = {}
    gpu_s: dict[tuple[str, ...], float] = {}
    for row in rows.get("states", ()):
        labels = (*source, str(row["state"]), row["of"])
        attempts[labels] = row["jobs"]
        gpu_s[labels] = row["gpu_hours"] * _HOUR_S
    ettr: dict[tuple[str, ...], float] = {}
    for row in rows.get("ettr", ()):
        ettr |= _interval((*source, str(row["bucket"])), row["ettr"], row["low"], row["high"])
    by_state = (*_SOURCE, "state", "ended_by")
    about = "of attempts, by final state and by what ended them."
    return [
        gauge("fleet_attempts", f"Number {about}", attempts, by_state),
        gauge("fleet_attempt_gpu_seconds", f"GPU time {about}", gpu_s, by_state),
        gauge(
            "fleet_ettr_ratio",
            "ETTR of job runs of up to this many GPUs, hourly checkpoints assumed, with its 90 %"
            " interval.",
            ettr,
            (*_SOURCE, "gpus", "bound"),
        ),
    ]


def _lemons(source: tuple[str, str], heads: dict[str, Headline], rows: _Rows) -> list[Metric]:
    bad = [row for row in rows.get("lemons", ()) if row["called"] == LEMON]
    head = heads.get("lemons")
    count = {source: head.value} if head and head.value is not None else {}
    failures = {(*source, str(row["node"])): float(row["failures"]) for row in bad}
    text = "Nodes that fail more often than chance explains."
    each = "Failures of each such node in the ranked period."
    return [
        gauge("fleet_lemons", text, count, _SOURCE),
        gauge("fleet_lemon_failures", each, failures, (*_SOURCE, "node")),
    ]
