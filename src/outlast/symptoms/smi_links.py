"""`nvidia-smi nvlink --status`: which links of which GPU are up, and how fast."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

import msgspec

from outlast.log_records import Finding, Severity
from outlast.symptoms.unread import Reading, Unread, cut

LINE_MAX = 400


class GpuLinks(msgspec.Struct, frozen=True):
    """`speeds`: GB/s by link; None for one that is not up."""

    index: int
    uuid: str
    speeds: dict[int, float | None]


@cache
def _gpu() -> re.Pattern[str]:
    return re.compile(r"GPU (\d{1,6}): .*?(?:\(UUID: (\S+)\))?", re.ASCII)


@cache
def _link() -> re.Pattern[str]:
    return re.compile(
        r"Link (\d{1,6}): (?:(\d{1,9}(?:\.\d{1,9})?) GB/s|<inactive>)", re.ASCII | re.IGNORECASE
    )


def links(lines: str | Iterable[str]) -> Iterator[GpuLinks | Unread]:
    """Of each GPU in turn; lines that are neither a GPU's nor a link's are unread."""
    gpu: GpuLinks | None = None
    for number, raw in enumerate(lines.split("\n") if isinstance(lines, str) else lines, 1):
        line = raw.strip()[:LINE_MAX]
        begun, link = _gpu().fullmatch(line), _link().fullmatch(line)
        if begun:
            if gpu:
                yield gpu
            gpu = GpuLinks(int(begun[1]), begun[2] or "", {})
        elif link and gpu:
            gpu.speeds[int(link[1])] = float(link[2]) if link[2] else None
        elif line:
            yield Unread(number, "neither a GPU nor one of its links", cut(line))
    if gpu:
        yield gpu


def findings(
    lines: str | Iterable[str], *, cluster: str, node: str, t_ns: int
) -> Iterator[Reading]:
    """A link that is down where others of its GPU are up loses the job; one slower than most of
    the node's only warns. A GPU that names no link at all, or none that is up, is of severity
    unknown: it may have none, and it may have lost them all."""
    found: list[GpuLinks] = []
    for one in links(lines):
        if isinstance(one, Unread):
            yield one
        else:
            found.append(one)
    speeds = Counter(s for gpu in found for s in gpu.speeds.values() if s is not None)
    usual = max(speeds, key=lambda speed: (speeds[speed], speed), default=0.0)

    def trouble(device: str, severity: Severity, detail: str) -> Finding:
        return Finding(
            t_ns=t_ns, cluster=cluster, node=node, check="nvidia-smi.nvlink", symptom="nvlink",
            severity=severity, code="", device=device, detail=detail,
        )  # fmt: skip

    if not found:
        yield trouble("", "unknown", "no GPU was named")
    for gpu in found:
        name = gpu.uuid or f"GPU {gpu.index}"
        if all(speed is None for speed in gpu.speeds.values()):
            yield trouble(name, "unknown", f"none of {len(gpu.speeds)} links is up")
            continue
        for link, speed in gpu.speeds.items():
            if speed is None:
                yield trouble(name, "now", f"link {link} is down")
            elif speed < usual:
                yield trouble(name, "warn", f"link {link} has {speed:g} GB/s of {usual:g}")
