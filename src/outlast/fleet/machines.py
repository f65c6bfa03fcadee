"""What machines say of themselves (kernel logs, diagnostics, event logs), read into findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import tzinfo
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from outlast.fleet.moments import EARLIEST_S
from outlast.fleet.readings import TWICE, ZONE_ASSUMED, Part, Reading, Reject, Totals, reject
from outlast.fleet.sources import as_text, lines, unreadable, whole
from outlast.fleet.tables import table
from outlast.log_records import Finding
from outlast.symptoms import dcgm, envelopes, ipmi, kernel_log, nvidia_smi
from outlast.symptoms.policy import Policy
from outlast.symptoms.stamps import NO_BOOT
from outlast.symptoms.unread import Reading as Said

BYTES_MAX = 256 << 20  # of an answer that is read whole
_HINTS = {NO_BOOT: f"{NO_BOOT}: say it with --boot"}
NO_SHAPE = (
    "none of its first lines has the shape of a kernel's log, a journal or syslog, and no line says"
    " anything of trouble: is it such a log?"
)
NO_CLOCK = "a time before 2000: the machine's clock was not set"
NO_NODE = "it does not say which node it is of: say it with --node"
_PART = 50_000
_HEAD_LINES = 50


class Told(NamedTuple):
    """What such a log does not say of itself. `taken_ns`: when it was taken."""

    cluster: str
    node: str
    zone: tzinfo
    taken_ns: int
    boot_ns: int | None = None
    policy: Policy | None = None  # of XIDs; None: the shipped one
    zone_said: bool = True  # else it is only assumed, which is then noted


def kernel(path: Path, told: Told) -> Reading:
    """dmesg, a journal or a syslog, or the fabric manager's log, line by line."""
    twice: Counter[str] = Counter()
    return _lines(path, "kernel", lambda lines: kernel_log.findings(
        lines, cluster=told.cluster, node=told.node, boot_ns=told.boot_ns, read_ns=told.taken_ns,
        zone=told.zone, policy=told.policy, on_twice=lambda: twice.update([TWICE]),
    ), naive=None if told.zone_said else envelopes.naive, known=envelopes.known,
        odd=twice)  # fmt: skip


def sel(path: Path, told: Told) -> Reading:
    """`ipmitool sel list`, line by line."""
    return _lines(path, "ipmi", lambda lines: ipmi.findings(
        lines, cluster=told.cluster, node=told.node, zone=told.zone
    ), naive=None if told.zone_said else ipmi.naive)  # fmt: skip


def diagnosis(path: Path, told: Told) -> Reading:
    """`dcgmi diag -j`, one answer."""
    return _whole(path, "dcgm", lambda text: dcgm.findings(
        text, cluster=told.cluster, node=told.node, t_ns=told.taken_ns
    ))  # fmt: skip


def smi(path: Path, told: Told) -> Reading:
    """`nvidia-smi`, as CSV or XML, one answer."""
    return _whole(path, "nvidia-smi", lambda text: nvidia_smi.findings(
        text, cluster=told.cluster, node=told.node, t_ns=told.taken_ns, zone=told.zone
    ))  # fmt: skip


def _lines(
    path: Path, format_: str, read: Callable[[Iterable[str]], Iterator[Said]], *,
    naive: Callable[[str], bool] | None = None, known: Callable[[str], bool] | None = None,
    odd: Counter[str] | None = None,
) -> Reading:  # fmt: skip
    """Every line is a row; one that says nothing of trouble is left out. `naive`: whether a line
    has a time without a zone, where nobody said one; noted if one of the first has. `known`:
    whether a line has the shape of such a log; noted if none of the first has and none tells of
    trouble. `odd`: findings that are kept in spite of something, counted while lines are read."""

    def parts(totals: Totals) -> Iterator[Part]:
        def counted() -> Iterator[str]:
            try:
                with as_text(path) as file:
                    for line in lines(file):
                        totals.rows += 1
                        if naive and totals.rows <= _HEAD_LINES and naive(line.rstrip("\r\n")):
                            unsaid.append(totals.rows)
                        if known and totals.rows <= _HEAD_LINES and known(line.rstrip("\r\n")):
                            shaped.append(totals.rows)
                        yield line
            except (OSError, EOFError) as error:
                raise unreadable(path, error) from error

        unsaid: list[int] = []
        shaped: list[int] = []
        said = read(counted())
        told_of, done = 0, False
        while not done:
            some = list(islice(said, _PART))
            done = len(some) < _PART
            told_of += len(some)
            if done:
                totals.skipped["ordinary lines"] += totals.rows - told_of
                totals.notes += [ZONE_ASSUMED] if unsaid and told_of else []
                totals.notes += [NO_SHAPE] if known and not shaped and not told_of else []
                totals.odd += odd or Counter()
            yield _part(path, some)

    return Reading(str(path), format_, parts)


def _whole(path: Path, format_: str, read: Callable[[str], Iterator[Said]]) -> Reading:
    """Every finding is a row; an answer without any is one that is left out."""

    def parts(totals: Totals) -> Iterator[Part]:
        said = whole(path, BYTES_MAX, f"that is too much for {format_}")
        some = list(read(said.decode(errors="replace")))
        totals.rows += max(1, len(some))
        if not some:
            totals.skipped["answer in which nothing is wrong"] += 1
        yield _part(path, some)

    return Reading(str(path), format_, parts)


def _part(path: Path, said: Iterable[Said]) -> Part:
    findings: list[Finding] = []
    rejects: list[Reject] = []
    for one in said:
        if not isinstance(one, Finding):
            why = _HINTS.get(one.reason, one.reason)
            rejects.append(reject(str(path), one.line, why, one.text))
        elif one.t_ns < EARLIEST_S * 10**9:
            rejects.append(reject(str(path), 0, NO_CLOCK, one.detail))
        elif not one.node:
            rejects.append(reject(str(path), 0, NO_NODE, one.detail))
        else:
            findings.append(one)
    return Part({"findings": table(Finding, findings)}, rejects)
