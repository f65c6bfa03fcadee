"""Main memory: as much as there should be, and what its error correction counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.health.contract import About, Check, Count, Probe, Said, Sample
from outlast.health.settings import Settings

ENOUGH = 0.98  # of what is expected: the kernel keeps some for itself
GIB = 2**30
HOUR_S = 3600.0


class Controller(Sample, frozen=True):
    """Errors since boot: corrected, and not; None: the kernel does not say."""

    name: str
    corrected: int | None
    uncorrected: int | None


class Ram(Sample, frozen=True):
    """`controllers`: None where the kernel has no driver for them."""

    total_bytes: int | None
    available_bytes: int | None
    hugepages: int | None
    controllers: tuple[Controller, ...] | None


def counts(sample: Ram) -> Iterable[Count]:
    for one in sample.controllers or ():
        for what, value in (("corrected", one.corrected), ("uncorrected", one.uncorrected)):
            if value is not None:
                yield Count(f"memory|{one.name}|{what}", value)


def judge(sample: Ram, about: About) -> Iterator[Said]:
    wanted = about.settings.memory
    found = [*_sizes(sample, about)]
    for one in sample.controllers or ():
        if one.corrected is None or one.uncorrected is None:
            found.append(Said("unknown", "its error counters cannot be read", one.name))
        if one.corrected is not None:
            new = about.since(Count(f"memory|{one.name}|corrected", one.corrected), HOUR_S)
            if new is not None and new > wanted.corrected_per_hour:
                found.append(Said("drain", f"{new} corrected errors within the hour", one.name))
        if one.uncorrected:
            text = f"{one.uncorrected} uncorrected errors since boot"
            found.append(Said("now", text, one.name))
    yield from found
    if not found:
        ecc = "no errors" if sample.controllers else "error counters are not there"
        yield Said("healthy", f"{(sample.total_bytes or 0) / GIB:.0f} GiB, {ecc}")


def _sizes(sample: Ram, about: About) -> Iterator[Said]:
    wanted = about.settings.memory
    if sample.total_bytes is None or sample.total_bytes <= 0:
        yield Said("unknown", "the kernel does not say how much memory there is")
        return
    total = sample.total_bytes / GIB
    if wanted.total_gib is not None and total < ENOUGH * wanted.total_gib:
        yield Said("drain", f"{total:.1f} GiB, and {wanted.total_gib:g} are expected")
    if wanted.hugepages is not None and (sample.hugepages or 0) < wanted.hugepages:
        yield Said("drain", f"{sample.hugepages or 0} huge pages of {wanted.hugepages}")
    if wanted.available_percent and sample.available_bytes is None:
        yield Said("unknown", "the kernel does not say how much memory is available")
    elif wanted.available_percent and sample.available_bytes is not None:
        percent = 100 * sample.available_bytes / max(sample.total_bytes, 1)
        if percent < wanted.available_percent:
            least = wanted.available_percent
            yield Said("warn", f"{percent:.1f} % available, at least {least:g} % is expected")


def _probes(_: Settings) -> Iterable[Probe[Ram]]:
    from outlast.health.probes.memory import take

    yield Probe("", take)


CHECK = Check("memory", "main-memory", Ram, _probes, judge, counts)
