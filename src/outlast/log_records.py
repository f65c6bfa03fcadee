"""Typed records of a cluster's logs: jobs, findings, outages, repairs, symptoms.

Every source (a scheduler's accounting, health checks, kernel logs, tickets, the events of a run)
is read into these, and everything that is computed of a fleet is computed from them. Times are
Unix nanoseconds in UTC (`t_ns` is the one that puts an event on a day). An empty string is what a
source does not say; so is None, where a number would be one.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, get_args

import msgspec

from outlast.events import Event

JobState = Literal[
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REQUEUED",
    "REVOKED",
    "RUNNING",
    "SUSPENDED",
    "TIMEOUT",
]
JOB_STATES: tuple[JobState, ...] = get_args(JobState)

Symptom = Literal[
    "oom",
    "gpu-unavailable",
    "gpu-memory",
    "gpu-driver",
    "nvlink",
    "ib-link",
    "filesystem",
    "main-memory",
    "ethlink",
    "pcie",
    "nccl-timeout",
    "services",
    "thermal",
    "disk",
    "cpu",
    "clock",
    "other",
]
SYMPTOMS: tuple[Symptom, ...] = get_args(Symptom)

Severity = Literal[
    "now",  # the job on the node loses it
    "drain",  # the node leaves when its job has ended
    "warn",  # needs attention
    "unknown",  # no result; never counts as healthy
    "healthy",
]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # worst first


CostName = Literal["detect", "pause", "restore", "restart", "cost", "flush", "step"]
COST_NAMES: tuple[CostName, ...] = get_args(CostName)


class JobEnded(Event, frozen=True, tag="job"):
    """One attempt of a job.

    A scheduler that restarts a job under the same name has one record for each time that it held
    nodes. `t_ns`: its end; for state RUNNING, the end of the source's data.
    """

    cluster: str
    job: str  # as the scheduler shows it: 123, 123_7 of an array, 123+1 of a heterogeneous job
    attempt: int  # from 0 on, by start, among the records of the job that are known
    name: str
    user: str
    account: str
    partition: str
    qos: str
    state: JobState
    exit_code: int
    signal: int
    submit_ns: int | None
    eligible_ns: int | None
    start_ns: int | None  # None: it never held a node
    nodes: int
    gpus: int
    hosts: str  # a host list, as in node[01-04,07]
    excluded: str  # host list that the job excluded
    failed_node: str
    priority: int
    restarts: int


class Finding(Event, frozen=True, tag="finding"):
    """Finding of one check, log line or sensor about a node at one time."""

    cluster: str
    node: str
    check: str  # name of the check that reported it
    symptom: Symptom
    severity: Severity
    code: str  # XID 79, SXID 20034; "" where it has none
    device: str  # which of the node's: a PCI address, a port, a mount point
    detail: str


class Outage(Event, frozen=True, tag="outage"):
    """Time in which no job could use the node; `until_ns` is None while it lasts."""

    cluster: str
    node: str
    until_ns: int | None
    symptom: Symptom
    detail: str


class Repair(Event, frozen=True, tag="repair"):
    """A repair of a node: a `ticket`, or the exchange of a part (`swap`)."""

    cluster: str
    node: str
    kind: Literal["ticket", "swap"]
    part: str
    detail: str


class NodeSeen(Event, frozen=True, tag="node"):
    """First time at which the cluster has this node."""

    cluster: str
    node: str
    kind: str  # nodes of one kind are compared with each other
    gpus: int
    rack: str
    pod: str


class CheckAdded(Event, frozen=True, tag="check"):
    """Start of a check; its findings were invisible before."""

    cluster: str
    check: str
    symptom: Symptom


class Interruption(Event, frozen=True, tag="interruption"):
    """A failure that an attempt of a job survived, and that its end does not show."""

    cluster: str
    job: str
    attempt: int
    node: str
    cause: str  # a kind of fault
    rung: str  # of the recovery ladder
    gpus: int  # of the job
    took_node: int  # 1: its host was lost; 0: the host continued
    length_ns: int  # until every rank had committed the interrupted phase


class Cost(Event, frozen=True, tag="cost"):
    """A duration that a job measured: a recovery, a save, a flush, a step.

    `what`: the field of a scenario of `outlast plan` for it; `t_ns`: the start of the job.
    """

    cluster: str
    job: str
    attempt: int
    what: CostName
    length_ns: int
    many: int  # durations of which this is the mean


class Bandwidth(Event, frozen=True, tag="bandwidth"):
    """Bus bandwidth of a collective at one size, from one line of a benchmark's table.

    Bytes per second, with separate buffers (`bus_bytes_per_s`) and with one; None if not measured.
    """

    cluster: str
    run: str  # identity of the benchmark's run
    label: str  # of an experiment, as routing-on
    hosts: str  # a host list; "" if the run does not name them
    ranks: int
    collective: str  # all_reduce; "" if the run does not name it
    datatype: str
    redop: str
    root: int  # -1: none
    size_bytes: int
    cycle: int  # repetition of the same size in the run, from 0 on
    bus_bytes_per_s: int | None
    in_place_bytes_per_s: int | None
    wrong: int | None  # wrong values of both results; None: not validated


Record = (
    JobEnded | Finding | Outage | Repair | NodeSeen | CheckAdded | Interruption | Cost | Bandwidth
)
KINDS: tuple[type[Record], ...] = (
    JobEnded, Finding, Outage, Repair, NodeSeen, CheckAdded, Interruption, Cost, Bandwidth,
)  # fmt: skip


# Table I of the reliability paper: a symptom has many possible causes, which are narrowed by ruling
# out domains. The domains of a failure are the intersection of its symptoms' domains: a
# collective's time-out alone may be caused by any; together with an InfiniBand link that went down
# it is hardware, together with an OOM the user. An empty intersection means at least two causes.
Domain = Literal["user", "system", "hardware"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)


class TaxonomyRow(msgspec.Struct, frozen=True):
    """One symptom.

    `paper`: it is in Table I; the others follow the same reasoning.
    """

    symptom: Symptom
    title: str
    domains: frozenset[Domain]
    causes: tuple[str, ...]
    paper: bool = True


def _row(symptom: Symptom, title: str, marks: str, causes: str, paper: bool = True) -> TaxonomyRow:
    """Build a row. `marks`: the table's columns, u, s, h or - each."""
    found: frozenset[Domain] = frozenset(
        name for name, mark in zip(DOMAINS, marks, strict=True) if mark == name[0]
    )
    return TaxonomyRow(symptom, title, found, tuple(causes.split(", ")), paper)


_LINK = "electrical or material failure, switch"
TAXONOMY: dict[Symptom, TaxonomyRow] = {
    row.symptom: row
    for row in (
        _row("oom", "OOM", "u--", "bug in the user's program"),
        _row("gpu-unavailable", "GPU Unavailable", "-sh", "PCIe error, driver or BIOS, thermals"),
        _row("gpu-memory", "GPU Memory Errors", "--h",
             "thermal noise, cosmic rays, HBM defect or wear"),
        _row("gpu-driver", "GPU Driver/Firmware Error", "-s-", "outdated software, high load"),
        _row("nvlink", "GPU NVLink Error", "--h", _LINK),
        _row("ib-link", "Infiniband Link", "--h", _LINK),
        _row("filesystem", "Filesystem Mounts", "-s-",
             "failed frontend network, drivers in D state, storage backend"),
        _row("main-memory", "Main Memory Errors", "--h",
             "circuit wear, thermal noise, cosmic rays"),
        _row("ethlink", "Ethlink Errors", "--h", _LINK),
        _row("pcie", "PCIe Errors", "--h", "GPU failure, poor electrical contacts"),
        _row("nccl-timeout", "NCCL Timeout", "ush",
             "crash of the user's program, deadlock, failed hardware"),
        _row("services", "System Services", "ush",
             "interference by a user's program, software bugs, network partition"),
        _row("thermal", "Temperature", "--h", "cooling, airflow, a fan", paper=False),
        _row("disk", "Disk", "--h", "wear, a controller, a cable", paper=False),
        _row("cpu", "CPU", "-sh", "machine check, microcode, a driver that spins", paper=False),
        _row("clock", "Clock", "-sh", "clock source, time service", paper=False),
        _row("other", "Other", "ush", "not known", paper=False),
    )
}  # fmt: skip


class PossibleDomains(msgspec.Struct, frozen=True):
    """Domains that can have caused all symptoms of a failure.

    `domains`: empty with `single` false if no single domain can; all of them without symptoms.
    `of`: each symptom's own domains.
    """

    domains: frozenset[Domain]
    single: bool
    of: dict[Symptom, frozenset[Domain]]
    causes: tuple[str, ...]


def possible_domains(symptoms: Set[Symptom]) -> PossibleDomains:
    """Return the differential diagnosis of one failure's symptoms (section II-E).

    `causes`: likely causes of the symptoms with the fewest domains.
    """
    of: dict[Symptom, frozenset[Domain]] = {
        symptom: row.domains for symptom, row in TAXONOMY.items() if symptom in symptoms
    }
    remaining = frozenset(DOMAINS).intersection(*of.values())
    fewest = min((len(found) for found in of.values()), default=0)
    causes = [
        cause
        for symptom, found in of.items()
        if len(found) == fewest
        for cause in TAXONOMY[symptom].causes
    ]
    return PossibleDomains(remaining, bool(remaining), of, tuple(dict.fromkeys(causes)))


# Table II of the paper: which part the lemons of RSC-1 and RSC-2 had, as shares.
LEMON_PARTS = {
    "optics": 0.026,
    "cpu": 0.026,
    "psu": 0.051,
    "nic": 0.077,
    "eud": 0.103,
    "pcie": 0.154,
    "dimm": 0.205,
    "gpu": 0.282,
    "bios": 0.077,
}
