"""The kernel's log from /dev/kmsg; where that may not be read, from the journal."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from pathlib import Path

import msgspec

from outlast.health.checks.kernel import Log
from outlast.health.contract import AbsentError
from outlast.health.probes.asking import TEXT_MAX, ToolError, said, text

KMSG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECORD_MAX = 8192
LINES_MAX = 200_000
JOURNAL_MAX = 30_000  # lines; what is asked of each is some 400 bytes
FIELDS = "MESSAGE,_HOSTNAME,SYSLOG_IDENTIFIER,_TRANSPORT"
JOURNAL = [
    "journalctl", "-k", "-b", "-o", "json", f"--output-fields={FIELDS}", "--no-pager",
    "-r", "-n", str(JOURNAL_MAX),
]  # fmt: skip


class Entry(msgspec.Struct):
    """`micros`: since boot. The time of day may be set back, and new lines would seem old."""

    micros: str = msgspec.field(name="__MONOTONIC_TIMESTAMP")


def take() -> Log:
    """Raises PermissionError where neither may be read."""
    boot = text(BOOT_ID) or ""
    boot_ns = time.time_ns() - time.monotonic_ns()
    try:
        lines, source = _kmsg(), "kmsg"
        cut = bool(lines) and lines[0][0] > 0  # numbers begin at 0 with the boot
    except OSError as error:
        lines, cut = _journal(error)
        source = "journal"
    first, last = (lines[0][0], lines[-1][0]) if lines else (0, -1)
    return Log(
        boot=boot, boot_ns=boot_ns, source=source, first=first, last=last, cut=cut,
        lines=tuple(lines),
    )  # fmt: skip


def _kmsg() -> list[tuple[int, str]]:
    """Each record by its number. Lines of fields that follow a record are its own. Raises
    OSError."""
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
    """Oldest first, and whether there are older ones that were not asked for. Asked for newest
    first: what is too much for one answer is what is oldest."""
    try:
        answer = said(JOURNAL)
    except (AbsentError, ToolError) as error:
        raise PermissionError(f"{KMSG}: {before.strerror}; and {error}") from error
    found: list[tuple[int, str]] = []
    decoder = msgspec.json.Decoder(Entry)
    for line in answer.splitlines():
        try:
            found.append((int(decoder.decode(line).micros), line))
        except ValueError:
            continue  # an entry that is cut off has no time, and the reader could not place it
    if not found:  # a kernel says something in every boot: this journal is not of it
        raise PermissionError(
            f"{KMSG}: {before.strerror}; and the journal has no line of this boot"
        )
    found.reverse()
    return found, len(answer) >= TEXT_MAX or len(found) >= JOURNAL_MAX
