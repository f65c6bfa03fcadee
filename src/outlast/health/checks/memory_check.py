"""Check of main memory: its size, and the counters of its error correction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from outlast.health.check_contract import (
    Check,
    CounterReading,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    list_names,
    read_number,
    read_text,
)
from outlast.health.check_settings import CheckSettings

ENOUGH = 0.98  # share of the expected memory: the kernel reserves some
GIB = 2**30
HOUR_S = 3600.0


class MemoryController(Sample, frozen=True):
    """Error counts of a memory controller since boot; None: not reported."""

    name: str
    corrected: int | None
    uncorrected: int | None


class MemorySample(Sample, frozen=True):
    """Main memory. `controllers`: None if the kernel has no driver for them."""

    total_bytes: int | None
    available_bytes: int | None
    hugepages: int | None
    controllers: tuple[MemoryController, ...] | None


def counts(sample: MemorySample) -> Iterable[CounterReading]:
    """Yield the error counters of each memory controller."""
    for one in sample.controllers or ():
        for what, value in (("corrected", one.corrected), ("uncorrected", one.uncorrected)):
            if value is not None:
                yield CounterReading(f"memory|{one.name}|{what}", value)


def judge(sample: MemorySample, about: JudgeContext) -> Iterator[Observation]:
    """Judge the memory's size, huge pages and errors."""
    wanted = about.settings.memory
    found = [*_sizes(sample, about)]
    for one in sample.controllers or ():
        if one.corrected is None or one.uncorrected is None:
            found.append(Observation("unknown", "its error counters cannot be read", one.name))
        if one.corrected is not None:
            new = about.since(CounterReading(f"memory|{one.name}|corrected", one.corrected), HOUR_S)
            if new is not None and new > wanted.corrected_per_hour:
                found.append(
                    Observation("drain", f"{new} corrected errors in the last hour", one.name)
                )
        if one.uncorrected:
            text = f"{one.uncorrected} uncorrected errors since boot"
            found.append(Observation("now", text, one.name))
    yield from found
    if not found:
        ecc = "no errors" if sample.controllers else "no error counters"
        yield Observation("healthy", f"{(sample.total_bytes or 0) / GIB:.0f} GiB, {ecc}")


def _sizes(sample: MemorySample, about: JudgeContext) -> Iterator[Observation]:
    wanted = about.settings.memory
    if sample.total_bytes is None or sample.total_bytes <= 0:
        yield Observation("unknown", "the kernel does not report the size of the memory")
        return
    total = sample.total_bytes / GIB
    if wanted.total_gib is not None and total < ENOUGH * wanted.total_gib:
        yield Observation("drain", f"{total:.1f} GiB; {wanted.total_gib:g} are expected")
    if wanted.hugepages is not None and (sample.hugepages or 0) < wanted.hugepages:
        yield Observation("drain", f"{sample.hugepages or 0} of {wanted.hugepages} huge pages")
    if wanted.available_percent and sample.available_bytes is None:
        yield Observation("unknown", "the kernel does not report the available memory")
    elif wanted.available_percent and sample.available_bytes is not None:
        percent = 100 * sample.available_bytes / max(sample.total_bytes, 1)
        if percent < wanted.available_percent:
            least = wanted.available_percent
            yield Observation(
                "warn", f"{percent:.1f} % available, at least {least:g} % is expected"
            )


def _probes(_: CheckSettings) -> Iterable[Probe[MemorySample]]:

    yield Probe("", take)


CHECK = Check("memory", "main-memory", MemorySample, _probes, judge, counts)


KIB = 1024


def take(root: Path = Path("/")) -> MemorySample:
    """Read the memory's sizes from meminfo and its error counters from EDAC."""
    fields = dict(
        line.split(":", 1)
        for line in (read_text(root / "proc/meminfo") or "").splitlines()
        if ":" in line
    )
    return MemorySample(
        total_bytes=_kib(fields.get("MemTotal")),
        available_bytes=_kib(fields.get("MemAvailable")),
        hugepages=_first_number(fields.get("HugePages_Total")),
        controllers=_controllers(root),
    )


def _first_number(text: str | None) -> int | None:
    words = (text or "").split()
    return int(words[0]) if words and words[0].isdecimal() else None


def _kib(text: str | None) -> int | None:
    found = _first_number(text)
    return None if found is None else found * KIB


def _controllers(root: Path) -> tuple[MemoryController, ...] | None:
    place = root / "sys/devices/system/edac/mc"
    found = [name for name in list_names(place) if name.startswith("mc")]
    if not found:
        return None
    return tuple(
        MemoryController(
            name=name,
            corrected=read_number(place / name / "ce_count"),
            uncorrected=read_number(place / name / "ue_count"),
        )
        for name in found
    )
