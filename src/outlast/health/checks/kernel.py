"""The kernel's log since the last check: XIDs, machine checks, PCIe, file systems, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from outlast.health.contract import SECOND_NS, About, Check, Count, Probe, Said, Sample
from outlast.health.memory import key_of
from outlast.health.settings import Settings
from outlast.log_records import SEVERITIES, Finding
from outlast.symptoms.kernel_log import findings
from outlast.symptoms.storms import fold
from outlast.symptoms.unread import Unread

LINKS = {"ib-link", "ethlink"}
"""Of these the word that it is up again leaves a warning: whether it flaps, counters say better
than a log, which has every link go down and up while a machine boots."""


class Log(Sample, frozen=True):
    """`lines`: each with its number, which rises: the kernel's count, or microseconds since boot
    in a journal. `first`: the oldest that there still is; `cut`: there were older ones in this
    boot. `boot_ns`: when it booted, for numbers of seconds since."""

    boot: str
    boot_ns: int
    source: str
    first: int
    last: int
    lines: tuple[tuple[int, str], ...]
    cut: bool = False


def mark(sample: Log) -> str:
    return f"kernel log|{sample.boot}|{sample.source}"


def counts(sample: Log) -> Iterable[Count]:
    if sample.lines:
        yield Count(mark(sample), sample.last)


def judge(sample: Log, about: About) -> Iterator[Said | Finding]:
    """Lines after the mark; without one, those of the last `kernel.window_s` seconds."""
    points = about.memory.counters.get(mark(sample), ())
    after = points[-1][1] if points else None
    window_ns = round(about.settings.kernel.window_s * SECOND_NS)
    begin_ns = about.t_ns - window_ns if after is None else 0
    lost = _empty(sample, after) or _lost(sample, after, begin_ns)
    if lost:
        yield Said("unknown", lost)
    new = [line for number, line in sample.lines if after is None or number > after]
    found, unread = _read(new, sample, about, begin_ns)
    yield from found
    if unread:
        one = unread[0]
        text = f"{len(unread)} lines could not be read; the first: {one.reason}: {one.text}"
        yield Said("unknown", text)
    if not lost and not unread and all(one.severity == "healthy" for one in found):
        yield Said("healthy", f"nothing of trouble in {len(new)} new lines ({sample.source})")


def _empty(sample: Log, after: int | None) -> str:
    """Return why a log is not this kernel's, or nothing: one says something in every boot, and its
    numbers only rise."""
    if not sample.lines:
        return f"no line can be read from the kernel's log ({sample.source}): is it this kernel's?"
    if after is not None and sample.last < after:
        return f"the log ends at line {sample.last}, and was read to {after}: is it another one?"
    return ""


def _lost(sample: Log, after: int | None, begin_ns: int) -> str:
    """What should have been read and was not there any more, or nothing. `after`: the mark."""
    if not sample.cut or not sample.lines:
        return ""
    if after is None:
        if _oldest_ns(sample) <= begin_ns:
            return ""
        return (
            "the log does not go back as far as it should be read: it was overwritten (--state"
            " reads only what is new; a larger log_buf_len keeps more)"
        )
    if sample.source == "kmsg":
        many = sample.first - after - 1
        return f"the kernel overwrote {many} lines before they were read" if many > 0 else ""
    more = f"more than {len(sample.lines)} new lines are in the journal: the oldest were not read"
    return more if sample.first > after else ""


def _oldest_ns(sample: Log) -> int:
    """When its first line was written: a record of kmsg says the microseconds since boot itself."""
    number, line = sample.lines[0]
    if sample.source != "kmsg":
        return sample.boot_ns + number * 1000
    micros = line.split(",", 3)[2:3]
    return sample.boot_ns + (int(micros[0]) * 1000 if micros and micros[0].isdecimal() else 0)


def _read(
    lines: Iterable[str], sample: Log, about: About, begin_ns: int
) -> tuple[list[Finding], list[Unread]]:
    """The last word on each thing: its worst, or that it is well again."""
    readings = findings(
        lines, cluster=about.cluster, node=about.node, boot_ns=sample.boot_ns, read_ns=about.t_ns,
        policy=about.policy,
    )  # fmt: skip
    kept: list[Finding] = []
    unread: list[Unread] = []
    for one in readings:
        if isinstance(one, Unread):
            unread.append(one)
        elif one.t_ns >= begin_ns and not _is_ignored(one, about):
            kept.append(one)
    words = {key_of(one): one for one in kept}  # the last of each
    worst: dict[str, Finding] = {}
    for one in fold(kept, about.settings.kernel.window_s):
        if isinstance(one, Finding) and one.severity != "healthy":
            key = key_of(one)
            worst[key] = min(worst.get(key, one), one, key=_rank)
    return [_ended(worst.get(key), word) for key, word in words.items()], unread


def _rank(one: Finding) -> int:
    return SEVERITIES.index(one.severity)


def _ended(worst: Finding | None, word: Finding) -> Finding:
    """At the time of the last word: from then on it has been quiet."""
    if worst is None:
        return word
    if word.severity != "healthy":
        return replace(worst, t_ns=word.t_ns)
    if word.symptom in LINKS:
        return replace(worst, severity="warn", detail=f"{worst.detail}; up again")
    return word


def _is_ignored(one: Finding, about: About) -> bool:
    ignored = {*about.settings.kernel.ignore}
    if ignored & {one.check, one.code}:
        return True
    return one.symptom in LINKS and one.device in about.settings.links.ignore


def _probes(_: Settings) -> Iterable[Probe[Log]]:
    from outlast.health.probes.kernel import take  # judging alone needs none of this

    yield Probe("", take)


CHECK = Check("kernel", "other", Log, _probes, judge, counts, lasting=True)
