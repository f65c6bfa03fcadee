"""Check of the kernel's log since the last check, from /dev/kmsg or the journal."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from outlast.health.check_contract import (
    SECOND_NS,
    TEXT_MAX,
    AbsentError,
    Check,
    CounterReading,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    ToolError,
    read_text,
    run_tool,
)
from outlast.health.check_memory import key_of
from outlast.health.check_settings import CheckSettings
from outlast.log_records import SEVERITIES, Finding
from outlast.node_logs.kernel_log import findings
from outlast.node_logs.log_readings import LogClock, UnreadText, fold_storms

LINKS = {"ib-link", "ethlink"}
"""Symptoms whose recovery leaves a warning. Flaps are judged by counters: in a log every link goes
down and up while a machine boots."""


class KernelLogSample(Sample, frozen=True):
    """Lines of the kernel log.

    `lines`: each with its rising number: the kernel's sequence number, or microseconds since boot
    in a journal. `first`: oldest available number; `cut`: older lines of this boot were lost.
    `boot_ns`: time of boot, the origin of times in seconds since boot.
    """

    boot: str
    boot_ns: int
    source: str
    first: int
    last: int
    lines: tuple[tuple[int, str], ...]
    cut: bool = False


def mark(sample: KernelLogSample) -> str:
    """Return the counter key under which the last line read is remembered."""
    return f"kernel log|{sample.boot}|{sample.source}"


def counts(sample: KernelLogSample) -> Iterable[CounterReading]:
    """Yield the number of the last line as the mark for the next check."""
    if sample.lines:
        yield CounterReading(mark(sample), sample.last)


def judge(sample: KernelLogSample, about: JudgeContext) -> Iterator[Observation | Finding]:
    """Judge the lines after the mark; without one, those of the last `kernel.window_s` seconds."""
    points = about.memory.counters.get(mark(sample), ())
    after = points[-1][1] if points else None
    window_ns = round(about.settings.kernel.window_s * SECOND_NS)
    begin_ns = about.t_ns - window_ns if after is None else 0
    lost = _empty(sample, after) or _describe_lost(sample, after, begin_ns)
    if lost:
        yield Observation("unknown", lost)
    new = [line for number, line in sample.lines if after is None or number > after]
    found, unread = _read(new, sample, about, begin_ns)
    yield from found
    if unread:
        one = unread[0]
        text = f"{len(unread)} lines could not be read; the first: {one.reason}: {one.text}"
        yield Observation("unknown", text)
    if not lost and not unread and all(one.severity == "healthy" for one in found):
        yield Observation("healthy", f"no trouble in {len(new)} new lines ({sample.source})")


def _empty(sample: KernelLogSample, after: int | None) -> str:
    """Return why the log cannot be this kernel's, or "".

    Each boot logs something, and line numbers only rise.
    """
    if not sample.lines:
        return f"the kernel log ({sample.source}) has no readable line: it may not be this kernel's"
    if after is not None and sample.last < after:
        return f"the log ends at line {sample.last}, but was read to {after}: it may be another log"
    return ""


def _describe_lost(sample: KernelLogSample, after: int | None, begin_ns: int) -> str:
    """Return a message if lines were lost before they were read, or "". `after`: the mark."""
    if not sample.cut or not sample.lines:
        return ""
    if after is None:
        if _oldest_ns(sample) <= begin_ns:
            return ""
        return (
            "the log no longer holds the beginning of the period to read (--state reads only"
            " new lines; a larger log_buf_len keeps more)"
        )
    if sample.source == "kmsg":
        many = sample.first - after - 1
        return f"the kernel overwrote {many} lines before they were read" if many > 0 else ""
    more = f"more than {len(sample.lines)} new lines are in the journal: the oldest were not read"
    return more if sample.first > after else ""


def _oldest_ns(sample: KernelLogSample) -> int:
    """Return the time of the first line; a kmsg record has its own microseconds since boot."""
    number, line = sample.lines[0]
    if sample.source != "kmsg":
        return sample.boot_ns + number * 1000
    micros = line.split(",", 3)[2:3]
    return sample.boot_ns + (int(micros[0]) * 1000 if micros and micros[0].isdecimal() else 0)


def _read(
    lines: Iterable[str], sample: KernelLogSample, about: JudgeContext, begin_ns: int
) -> tuple[list[Finding], list[UnreadText]]:
    """Return the final finding per key, the worst or a recovery, and the unread lines."""
    readings = findings(
        lines,
        cluster=about.cluster,
        node=about.node,
        clock=LogClock(boot_ns=sample.boot_ns, read_ns=about.t_ns),
        policy=about.policy,
    )
    relevant: list[Finding] = []
    unread: list[UnreadText] = []
    for one in readings:
        if isinstance(one, UnreadText):
            unread.append(one)
        elif one.t_ns >= begin_ns and not _is_ignored(one, about):
            relevant.append(one)
    words = {key_of(one): one for one in relevant}  # the last of each
    worst: dict[str, Finding] = {}
    for one in fold_storms(relevant, about.settings.kernel.window_s):
        if isinstance(one, Finding) and one.severity != "healthy":
            key = key_of(one)
            worst[key] = min(worst.get(key, one), one, key=_rank)
    return [_with_recovery(worst.get(key), word) for key, word in words.items()], unread


def _rank(one: Finding) -> int:
    return SEVERITIES.index(one.severity)


def _with_recovery(worst: Finding | None, word: Finding) -> Finding:
    """Return the worst finding at the time of the last one: it has been quiet since then."""
    if worst is None:
        return word
    if word.severity != "healthy":
        return replace(worst, t_ns=word.t_ns)
    if word.symptom in LINKS:
        return replace(worst, severity="warn", detail=f"{worst.detail}; up again")
    return word


def _is_ignored(one: Finding, about: JudgeContext) -> bool:
    ignored = {*about.settings.kernel.ignore}
    if ignored & {one.check, one.code}:
        return True
    return one.symptom in LINKS and one.device in about.settings.links.ignore


def _probes(_: CheckSettings) -> Iterable[Probe[KernelLogSample]]:

    yield Probe("", take)


CHECK = Check("kernel", "other", KernelLogSample, _probes, judge, counts, lasting=True)


KMSG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECORD_MAX = 8192
LINES_MAX = 200_000
JOURNAL_MAX = 30_000  # lines; the fields requested of each take some 400 bytes
FIELDS = "MESSAGE,_HOSTNAME,SYSLOG_IDENTIFIER,_TRANSPORT"
JOURNAL = [
    "journalctl",
    "-k",
    "-b",
    "-o",
    "json",
    f"--output-fields={FIELDS}",
    "--no-pager",
    "-r",
    "-n",
    str(JOURNAL_MAX),
]


class JournalLine(msgspec.Struct):
    """Journal entry.

    `micros`: since boot. Wall-clock time may be set back, and new lines would seem old.
    """

    micros: str = msgspec.field(name="__MONOTONIC_TIMESTAMP")


def take() -> KernelLogSample:
    """Read the kernel log from kmsg, or else from the journal.

    Raises PermissionError if neither is readable.
    """
    boot = read_text(BOOT_ID) or ""
    boot_ns = time.time_ns() - time.monotonic_ns()
    try:
        lines = _kmsg()
        source = "kmsg"
        cut = bool(lines) and lines[0][0] > 0  # numbers begin at 0 with the boot
    except OSError as error:
        lines, cut = _journal(error)
        source = "journal"
    first, last = (lines[0][0], lines[-1][0]) if lines else (0, -1)
    return KernelLogSample(
        boot=boot,
        boot_ns=boot_ns,
        source=source,
        first=first,
        last=last,
        cut=cut,
        lines=tuple(lines),
    )


def _kmsg() -> list[tuple[int, str]]:
    """Return the records of kmsg by number, without their continuation lines. Raises OSError."""
    found: deque[tuple[int, str]] = deque(maxlen=LINES_MAX)  # the newest
    log = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(log, RECORD_MAX)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # it was overwritten meanwhile; the next read is of the oldest there is
            if not record:  # as of /dev/null, which containers lay over it
                raise OSError(errno.ENODEV, "is not the kernel's log")
            line = record.decode("utf-8", "replace").partition("\n")[0]
            parts = line.split(",", 2)
            if len(parts) == 3 and parts[1].isdecimal():
                found.append((int(parts[1]), line))
    finally:
        os.close(log)
    return list(found)


def _journal(before: OSError) -> tuple[list[tuple[int, str]], bool]:
    """Return the journal's lines, oldest first, and whether older ones were cut off.

    Requested newest first, so that the oldest are cut.
    """
    try:
        answer = run_tool(JOURNAL)
    except (AbsentError, ToolError) as error:
        raise PermissionError(f"{KMSG}: {before.strerror}; and {error}") from error
    found: list[tuple[int, str]] = []
    decoder = msgspec.json.Decoder(JournalLine)
    for line in answer.splitlines():
        try:
            found.append((int(decoder.decode(line).micros), line))
        except ValueError:
            continue  # an entry that is cut off has no time, and the reader could not place it
    if not found:  # every boot logs lines: the journal is not of this boot
        raise PermissionError(
            f"{KMSG}: {before.strerror}; and the journal has no line of this boot"
        )
    found.reverse()
    return found, len(answer) >= TEXT_MAX or len(found) >= JOURNAL_MAX
