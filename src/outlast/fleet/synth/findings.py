"""What checks say of nodes, and what becomes of them: of those that failed, and of others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import polars as pl

from outlast.fleet.synth.hosts import place
from outlast.fleet.synth.ran import Ran
from outlast.fleet.synth.shapes import GPUS, Shape
from outlast.fleet.synth.workload import CODE
from outlast.fleet.tables import schema
from outlast.log_records import CheckAdded, Finding, NodeSeen, Outage, Record, Repair, Symptom

_WARNINGS: tuple[tuple[Symptom, str], ...] = (
    ("thermal", "thermal"), ("disk", "disk"), ("clock", "clock_skew"),
    ("gpu-memory", "xid"),
)  # fmt: skip
_DETAILS = {
    "xid": "NVRM: Xid (PCI:{device}): {code}", "mounts": "/checkpoint does not answer",
    "ib_link": "port {device} is down", "pcie": "AER: uncorrected error",
    "ipmi_sel": "Critical Interrupt #0x90 | Bus Fatal Error | Asserted",
}  # fmt: skip


class Said(NamedTuple):
    """One finding. `severity`: now, drain or warn."""

    t_s: float
    node: int
    check: str
    symptom: Symptom
    severity: str
    code: str
    device: str


def seen(shape: Shape, days: float, cause: int, t_s: float) -> bool:
    """Whether there was a check at that time that sees such a failure."""
    symptom, check, *_ = shape.causes[cause]
    since = dict(shape.new_checks).get(symptom, -1.0)
    return bool(check) and t_s >= since * days * 86400.0


def drains(
    shape: Shape, days: float, since_s: float, lemons: dict[int, float], rng: np.random.Generator
) -> list[tuple[float, int, int]]:
    """Findings that want a node away when its job has ended: time, node, cause."""
    span_days = days - since_s / 86400
    rates = np.full(shape.nodes, shape.drains_per_day * span_days)
    rates[list(lemons)] *= 5  # lemons do not only fail
    nodes = np.repeat(np.arange(shape.nodes), rng.poisson(rates))
    times = np.floor(rng.uniform(since_s, days * 86400.0, len(nodes)))
    able = [number for number, cause in enumerate(shape.causes) if cause.check]
    causes = rng.choice(able, len(nodes))
    return sorted(zip(times.tolist(), nodes.tolist(), causes.tolist(), strict=True))


def said(
    shape: Shape, days: float, ran: Ran, drained: list[tuple[float, int, int]],
    rng: np.random.Generator,
) -> list[Said]:  # fmt: skip
    """All findings of the window, by time."""
    found: list[Said] = []
    for failure in ran.failures:
        if seen(shape, days, failure.cause, failure.t_s):
            down = failure.state == CODE["NODE_FAIL"]
            after_s = -rng.uniform(0, 60) if down else rng.uniform(-300, 240)
            found += _said(shape, failure.t_s + after_s, failure.node, failure.cause, "now", rng)
    for t_s, node, cause in drained:
        if seen(shape, days, cause, t_s):
            found += _said(shape, t_s, node, cause, "drain", rng)
    for _ in range(rng.poisson(shape.warnings_per_day * days * shape.nodes)):
        symptom, check = _WARNINGS[rng.integers(len(_WARNINGS))]
        code = "XID 63" if check == "xid" else ""
        node, t_s = int(rng.integers(shape.nodes)), float(rng.uniform(0, days * 86400))
        device = f"0000:{rng.integers(8):02x}:00.0" if code else ""
        found.append(Said(t_s, node, check, symptom, "warn", code, device))
    return sorted(one for one in found if 0 <= one.t_s < days * 86400)


def _said(
    shape: Shape, t_s: float, node: int, cause: int, severity: str, rng: np.random.Generator
) -> list[Said]:
    symptom, check, _, codes = shape.causes[cause]
    code = codes[rng.integers(len(codes))] if codes else ""
    gpu, port = f"0000:{rng.integers(8):02x}:00.0", f"mlx5_{rng.integers(8)}"
    device = {"xid": gpu, "nvlink": gpu, "pcie": gpu, "ib_link": port}.get(check, "")
    found = [Said(t_s, node, check, symptom, severity, code, device)]
    if symptom == "pcie":
        if (drawn := rng.random()) < shape.pcie_xid_share:
            found.append(Said(t_s + 2, node, "xid", "gpu-unavailable", severity, "XID 79", device))
        if drawn < shape.pcie_ipmi_share:
            found.append(Said(t_s + 5, node, "ipmi_sel", "pcie", severity, "", ""))
    if symptom == "ib-link" and rng.random() < shape.ib_gpu_share:
        found.append(Said(t_s + 1, node, "xid", "gpu-unavailable", severity, "XID 79", gpu))
    return found


class Others(NamedTuple):
    """The tables besides the jobs'."""

    findings: pl.DataFrame
    outages: pl.DataFrame
    repairs: pl.DataFrame
    nodes: pl.DataFrame
    checks: pl.DataFrame


def others(
    shape: Shape, days: float, ran: Ran, found: list[Said], named: list[str], since_ns: int,
    rng: np.random.Generator,
) -> Others:  # fmt: skip
    """As tables of records."""
    end_s = days * 86400.0

    def ns(t_s: float) -> int:
        return since_ns + round(t_s * 1000) * 10**6

    findings = [
        (ns(one.t_s), shape.name, named[one.node], one.check, one.symptom, one.severity, one.code,
         one.device, _DETAILS.get(one.check, "").format(device=one.device, code=one.code[4:]))
        for one in found
    ]  # fmt: skip
    outages, repairs = [], []
    for gone in ran.absences:
        if gone.until_s <= 0 or gone.since_s >= end_s:
            continue
        symptom = shape.causes[gone.cause].symptom
        until_ns = ns(gone.until_s) if gone.until_s < end_s else None
        detail = "rebooted" if not gone.part else "in repair"
        node = named[gone.node]
        outages.append((ns(gone.since_s), shape.name, node, until_ns, symptom, detail))
        asked_s = gone.since_s + round(rng.uniform(60, 1800))
        if gone.part and 0 <= asked_s < end_s:
            repairs.append((ns(asked_s), shape.name, node, "ticket", "", symptom))
        if gone.part not in ("", "?") and until_ns is not None:
            repairs.append((until_ns, shape.name, node, "swap", gone.part, "exchanged"))
    nodes = [
        (since_ns, shape.name, name, "dgx-a100", GPUS, *place(at)) for at, name in enumerate(named)
    ]
    checks = [
        (ns(share * end_s), shape.name, cause.check, symptom)
        for symptom, share in shape.new_checks
        for cause in shape.causes
        if cause.symptom == symptom and cause.check
    ]
    kinds = (Finding, Outage, Repair, NodeSeen, CheckAdded)
    rows = (findings, outages, repairs, nodes, checks)
    return Others(*map(_table, kinds, rows))


def _table(kind: type[Record], rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    types = schema(kind)
    names = ["t_ns", *(name for name in types if name != "t_ns")]
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    made = {
        name: pl.Series(name, column, types[name])
        for name, column in zip(names, columns, strict=True)
    }
    return pl.DataFrame(made).select(types.names()).sort("t_ns", maintain_order=True)
