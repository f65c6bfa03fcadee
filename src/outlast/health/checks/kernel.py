"""The kernel's log since the last check: XIDs, machine checks, PCIe, file systems, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.health.contract import SECOND_NS, About, Check, Count, Probe, Said, Sample
from outlast.health.memory import key_of
from outlast.health.settings import Settings
from outlast.records import SEVERITIES, Finding
from outlast.symptoms.kernel_log import findings
from outlast.symptoms.storms import fold
from outlast.symptoms.unread import Unread

ENDS = {"filesystem", "thermal"}
"""Of these the word that it is well again ends it. Of links it does not: that is a flap."""


class Log(Sample, frozen=True):
    """`lines`: each with its number, which rises. `first`: the oldest that the kernel still has.
    `boot_ns`: when it booted, for numbers of seconds since."""

    boot: str
    boot_ns: int
    source: str
    first: int
    last: int
    lines: tuple[tuple[int, str], ...]


def mark(sample: Log) -> str:
    return f"kernel log|{sample.boot}|{sample.source}"


def counts(sample: Log) -> Iterable[Count]:
    yield Count(mark(sample), sample.last)


def judge(sample: Log, about: About) -> Iterator[Said | Finding]:
    """Lines after the mark; without one, those of the last `kernel.window_s` seconds."""
    points = about.memory.counters.get(mark(sample), ())
    after = points[-1][1] if points else -1
    if points and sample.first > after + 1 and sample.source == "kmsg":
        lost = sample.first - after - 1
        yield Said("unknown", f"the kernel overwrote {lost} lines before they were read")
    new = [line for number, line in sample.lines if number > after]
    begin_ns = 0 if points else about.t_ns - round(about.settings.kernel.window_s * SECOND_NS)
    found, unread = _read(new, sample, about, begin_ns)
    yield from found
    if unread:
        one = unread[0]
        text = f"{len(unread)} lines could not be read; the first: {one.reason}: {one.text}"
        yield Said("unknown", text)
    if not any(one.severity != "healthy" for one in found):
        yield Said("healthy", f"nothing of trouble in {len(new)} new lines ({sample.source})")


def _read(
    lines: Iterable[str], sample: Log, about: About, begin_ns: int
) -> tuple[list[Finding], list[Unread]]:
    """The last word on each thing: its worst, or that it is well again."""
    ignored = set(about.settings.kernel.ignore)
    last: dict[str, Finding] = {}
    unread: list[Unread] = []
    readings = findings(
        lines, cluster=about.cluster, node=about.node, boot_ns=sample.boot_ns, read_ns=about.t_ns,
        policy=about.policy,
    )  # fmt: skip
    recent = (one for one in readings if isinstance(one, Unread) or one.t_ns >= begin_ns)
    for one in fold(recent, about.settings.kernel.window_s):
        if isinstance(one, Unread):
            unread.append(one)
        elif one.check not in ignored and one.code not in ignored:
            _fold_in(last, one)
    return list(last.values()), unread


def _fold_in(last: dict[str, Finding], one: Finding) -> None:
    key = key_of(one)
    before = last.get(key)
    if one.severity == "healthy" and one.symptom not in ENDS:
        return
    ends = "healthy" in {one.severity, before.severity if before else ""}
    if before is None or (one.t_ns >= before.t_ns if ends else _worse(one, before)):
        last[key] = one


def _worse(one: Finding, before: Finding) -> bool:
    return SEVERITIES.index(one.severity) < SEVERITIES.index(before.severity)


def _probes(_: Settings) -> Iterable[Probe[Log]]:
    from outlast.health.probes.kernel import take  # judging alone needs none of this

    yield Probe("", take)


CHECK = Check("kernel", "other", Log, _probes, judge, counts, lasting=True)
