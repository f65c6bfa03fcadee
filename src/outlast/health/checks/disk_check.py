"""Check of whole drives: present, alive, S.M.A.R.T."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from outlast.health.check_contract import (
    AbsentError,
    Check,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    ToolError,
    list_names,
    read_number,
    read_text,
    run_tool,
)
from outlast.health.check_settings import CheckSettings

ALIVE = {"", "live", "running"}
HOT_C = 75
SPARE_PERCENT = 10


class Drive(Sample, frozen=True):
    """A whole drive. `state`: the kernel's device state; "" if its driver reports none."""

    name: str
    model: str = ""
    size_bytes: int = 0
    state: str = ""


class DrivesSample(Sample, frozen=True):
    """Whole drives of the node."""

    drives: tuple[Drive, ...]


class SmartSample(Sample, frozen=True):
    """S.M.A.R.T. values of one drive by smartctl; None: not reported."""

    name: str
    passed: bool | None = None
    critical_warning: int | None = None
    percentage_used: float | None = None
    available_spare: float | None = None
    media_errors: int | None = None
    temperature_c: float | None = None
    reallocated: int | None = None
    pending: int | None = None
    messages: str = msgspec.field(default="", name="said")  # smartctl's


def judge(sample: DrivesSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge the number of drives and their device states."""
    wanted = about.settings.disks
    found = []
    if wanted.count is not None and len(sample.drives) < wanted.count:
        found.append(
            Observation("drain", f"{len(sample.drives)} drives, {wanted.count} are expected")
        )
    found += [
        Observation("now", f"kernel device state: {drive.state}", drive.name)
        for drive in sample.drives
        if drive.state not in ALIVE
    ]
    if not sample.drives and not found:
        found.append(Observation("unknown", "the kernel reports no drive"))
    yield from found
    if not found:
        yield Observation("healthy", f"the kernel reports {len(sample.drives)} drives")


def judge_smart(sample: SmartSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge a drive's S.M.A.R.T. values."""
    at = sample.name
    found = []
    if sample.passed is False:
        found.append(Observation("drain", "S.M.A.R.T. self-assessment: failed", at))
    if sample.critical_warning:
        found.append(Observation("drain", f"critical warning 0x{sample.critical_warning:02x}", at))
    for what, value in (("media errors", sample.media_errors), ("pending sectors", sample.pending)):
        if value:
            found.append(Observation("drain", f"{value} {what}", at))
    if sample.reallocated:
        found.append(Observation("warn", f"{sample.reallocated} reallocated sectors", at))
    if sample.available_spare is not None and sample.available_spare < SPARE_PERCENT:
        found.append(
            Observation("drain", f"{sample.available_spare:g} % of the spare blocks are left", at)
        )
    if sample.percentage_used is not None:
        most = about.settings.disks.worn_percent
        if sample.percentage_used >= most:
            found.append(Observation("warn", f"worn to {sample.percentage_used:g} %", at))
    if sample.temperature_c is not None and sample.temperature_c >= HOT_C:
        found.append(Observation("warn", f"{sample.temperature_c:g} C", at, symptom="thermal"))
    if sample.passed is None:
        found.append(Observation("unknown", f"S.M.A.R.T. reports no health: {sample.messages}", at))
    yield from found or [Observation("healthy", "S.M.A.R.T. self-assessment: passed", at)]


def _probes(settings: CheckSettings) -> Iterable[Probe[DrivesSample]]:

    yield Probe("", partial(take, settings.disks.count is not None))


def _smart_probes(settings: CheckSettings) -> Iterable[Probe[SmartSample]]:

    return smart_probes(settings)


CHECK = Check("disk", "disk", DrivesSample, _probes, judge)
SMART = Check("smart", "disk", SmartSample, _smart_probes, judge_smart)


BLOCK = "sys/block"
NOT_DRIVES = ("loop", "ram", "zram", "dm-", "md", "sr", "nbd", "fd", "rbd", "drbd")
SECTOR_BYTES = 512
SMART_S = 15.0
DRIVES_MAX = 256
COMMAND_LINE_BAD = 1  # bits of smartctl's exit code: the command line, and the device
NOT_OPENED = 2
REALLOCATED = 5
PENDING = 197


def take(counted: bool, root: Path = Path("/")) -> DrivesSample:
    """List the whole drives from sysfs.

    Raises AbsentError if there is no drive, as on a diskless node, unless the settings expect some
    (`counted`); FileNotFoundError without sysfs.
    """
    place = root / BLOCK
    if not place.is_dir():
        raise FileNotFoundError(f"/{BLOCK} does not exist: the drives are unknown")
    found = tuple(
        Drive(
            name=name,
            model=read_text(place / name / "device/model") or "",
            size_bytes=(read_number(place / name / "size") or 0) * SECTOR_BYTES,
            state=read_text(place / name / "device/state") or "",
        )
        for name in _drives(root)
    )
    if not found and not counted:
        raise AbsentError("the kernel reports no drive, and the settings expect none")
    return DrivesSample(drives=found)


def _drives(root: Path) -> list[str]:
    place = root / BLOCK
    return [
        name
        for name in list_names(place)
        if not name.startswith(NOT_DRIVES)
        and (place / name / "device").exists()
        and (read_number(place / name / "size") or 0) > 0
    ][:DRIVES_MAX]


def smart_probes(settings: CheckSettings, root: Path = Path("/")) -> Iterable[Probe[SmartSample]]:
    """Yield one probe per drive; one that reports absence if the settings disable smartctl."""
    if not settings.disks.smart:
        yield Probe("", _not_configured)
        return
    for name in _drives(root):
        yield Probe(name, partial(read_smart, name), SMART_S)


def _not_configured() -> SmartSample:
    raise AbsentError("the settings do not enable it (disks.smart)")


def read_smart(name: str) -> SmartSample:
    """Query one drive with smartctl.

    Raises ToolError if smartctl is missing or could not open the drive: the settings require it, so
    the result is unknown.
    """
    try:
        answer = run_tool(["smartctl", "-j", "-H", "-A", f"/dev/{name}"], codes=None)
    except AbsentError as error:
        raise ToolError(str(error)) from error
    return parse_smart(name, answer)


def parse_smart(name: str, answer: str) -> SmartSample:
    """Parse the JSON output of smartctl. Raises ToolError if it is no valid answer."""
    try:
        found = msgspec.json.decode(answer)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"smartctl's output is not JSON: {error}") from error
    report = _Nested(found)
    status = int(report.number("smartctl", "exit_status") or 0)
    messages = report.at("smartctl", "messages")
    words = [str(each.get("string")) for each in messages or [] if isinstance(each, dict)]
    if status & (COMMAND_LINE_BAD | NOT_OPENED):
        raise ToolError("; ".join(words) or f"smartctl ended with {status}")
    passed = report.at("smart_status", "passed")
    rows = report.at("ata_smart_attributes", "table")
    raw = {
        row.get("id"): (row.get("raw") or {}).get("value")
        for row in rows or []
        if isinstance(row, dict) and isinstance(row.get("raw"), dict)
    }
    log = "nvme_smart_health_information_log"
    return SmartSample(
        name=name,
        passed=passed if isinstance(passed, bool) else None,
        critical_warning=report.count(log, "critical_warning"),
        percentage_used=report.number(log, "percentage_used"),
        available_spare=report.number(log, "available_spare"),
        media_errors=report.count(log, "media_errors"),
        temperature_c=report.number("temperature", "current"),
        reallocated=_count(raw.get(REALLOCATED)),
        pending=_count(raw.get(PENDING)),
        messages="; ".join(words)[:300],
    )


class _Nested:
    """JSON of a tool, of any shape."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def at(self, *keys: str) -> Any:
        here = self.found
        for key in keys:
            here = here.get(key) if isinstance(here, dict) else None
        return here

    def number(self, *keys: str) -> float | None:
        value = self.at(*keys)
        return float(value) if isinstance(value, int | float) else None

    def count(self, *keys: str) -> int | None:
        return _count(self.at(*keys))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
