"""Tables of a synthetic cluster: jobs, findings, outages, repairs, nodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import polars as pl

from outlast.fleet.record_tables import schema
from outlast.fleet.synth.cluster_shapes import GPUS, ClusterShape, ClusterWindow
from outlast.fleet.synth.synthetic_attempts import Attempts
from outlast.fleet.synth.synthetic_jobs import CODE, QOS, SchedulerResult
from outlast.log_records import (
    JOB_STATES,
    CheckAdded,
    Finding,
    JobEnded,
    NodeSeen,
    Outage,
    Record,
    Repair,
    Symptom,
)

NODES_A_RACK = 2
RACKS_A_POD = 10


def node_names(cluster: str, nodes: int) -> list[str]:
    """Return the names of all nodes: rsc1-0001 is the first."""
    digits = max(4, len(str(nodes)))
    return [f"{cluster}-{node + 1:0{digits}}" for node in range(nodes)]


def rack_and_pod(node: int) -> tuple[str, str]:
    """Return a node's rack and pod: two nodes a rack and ten racks a pod, as in the paper."""
    rack = node // NODES_A_RACK
    return f"rack{rack + 1:04}", f"pod{rack // RACKS_A_POD + 1:03}"


def host_lists(
    named: list[str], node_ids: np.ndarray, first: np.ndarray, node_counts: np.ndarray
) -> pl.Series:
    """Return each attempt's host list, as rsc1-[0001-0004,0007].

    Its nodes are `node_counts` of `node_ids` from `first` on.
    """
    single = pl.Series(named).gather(node_ids[np.minimum(first, len(node_ids) - 1)])
    (several,) = np.nonzero(node_counts > 1)
    if not len(several):
        return single
    counts = node_counts[several]
    attempt = np.repeat(np.arange(len(several)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    nodes = node_ids[np.repeat(first[several], counts) + within].astype(np.int64)
    order = np.lexsort((nodes, attempt))
    nodes = nodes[order]
    attempt = attempt[order]
    begins = np.r_[True, (attempt[1:] != attempt[:-1]) | (nodes[1:] != nodes[:-1] + 1)]
    lows = np.flatnonzero(begins)
    highs = np.r_[lows[1:], len(nodes)] - 1
    prefix, _, _ = named[0].rpartition("-")
    digits = pl.Series([name.rpartition("-")[2] for name in named])
    ranges = pl.DataFrame(
        {
            "attempt": attempt[lows],
            "low": digits.gather(nodes[lows]),
            "high": digits.gather(nodes[highs]),
        }
    )
    text = (
        pl.when(pl.col("low") == pl.col("high"))
        .then("low")
        .otherwise(pl.col("low") + "-" + pl.col("high"))
    )
    lists = ranges.group_by("attempt", maintain_order=True).agg(text.str.join(",").alias("text"))
    lists_of_several = (f"{prefix}-[" + lists["text"] + "]").alias("hosts")
    return single.scatter(several, lists_of_several)


_WARNINGS: tuple[tuple[Symptom, str], ...] = (
    ("thermal", "thermal"),
    ("disk", "disk"),
    ("clock", "clock_skew"),
    ("gpu-memory", "xid"),
)
_DETAILS = {
    "xid": "NVRM: Xid (PCI:{device}): {code}", "mounts": "/checkpoint does not answer",
    "ib_link": "port {device} is down", "pcie": "AER: uncorrected error",
    "ipmi_sel": "Critical Interrupt #0x90 | Bus Fatal Error | Asserted",
}  # fmt: skip


class SyntheticFinding(NamedTuple):
    """One finding. `severity`: now, drain or warn."""

    t_s: float
    node: int
    check: str
    symptom: Symptom
    severity: str
    code: str
    device: str


def is_detected(shape: ClusterShape, days: float, cause: int, t_s: float) -> bool:
    """Return whether a check at that time detects failures of this cause."""
    symptom, check, *_ = shape.causes[cause]
    since = dict(shape.new_checks).get(symptom, -1.0)
    return bool(check) and t_s >= since * days * 86400.0


def draw_drains(
    shape: ClusterShape,
    days: float,
    since_s: float,
    lemons: dict[int, float],
    rng: np.random.Generator,
) -> list[tuple[float, int, int]]:
    """Draw findings that drain a node after its job: time, node, cause."""
    span_days = days - since_s / 86400
    rates = np.full(shape.nodes, shape.drains_per_day * span_days)
    rates[list(lemons)] *= 5  # lemons are also drained more often
    nodes = np.repeat(np.arange(shape.nodes), rng.poisson(rates))
    times = np.floor(rng.uniform(since_s, days * 86400.0, len(nodes)))
    able = [number for number, cause in enumerate(shape.causes) if cause.check]
    causes = rng.choice(able, len(nodes))
    return sorted(zip(times.tolist(), nodes.tolist(), causes.tolist(), strict=True))


def make_findings(
    shape: ClusterShape,
    days: float,
    ran: SchedulerResult,
    drained: list[tuple[float, int, int]],
    rng: np.random.Generator,
) -> list[SyntheticFinding]:
    """Return all findings of the window, by time."""
    found: list[SyntheticFinding] = []
    for failure in ran.failures:
        if is_detected(shape, days, failure.cause, failure.t_s):
            down = failure.state == CODE["NODE_FAIL"]
            after_s = -rng.uniform(0, 60) if down else rng.uniform(-300, 240)
            found += _make_finding(
                shape, failure.t_s + after_s, failure.node, failure.cause, "now", rng
            )
    for t_s, node, cause in drained:
        if is_detected(shape, days, cause, t_s):
            found += _make_finding(shape, t_s, node, cause, "drain", rng)
    for _ in range(rng.poisson(shape.warnings_per_day * days * shape.nodes)):
        symptom, check = _WARNINGS[rng.integers(len(_WARNINGS))]
        code = "XID 63" if check == "xid" else ""
        node = int(rng.integers(shape.nodes))
        t_s = float(rng.uniform(0, days * 86400))
        device = f"0000:{rng.integers(8):02x}:00.0" if code else ""
        found.append(SyntheticFinding(t_s, node, check, symptom, "warn", code, device))
    return sorted(finding for finding in found if 0 <= finding.t_s < days * 86400)


def _make_finding(
    shape: ClusterShape, t_s: float, node: int, cause: int, severity: str, rng: np.random.Generator
) -> list[SyntheticFinding]:
    symptom, check, _, codes = shape.causes[cause]
    code = codes[rng.integers(len(codes))] if codes else ""
    gpu = f"0000:{rng.integers(8):02x}:00.0"
    port = f"mlx5_{rng.integers(8)}"
    device = {"xid": gpu, "nvlink": gpu, "pcie": gpu, "ib_link": port}.get(check, "")
    found = [SyntheticFinding(t_s, node, check, symptom, severity, code, device)]
    if symptom == "pcie":
        if (drawn := rng.random()) < shape.pcie_xid_share:
            found.append(
                SyntheticFinding(
                    t_s + 2, node, "xid", "gpu-unavailable", severity, "XID 79", device
                )
            )
        if drawn < shape.pcie_ipmi_share:
            found.append(SyntheticFinding(t_s + 5, node, "ipmi_sel", "pcie", severity, "", ""))
    if symptom == "ib-link" and rng.random() < shape.ib_gpu_share:
        found.append(
            SyntheticFinding(t_s + 1, node, "xid", "gpu-unavailable", severity, "XID 79", gpu)
        )
    return found


class NodeTables(NamedTuple):
    """The tables besides that of jobs."""

    findings: pl.DataFrame
    outages: pl.DataFrame
    repairs: pl.DataFrame
    nodes: pl.DataFrame
    checks: pl.DataFrame


def make_node_tables(
    window: ClusterWindow,
    ran: SchedulerResult,
    found: list[SyntheticFinding],
    rng: np.random.Generator,
) -> NodeTables:
    """Return the tables of findings, outages, repairs, nodes and checks."""
    shape = window.shape
    end_s = window.days * 86400.0

    def ns(t_s: float) -> int:
        return window.since_ns + round(t_s * 1000) * 10**6

    findings = [
        (
            ns(finding.t_s),
            shape.name,
            window.nodes[finding.node],
            finding.check,
            finding.symptom,
            finding.severity,
            finding.code,
            finding.device,
            _DETAILS.get(finding.check, "").format(device=finding.device, code=finding.code[4:]),
        )
        for finding in found
    ]
    outages = []
    repairs = []
    for absence in ran.absences:
        if absence.until_s <= 0 or absence.since_s >= end_s:
            continue
        symptom = shape.causes[absence.cause].symptom
        until_ns = ns(absence.until_s) if absence.until_s < end_s else None
        detail = "rebooted" if not absence.part else "in repair"
        node = window.nodes[absence.node]
        outages.append((ns(absence.since_s), shape.name, node, until_ns, symptom, detail))
        ticket_s = absence.since_s + round(rng.uniform(60, 1800))
        if absence.part and 0 <= ticket_s < end_s:
            repairs.append((ns(ticket_s), shape.name, node, "ticket", "", symptom))
        if absence.part not in ("", "?") and until_ns is not None:
            repairs.append((until_ns, shape.name, node, "swap", absence.part, "exchanged"))
    nodes = [
        (window.since_ns, shape.name, name, "dgx-a100", GPUS, *rack_and_pod(at))
        for at, name in enumerate(window.nodes)
    ]
    checks = [
        (ns(share * end_s), shape.name, cause.check, symptom)
        for symptom, share in shape.new_checks
        for cause in shape.causes
        if cause.symptom == symptom and cause.check
    ]
    kinds = (Finding, Outage, Repair, NodeSeen, CheckAdded)
    rows = (findings, outages, repairs, nodes, checks)
    return NodeTables(*map(_table, kinds, rows))


def _table(kind: type[Record], rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    types = schema(kind)
    names = ["t_ns", *(name for name in types if name != "t_ns")]
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    series = {
        name: pl.Series(name, column, types[name])
        for name, column in zip(names, columns, strict=True)
    }
    return pl.DataFrame(series).select(types.names()).sort("t_ns", maintain_order=True)


FIRST_JOB = 1_000_001
_USERS = 240
_ACCOUNTS = 16
_PRIORITY = (100, 1000, 10_000)  # by QOS
_WORDS = ("train", "eval", "sweep", "finetune", "ablate", "debug", "pretrain", "export")


def job_number(job: int) -> str:
    """Return a job's number as the scheduler shows it."""
    return str(FIRST_JOB + job)


_EXIT_CODES = np.zeros(len(JOB_STATES), int)
_EXIT_CODES[CODE["FAILED"]] = 1
_EXIT_CODES[CODE["OUT_OF_MEMORY"]] = 137
_SIGNALS = np.zeros(len(JOB_STATES), int)
_SIGNALS[[CODE["CANCELLED"], CODE["PREEMPTED"]]] = 15


def make_jobs_table(
    window: ClusterWindow, attempts: Attempts, ran: SchedulerResult, rng: np.random.Generator
) -> pl.DataFrame:
    """Return the table of jobs, by end time."""
    named = window.nodes
    since_ns = window.since_ns
    count = len(attempts.job)
    jobs = int(attempts.job.max(initial=-1)) + 1
    user = np.minimum(rng.zipf(1.5, jobs), _USERS) - 1  # a few have most of the jobs
    word = rng.integers(len(_WORDS), size=jobs)
    trial = rng.integers(1000, size=jobs)
    odd = rng.random(jobs) < 0.001

    def of(column: np.ndarray) -> np.ndarray:
        return column[attempts.run]  # a resubmitted job keeps its name and its user

    def texts(options: list[str] | tuple[str, ...], at: np.ndarray) -> pl.Series:
        return pl.Series(options, dtype=pl.String).gather(at)

    failed_node = np.full(count, len(named))
    struck = (attempts.failure >= 0) & (attempts.state == CODE["NODE_FAIL"])
    culprits = np.array([failure.node for failure in ran.failures] or [0])
    failed_node[struck] = culprits[attempts.failure[struck]]
    trials = pl.Series(of(trial)).cast(pl.String)
    suffixes = texts(("", "|lr=0.1"), of(odd).astype(int))
    excluded = {job.number: job.excluded for job in ran.jobs if job.excluded}
    exclusions = {
        number: ",".join(named[node] for node in sorted(nodes))
        for number, nodes in excluded.items()
    }
    lists = ["", *exclusions.values()]
    at = np.zeros(len(ran.jobs) + 1, int)
    at[list(exclusions)] = np.arange(1, len(lists))
    frame = pl.DataFrame(
        {
            "t_ns": _ns(attempts.end_s, since_ns),
            "cluster": pl.repeat(window.shape.name, count, eager=True),
            "job": pl.Series(attempts.job + FIRST_JOB).cast(pl.String),
            "attempt": attempts.attempt,
            "name": texts(_WORDS, of(word)) + "-" + trials + suffixes,
            "user": texts([f"user{n:03}" for n in range(_USERS)], of(user)),
            "account": texts([f"team{n:02}" for n in range(_ACCOUNTS)], of(user % _ACCOUNTS)),
            "partition": pl.repeat("learn", count, eager=True),
            "qos": texts(QOS, attempts.qos),
            "state": texts(JOB_STATES, attempts.state),
            "exit_code": _EXIT_CODES[attempts.state],
            "signal": _SIGNALS[attempts.state],
            "submit_ns": _ns(attempts.submit_s, since_ns),
            "eligible_ns": _ns(attempts.eligible_s, since_ns),
            "start_ns": _ns(attempts.start_s, since_ns),
            "nodes": attempts.nodes,
            "gpus": attempts.gpus,
            "hosts": host_lists(named, ran.held_nodes, attempts.first, attempts.nodes),
            "excluded": texts(lists, at[attempts.large]),
            "failed_node": texts([*named, ""], failed_node),
            "priority": np.array(_PRIORITY)[attempts.qos] + of(trial) % 100,
            "restarts": attempts.restarts,
        }
    )
    frame = frame.with_columns(pl.col("t_ns").clip(upper_bound=window.until_ns))
    types = schema(JobEnded)
    return frame.cast(types).select(types.names()).sort("t_ns", maintain_order=True)


def _ns(t_s: np.ndarray, since_ns: int) -> np.ndarray:
    return since_ns + t_s.astype(np.int64) * 1_000_000_000
