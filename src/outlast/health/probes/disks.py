"""Drives from sysfs, and from smartctl."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from outlast.health.checks.disks import Drive, Drives, Smart
from outlast.health.contract import AbsentError, Probe
from outlast.health.probes.asking import ToolError, names, number, said, text
from outlast.health.settings import Settings

BLOCK = "sys/block"
NOT_DRIVES = ("loop", "ram", "zram", "dm-", "md", "sr", "nbd", "fd", "rbd", "drbd")
SECTOR_BYTES = 512
SMART_S = 15.0
DRIVES_MAX = 256
COMMAND_LINE_BAD = 1  # bits of smartctl's exit code: the command line, and the device
NOT_OPENED = 2
REALLOCATED, PENDING = 5, 197


def take(counted: bool, root: Path = Path("/")) -> Drives:
    """Raises AbsentError where there is no drive at all, as on a node that boots from a network,
    unless the settings have them `counted`; FileNotFoundError without sysfs, which shows them."""
    place = root / BLOCK
    if not place.is_dir():
        raise FileNotFoundError(f"/{BLOCK} is not there: which drives there are cannot be told")
    found = tuple(
        Drive(
            name=name, model=text(place / name / "device/model") or "",
            size_bytes=(number(place / name / "size") or 0) * SECTOR_BYTES,
            state=text(place / name / "device/state") or "",
        )
        for name in _drives(root)
    )  # fmt: skip
    if not found and not counted:
        raise AbsentError("the kernel knows no drive, and the settings count none")
    return Drives(drives=found)


def _drives(root: Path) -> list[str]:
    place = root / BLOCK
    return [
        name
        for name in names(place)
        if not name.startswith(NOT_DRIVES)
        and (place / name / "device").exists()
        and (number(place / name / "size") or 0) > 0
    ][:DRIVES_MAX]


def smart_probes(settings: Settings, root: Path = Path("/")) -> Iterable[Probe[Smart]]:
    if not settings.disks.smart:
        yield Probe("", _not_asked)
        return
    for name in _drives(root):
        yield Probe(name, partial(smart, name), SMART_S)


def _not_asked() -> Smart:
    raise AbsentError("the settings do not ask for it (disks.smart)")


def smart(name: str) -> Smart:
    """Raises ToolError where smartctl is not there or could not open the drive: the settings ask
    for it, so that is not known."""
    try:
        answer = said(["smartctl", "-j", "-H", "-A", f"/dev/{name}"], codes=None)
    except AbsentError as error:
        raise ToolError(str(error)) from error
    return parsed(name, answer)


def parsed(name: str, answer: str) -> Smart:
    """Raises ToolError where it is no answer."""
    try:
        found = msgspec.json.decode(answer)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"smartctl's answer is no JSON: {error}") from error
    told = _Nested(found)
    status = int(told.number("smartctl", "exit_status") or 0)
    messages = told.at("smartctl", "messages")
    words = [str(each.get("string")) for each in messages or [] if isinstance(each, dict)]
    if status & (COMMAND_LINE_BAD | NOT_OPENED):
        raise ToolError("; ".join(words) or f"smartctl ended with {status}")
    passed = told.at("smart_status", "passed")
    rows = told.at("ata_smart_attributes", "table")
    raw = {
        row.get("id"): (row.get("raw") or {}).get("value")
        for row in rows or []
        if isinstance(row, dict) and isinstance(row.get("raw"), dict)
    }
    log = "nvme_smart_health_information_log"
    return Smart(
        name=name, passed=passed if isinstance(passed, bool) else None,
        critical_warning=told.count(log, "critical_warning"),
        percentage_used=told.number(log, "percentage_used"),
        available_spare=told.number(log, "available_spare"),
        media_errors=told.count(log, "media_errors"),
        temperature_c=told.number("temperature", "current"),
        reallocated=_count(raw.get(REALLOCATED)), pending=_count(raw.get(PENDING)),
        said="; ".join(words)[:300],
    )  # fmt: skip


class _Nested:
    """JSON of a tool, of whatever shape it is."""

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
