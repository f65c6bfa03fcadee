"""The kernel's log from /dev/kmsg; where that may not be read, from the journal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from outlast.health.checks.kernel import Log
from outlast.health.contract import AbsentError
from outlast.health.probes.asking import ToolError, said, text

KMSG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RECORD_MAX = 8192
LINES_MAX = 200_000
JOURNAL = ["journalctl", "-k", "-b", "-o", "json", "--no-pager", "-n", "50000"]


class Entry(msgspec.Struct):
    micros: str = msgspec.field(name="__REALTIME_TIMESTAMP")


def take() -> Log:
    """Raises PermissionError where neither may be read."""
    boot = text(BOOT_ID) or ""
    boot_ns = time.time_ns() - time.monotonic_ns()
    try:
        lines, source = _kmsg(), "kmsg"
    except OSError as error:
        lines, source = _journal(error), "journal"
    first, last = (lines[0][0], lines[-1][0]) if lines else (0, -1)
    return Log(
        boot=boot, boot_ns=boot_ns, source=source, first=first, last=last, lines=tuple(lines)
    )


def _kmsg() -> list[tuple[int, str]]:
    """Each record by its number. Lines of fields that follow a record are its own. Raises
    OSError."""
    found: list[tuple[int, str]] = []
    log = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while len(found) < LINES_MAX:
            try:
                record = os.read(log, RECORD_MAX)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # it was overwritten meanwhile; the next read is of the oldest there is
            line = record.decode("utf-8", "replace").partition("\n")[0]
            parts = line.split(",", 2)
            if len(parts) == 3 and parts[1].isdecimal():
                found.append((int(parts[1]), line))
    finally:
        os.close(log)
    return found


def _journal(before: OSError) -> list[tuple[int, str]]:
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
    return found
