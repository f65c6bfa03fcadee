"""Metrics of a node's checks for Prometheus. Needs the extra `metrics`."""

from __future__ import annotations

from collections import Counter

from outlast.health.node_report import WORST_FIRST, NodeReport
from outlast.telemetry.metrics.metrics_file import Metric, gauge

_NS = 1e9


def check_metrics(report: NodeReport, only: tuple[str, ...] = ()) -> list[Metric]:
    """Return the metrics of a report, which all name its profile: each profile has a file.

    `only`: the checks that were chosen; the profile's name has them, since the rest is unknown.
    """
    profile = " only ".join(filter(None, (report.profile, ",".join(sorted(only)))))
    about = {(profile, report.cluster, report.node): 1.0}
    severity = {(profile, name): float(name == report.severity) for name in WORST_FIRST}
    findings = Counter((profile, one.check, one.severity) for one in report.findings)
    absent = Counter((profile, one.check) for one in report.not_applicable)
    when_s, took_s = {(profile,): report.t_ns / _NS}, {(profile,): report.took_s}
    of_profile = ("profile",)
    return [
        gauge("check_node", "The node; always 1.", about, ("profile", "cluster", "node")),
        gauge("check_timestamp_seconds", "Time of the check.", when_s, of_profile),
        gauge("check_duration_seconds", "Duration of the check.", took_s, of_profile),
        gauge(
            "check_severity",
            "1 with the worst severity of the findings, 0 with the others.",
            severity,
            ("profile", "severity"),
        ),
        gauge(
            "check_findings",
            "Findings by check and severity.",
            findings,
            ("profile", "check", "severity"),
        ),
        gauge(
            "check_not_applicable",
            "Parts that the node does not have and that are not expected.",
            absent,
            ("profile", "check"),
        ),
    ]
