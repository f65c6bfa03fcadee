"""Small handmade clusters of jobs and findings."""

from __future__ import annotations

from typing import Any

from outlast.fleet.record_tables import DAY_NS, Tables, tables
from outlast.log_records import Finding, JobEnded, Record

S, HOUR = 10**9, 3600 * 10**9
T0 = 19_800 * DAY_NS


def job(name: str = "1", *, end: float = 2.0, hours: float = 1.0, **more: Any) -> JobEnded:
    """Return an attempt on one node of 8 GPUs that ended `end` hours after T0, after `hours`."""
    end_ns = T0 + round(end * HOUR)
    start_ns = end_ns - round(hours * HOUR)
    said: dict[str, Any] = {
        "t_ns": end_ns, "cluster": "c", "job": name, "attempt": 0, "name": "", "user": "u",
        "account": "", "partition": "", "qos": "", "state": "COMPLETED", "exit_code": 0,
        "signal": 0, "submit_ns": start_ns, "eligible_ns": start_ns, "start_ns": start_ns,
        "nodes": 1, "gpus": 8, "hosts": "n1", "excluded": "", "failed_node": "", "priority": 0,
        "restarts": 0,
    }  # fmt: skip
    return JobEnded(**{**said, **more})


def finding(node: str = "n1", *, at: float = 2.0, after_s: float = 0, **more: Any) -> Finding:
    """Return a fatal finding, `at` hours and `after_s` seconds after T0."""
    said: dict[str, Any] = {
        "t_ns": T0 + round(at * HOUR) + round(after_s * S), "cluster": "c", "node": node,
        "check": "xid", "symptom": "pcie", "severity": "now", "code": "79", "device": "",
        "detail": "",
    }  # fmt: skip
    return Finding(**{**said, **more})


def cluster(*records: Record, days: float = 10) -> Tables:
    return tables(records, T0, T0 + round(days * DAY_NS))
