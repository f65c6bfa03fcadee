"""Node outages from fault traces and from `sacctmgr show event`.

    [{"node_id": "...", "event_time": 3.8955, "event_type": "fault_start",
      "fault_type": {"Level": "Hardware Failure", "Class": "GPU", "Desc": "GPU Lost"}}, ...]

`event_time` is in days since day 0.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from outlast.errors import SourceError, UsageError
from outlast.fleet.formats import log_reading, mapped_logs
from outlast.fleet.formats.column_mapping import ColumnMapping
from outlast.fleet.formats.log_reading import (
    LogReading,
    ReadTotals,
    RecordBatch,
    Reject,
    make_reject,
    read_bounded,
)
from outlast.fleet.record_tables import DAY_NS, NAMES, table
from outlast.log_records import Finding, NodeSeen, Outage, Record, Severity, Symptom

BYTES_MAX = 1 << 30
CHECK = "fault trace"
_DAYS_MAX = 36_525

# Symptoms by class and description; the first match counts.
_SYMPTOMS: tuple[tuple[str, Symptom], ...] = (
    (r"out of memory|\boom\b", "oom"),
    (r"pci|riser", "pcie"),
    (r"nvlink|p2p", "nvlink"),
    (r"ecc|double bit|single bit|row.?remap", "gpu-memory"),
    (r"gpu.*(lost|not found|unknow|unavailable|off the bus)", "gpu-unavailable"),
    (r"temperature|\bfan\b|thermal|overheat", "thermal"),
    (r"gpu.*(xid|driver)|nvidia-smi", "gpu-driver"),
    (r"parameter plane|\bnic\b|rnic|infiniband|\bib\b|optical|cable", "ib-link"),
    (r"ethernet|\beth\d*\b", "ethlink"),
    (r"file ?system|\bfs\b|mount|nfs", "filesystem"),
    (r"\bdisk|raid|nvme|ssd", "disk"),
    (r"machine check|\bcpu\b", "cpu"),
    (r"\bdimm\b|main memory|host memory", "main-memory"),
    (r"nccl|collective.*time", "nccl-timeout"),
    (r"kubelet|service|daemon|slurmd", "services"),
    (r"clock|ntp", "clock"),
)
# Planned work or tests without a job: no job was lost.
_PLANNED = re.compile(r"stress test|troubleshooting|\bchange\b|\btest\b|maintenance", re.IGNORECASE)

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class FaultKind(msgspec.Struct, frozen=True):
    """Type of a fault in a trace."""

    level: str = msgspec.field(name="Level", default="")
    klass: str = msgspec.field(name="Class", default="")
    description: str = msgspec.field(name="Desc", default="")


class _Event(msgspec.Struct, frozen=True):
    node_id: Text
    event_time: Annotated[float, msgspec.Meta(ge=-_DAYS_MAX, le=_DAYS_MAX)]
    event_type: Literal["fault_start", "fault_end"]
    fault_type: FaultKind = FaultKind()


class TracedCluster(NamedTuple):
    """Context of the cluster that such a trace does not contain.

    `nodes`: number of nodes including those that never failed; None: those in the trace.
    """

    epoch_ns: int  # day 0
    name: str = ""
    nodes: int | None = None
    gpus_per_node: int = 0


class _Open(NamedTuple):
    line: int
    t_ns: int


def symptom_of(kind: FaultKind) -> Symptom:
    """Return the symptom by words in class and description; `other` by default."""
    text = f"{kind.klass}: {kind.description}".lower()
    for words, symptom in _SYMPTOMS:
        if re.search(words, text):
            return symptom
    return "other"


def read_fault_trace(path: Path, cluster: TracedCluster) -> LogReading:
    """Read a fault trace: each fault is a Finding at its start and an Outage to its end.

    The first end of a node and type closes the oldest open start; a start without an end is an
    outage that lasts. Each node is a NodeSeen from day 0 on; nodes that never failed get generated
    names. Raises UsageError if the trace has more nodes than the cluster.
    """
    return LogReading(str(path), "faults", lambda totals: _parts(path, cluster, totals))


def _parts(path: Path, cluster: TracedCluster, totals: ReadTotals) -> Iterator[RecordBatch]:
    records: list[Record] = []
    rejects: list[Reject] = []
    source = str(path)
    nodes: dict[str, None] = {}
    waiting: dict[tuple[str, FaultKind], deque[_Open]] = {}
    for line, t_ns, event, text in _by_time(path, cluster, totals, rejects):
        if event.event_time < 0:
            totals.odd["events before day 0"] += 1
        nodes[event.node_id] = None
        open_ = waiting.setdefault((event.node_id, event.fault_type), deque())
        if event.event_type == "fault_start":
            open_.append(_Open(line, t_ns))
        elif open_:
            records += _fault(cluster, event.node_id, event.fault_type, open_.popleft().t_ns, t_ns)
            totals.skipped["ends of faults"] += 1
            totals.more += 1
        else:
            rejects.append(make_reject(source, line, "an end without a start", text))
    for (node, kind), open_faults in waiting.items():
        for fault in open_faults:
            records += _fault(cluster, node, kind, fault.t_ns, None)
            totals.odd["faults without an end: their outages last"] += 1
            totals.more += 1
    listed = _nodes_seen(path, cluster, list(nodes))
    totals.more += len(listed)
    of = {kind: [entry for entry in (*records, *listed) if type(entry) is kind] for kind in NAMES}
    yield RecordBatch(
        {NAMES[kind]: table(kind, group) for kind, group in of.items() if group}, rejects
    )


def _by_time(
    path: Path, cluster: TracedCluster, totals: ReadTotals, rejects: list[Reject]
) -> list[tuple[int, int, _Event, str]]:
    """Return the events by time, each with its place in the list; ties in file order."""
    events: list[tuple[int, int, _Event, str]] = []
    for line, raw in enumerate(_list(path), 1):
        totals.rows += 1
        text = bytes(raw).decode(errors="replace")
        try:
            event = msgspec.json.decode(raw, type=_Event)
        except (msgspec.DecodeError, RecursionError) as error:
            rejects.append(make_reject(str(path), line, str(error), text))
            continue
        t_ns = cluster.epoch_ns + round(event.event_time * DAY_NS)
        if events and t_ns < events[-1][1]:
            totals.odd["events that come after later ones"] += 1
        events.append((line, t_ns, event, text))
    return sorted(events, key=lambda entry: entry[1])


def _list(path: Path) -> list[msgspec.Raw]:
    data = read_bounded(path, BYTES_MAX, "no trace of faults is so large")
    try:
        return msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(f"{path} is no JSON list of faults: {error}") from error


def _fault(
    cluster: TracedCluster, node: str, kind: FaultKind, from_ns: int, until_ns: int | None
) -> tuple[Record, Record]:
    detail = ": ".join(filter(None, (kind.level, kind.klass, kind.description)))
    symptom = symptom_of(kind)
    severity: Severity = "drain" if _PLANNED.search(kind.klass) else "now"
    return (
        Finding(
            t_ns=from_ns,
            cluster=cluster.name,
            node=node,
            check=CHECK,
            symptom=symptom,
            severity=severity,
            code="",
            device="",
            detail=detail,
        ),
        Outage(
            t_ns=from_ns,
            cluster=cluster.name,
            node=node,
            until_ns=until_ns,
            symptom=symptom,
            detail=detail,
        ),
    )


def _nodes_seen(path: Path, cluster: TracedCluster, nodes: list[str]) -> list[NodeSeen]:
    unnamed = 0 if cluster.nodes is None else cluster.nodes - len(nodes)
    if unnamed < 0:
        raise UsageError(
            f"--nodes {cluster.nodes}: {path} alone has faults of {len(nodes)}; nothing was read"
        )
    names = [*nodes, *(f"unnamed-{number:05d}" for number in range(1, unnamed + 1))]
    return [
        NodeSeen(
            t_ns=cluster.epoch_ns,
            cluster=cluster.name,
            node=name,
            kind="",
            gpus=cluster.gpus_per_node,
            rack="",
            pod="",
        )
        for name in names
    ]


NEEDED = ("nodename", "timestart", "timeend")
COLUMNS = {
    "time": "timestart",
    "until": "timeend",
    "node": "nodename",
    "cluster": "cluster",
    "detail": "reason",
}
OF_CLUSTER = "event of the whole cluster"


def is_slurm_events(head: str) -> bool:
    """Return whether a text begins with the header of `sacctmgr show event`."""
    return set(NEEDED) <= {*_header(head)}


def read_slurm_events(path: Path, given: mapped_logs.MappedLogContext) -> LogReading:
    """Read node events as outages; one whose TimeEnd is Unknown lasts."""
    with log_reading.open_text(path) as file:
        first = file.readline(log_reading.LINE_CHARS_MAX)
    names = dict(zip(_header(first), (name.strip() for name in first.split("|")), strict=True))
    columns: dict[str, str | list[str]] = {
        ours: names[theirs] for ours, theirs in COLUMNS.items() if theirs in names
    }
    mapping = ColumnMapping(
        rows="outages", columns=columns, delimiter="|", quotes=False, constants={"symptom": "other"}
    )
    given = given._replace(passed_over=(names["nodename"], OF_CLUSTER))
    return mapped_logs.read_mapped(path, mapping, given)


def _header(head: str) -> list[str]:
    return [name.strip().lower() for name in head.partition("\n")[0].split("|")]
