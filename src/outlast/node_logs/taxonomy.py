"""Taxonomy of symptoms: the domains that can cause each (Table I of the reliability paper).

A symptom has many possible causes, which are narrowed by ruling out domains. The domains of a
failure are the intersection of its symptoms' domains: a collective's time-out alone may be caused
by any; together with an InfiniBand link that went down it is hardware, together with an OOM the
user. An empty intersection means at least two causes (`PossibleDomains.single` is false).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, get_args

import msgspec

from outlast.log_records import Symptom

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
TABLE: dict[Symptom, TaxonomyRow] = {
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
        symptom: row.domains for symptom, row in TABLE.items() if symptom in symptoms
    }
    remaining = frozenset(DOMAINS).intersection(*of.values())
    fewest = min((len(found) for found in of.values()), default=0)
    causes = [
        cause
        for symptom, found in of.items()
        if len(found) == fewest
        for cause in TABLE[symptom].causes
    ]
    return PossibleDomains(remaining, bool(remaining), of, tuple(dict.fromkeys(causes)))
