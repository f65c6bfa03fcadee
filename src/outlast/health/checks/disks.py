"""Whole drives: there, alive, and well by their own account (S.M.A.R.T.)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from outlast.health.contract import About, Check, Probe, Said, Sample
from outlast.health.settings import Settings

ALIVE = {"", "live", "running"}
HOT_C = 75
SPARE_PERCENT = 10


class Drive(Sample, frozen=True):
    """`state`: the kernel's word for the device; "" where its driver has none."""

    name: str
    model: str = ""
    size_bytes: int = 0
    state: str = ""


class Drives(Sample, frozen=True):
    drives: tuple[Drive, ...]


class Smart(Sample, frozen=True):
    """What smartctl says of one drive; None where it does not."""

    name: str
    passed: bool | None = None
    critical_warning: int | None = None
    percentage_used: float | None = None
    available_spare: float | None = None
    media_errors: int | None = None
    temperature_c: float | None = None
    reallocated: int | None = None
    pending: int | None = None
    said: str = ""


def judge(sample: Drives, about: About) -> Iterator[Said]:
    wanted = about.settings.disks
    found = []
    if wanted.count is not None and len(sample.drives) < wanted.count:
        found.append(Said("drain", f"{len(sample.drives)} drives, {wanted.count} are expected"))
    found += [
        Said("now", f"the kernel says it is {drive.state}", drive.name)
        for drive in sample.drives
        if drive.state not in ALIVE
    ]
    if not sample.drives and not found:
        found.append(Said("unknown", "the kernel knows no drive"))
    yield from found
    if not found:
        yield Said("healthy", f"{len(sample.drives)} drives, as the kernel sees them")


def judge_smart(sample: Smart, about: About) -> Iterator[Said]:
    at = sample.name
    found = []
    if sample.passed is False:
        found.append(Said("drain", "says of itself that it fails", at))
    if sample.critical_warning:
        found.append(Said("drain", f"critical warning 0x{sample.critical_warning:02x}", at))
    for what, value in (
        ("media errors", sample.media_errors), ("pending sectors", sample.pending),
    ):  # fmt: skip
        if value:
            found.append(Said("drain", f"{value} {what}", at))
    if sample.reallocated:
        found.append(Said("warn", f"{sample.reallocated} reallocated sectors", at))
    if sample.available_spare is not None and sample.available_spare < SPARE_PERCENT:
        found.append(Said("drain", f"{sample.available_spare:g} % of its spares are left", at))
    if sample.percentage_used is not None:
        most = about.settings.disks.worn_percent
        if sample.percentage_used >= most:
            found.append(Said("warn", f"worn to {sample.percentage_used:g} %", at))
    if sample.temperature_c is not None and sample.temperature_c >= HOT_C:
        found.append(Said("warn", f"{sample.temperature_c:g} C", at, symptom="thermal"))
    if sample.passed is None and not found:
        found.append(Said("unknown", f"it says nothing of its health: {sample.said}", at))
    yield from found or [Said("healthy", "well by its own account", at)]


def _probes(settings: Settings) -> Iterable[Probe[Drives]]:
    from outlast.health.probes.disks import take

    yield Probe("", partial(take, settings.disks.count is not None))


def _smart_probes(settings: Settings) -> Iterable[Probe[Smart]]:
    from outlast.health.probes.disks import smart_probes

    return smart_probes(settings)


CHECK = Check("disk", "disk", Drives, _probes, judge)
SMART = Check("smart", "disk", Smart, _smart_probes, judge_smart)
