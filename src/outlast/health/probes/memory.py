"""/proc/meminfo, and what the memory controllers count."""

from __future__ import annotations

from pathlib import Path

from outlast.health.checks.memory import Controller, Ram
from outlast.health.probes.asking import names, number, text

KIB = 1024


def take(root: Path = Path("/")) -> Ram:
    said = dict(
        line.split(":", 1)
        for line in (text(root / "proc/meminfo") or "").splitlines()
        if ":" in line
    )
    return Ram(
        total_bytes=_kib(said.get("MemTotal")), available_bytes=_kib(said.get("MemAvailable")),
        hugepages=_first(said.get("HugePages_Total")), controllers=_controllers(root),
    )  # fmt: skip


def _first(said: str | None) -> int | None:
    words = (said or "").split()
    return int(words[0]) if words and words[0].isdecimal() else None


def _kib(said: str | None) -> int | None:
    found = _first(said)
    return None if found is None else found * KIB


def _controllers(root: Path) -> tuple[Controller, ...] | None:
    place = root / "sys/devices/system/edac/mc"
    found = [name for name in names(place) if name.startswith("mc")]
    if not found:
        return None
    return tuple(
        Controller(
            name=name, corrected=number(place / name / "ce_count"),
            uncorrected=number(place / name / "ue_count"),
        )
        for name in found
    )  # fmt: skip
