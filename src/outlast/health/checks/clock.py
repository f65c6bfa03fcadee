"""The clock: the source that the kernel trusts most, and close to the true time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.health.contract import About, Check, Probe, Said, Sample
from outlast.health.settings import Settings


class Clock(Sample, frozen=True):
    """`available`: the best first, as the kernel lists them. `synchronized`: by the kernel's own
    word; `off_s`: how far off, by the time service where it says so, else by the kernel."""

    source: str
    available: tuple[str, ...]
    synchronized: bool | None = None
    off_s: float | None = None
    error_s: float | None = None
    told_by: str = ""


def judge(sample: Clock, about: About) -> Iterator[Said]:
    wanted = about.settings.clock
    found = [*_source(sample, wanted.source)]
    if sample.synchronized is None:
        found.append(Said("unknown", "whether it is synchronized is not known"))
    elif not sample.synchronized and wanted.synchronized is not False:
        said = f"not synchronized, by the word of {sample.told_by}"
        known = wanted.synchronized is True
        detail = said if known else f"{said}: how far off it is cannot be told"
        found.append(Said("drain" if known else "unknown", detail))
    elif sample.off_s is not None and abs(sample.off_s) > wanted.skew_s:
        text = f"{sample.off_s:+.3f} s off by {sample.told_by}, at most {wanted.skew_s:g} s"
        found.append(Said("drain", text))
    yield from found
    if not found:
        off = "" if sample.off_s is None else f", {sample.off_s * 1e3:+.3f} ms off"
        yield Said("healthy", f"{sample.source or 'a source without a name'}{off}")


def _source(sample: Clock, wanted: str) -> Iterator[Said]:
    if not sample.source:
        yield Said("unknown", "the kernel does not say which source it uses")
    elif wanted and sample.source != wanted:
        yield Said("drain", f"the source is {sample.source}, and should be {wanted}")
    elif not wanted and sample.available and sample.source != sample.available[0]:
        best = sample.available[0]
        yield Said("warn", f"the source is {sample.source}, although there is {best}")


def _probes(_: Settings) -> Iterable[Probe[Clock]]:
    from outlast.health.probes.clock import take

    yield Probe("", take)


CHECK = Check("clock", "clock", Clock, _probes, judge)
