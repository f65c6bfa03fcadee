"""`nvidia-smi --query-gpu=... --format=csv`, `nvidia-smi -q -x`, read into samples and
findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, tzinfo
from functools import cache
from typing import NamedTuple

from outlast.log_records import Finding, Symptom
from outlast.symptoms import gpu_samples
from outlast.symptoms.gpu_samples import GpuSample, Limits
from outlast.symptoms.smi_fields import COLUMNS, sample
from outlast.symptoms.smi_xml import xml_samples
from outlast.symptoms.stamps import Clock, UnplacedError, iso
from outlast.symptoms.unread import Reading, Unread, cut

TEXT_MAX = 64 << 20  # characters
FAILURES: dict[str, Symptom] = {
    "Unable to determine the device handle": "gpu-unavailable",
    "No devices were found": "gpu-unavailable",
    "GPU is lost": "gpu-unavailable",
    "couldn't communicate with the NVIDIA driver": "gpu-driver",
    "Failed to initialize NVML": "gpu-driver",
    "Driver/library version mismatch": "gpu-driver",
}


class Taken(NamedTuple):
    """What was read: one sample for each GPU, what failed as a whole, and what was unread."""

    samples: list[GpuSample]
    failures: list[tuple[Symptom, str]]
    unread: list[Unread]


def taken(text: str, *, t_ns: int, zone: tzinfo = UTC) -> Taken:
    """Either form, known by its beginning. `t_ns`: when it was taken, for samples that do not say
    so themselves; `zone`: that of their own times."""
    if len(text) > TEXT_MAX:
        return Taken([], [], [Unread(0, f"longer than {TEXT_MAX:,} characters", "")])
    before, root, _ = text.partition("<nvidia_smi_log")
    if not root:
        return _csv(text, t_ns, zone)
    failures = [failure for failure in map(_failure, before.split("\n")) if failure]
    samples, unread = xml_samples(text, t_ns, zone)
    return Taken(samples, failures, unread)


def findings(
    text: str,
    *,
    cluster: str,
    node: str,
    t_ns: int,
    zone: tzinfo = UTC,
    limits: Limits | None = None,
) -> Iterator[Reading]:
    """What is beyond the limits, and a finding of severity unknown where no GPU could be read."""
    got = taken(text, t_ns=t_ns, zone=zone)
    yield from got.unread

    def whole(symptom: Symptom, now: bool, detail: str) -> Finding:
        return Finding(
            t_ns=t_ns, cluster=cluster, node=node, check="nvidia-smi", symptom=symptom,
            severity="now" if now else "unknown", code="", device="", detail=detail,
        )  # fmt: skip

    for symptom, line in got.failures:
        yield whole(symptom, True, line)
    if not got.samples and not got.failures:
        yield whole("gpu-unavailable", False, "no GPU could be read")
    yield from gpu_samples.findings(
        got.samples, cluster=cluster, node=node, t_ns=t_ns, limits=limits or Limits()
    )


def _failure(line: str) -> tuple[Symptom, str] | None:
    """What nvidia-smi says in place of an answer."""
    for words, symptom in FAILURES.items():
        if words in line:
            return symptom, cut(line)
    return None


def _csv(text: str, t_ns: int, zone: tzinfo) -> Taken:
    samples: list[GpuSample] = []
    failures: list[tuple[Symptom, str]] = []
    unread: list[Unread] = []
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        failure = _failure(line)
        if failure and len(cells) != len(header):
            failures.append(failure)
            continue
        names = [cell.partition(" [")[0] for cell in cells]
        if any(name in COLUMNS for name in names) or names[0] == "timestamp":
            header = names
        elif not header:
            unread.append(Unread(number, "no header before it", cut(line)))
        elif len(cells) != len(header):
            reason = f"{len(cells)} values for {len(header)} columns"
            unread.append(Unread(number, reason, cut(line)))
        else:
            said = dict(zip(header, cells, strict=True))
            at_ns = _time(said.pop("timestamp", ""), t_ns, zone)
            samples.append(sample(said, COLUMNS, at_ns, {}))
    return Taken(samples, failures, unread)


@cache
def _when() -> re.Pattern[str]:
    return re.compile(r"(\d{4})/(\d\d)/(\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)", re.ASCII)


def _time(text: str, t_ns: int, zone: tzinfo) -> int:
    """Its own time; where it says none that can be, when it was taken."""
    found = _when().fullmatch(text)
    if not found:
        return t_ns
    try:
        return iso("-".join(found.group(1, 2, 3)), found[4], None, Clock(zone=zone))
    except UnplacedError:
        return t_ns
