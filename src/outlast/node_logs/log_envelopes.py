"""Envelopes of log lines: time, host, speaker, message.

Formats: `dmesg` with seconds since boot, `dmesg -T`, `dmesg --time-format iso`, with or without
`-x` or a priority; /dev/kmsg; `journalctl -o short`, `short-precise`, `short-iso`, `short-full`,
`short-unix`, `short-monotonic` and `json`; syslog files in the traditional format or by RFC 5424;
the log of NVIDIA's fabric manager; and bare messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import msgspec

from outlast.node_logs.log_readings import (
    LogClock,
    UnplacedError,
    checked_ns,
    decimal_ns,
    iso_ns,
    local_ns,
    month_number,
    since_boot_ns,
    yearless_ns,
)

AROUND = "\0\x1e\r\n"  # a crash leaves NULs before a line, `journalctl -o json-seq` an RS
OBJECT = ('{"', '{ "')  # start of a JSON entry; {1}[Hardware Error] is a kernel line
KERNEL = "kernel"
FABRIC = "fabricmanager"
NETWORK = "networkd"
NO_SPEAKER = ""  # an entry without a program
NO_ENTRY = "a JSON object that is no entry of a journal: name its columns with --mapping"
NO_WRITER = "the line does not name its writer: run journalctl without --output-fields"
LEFT_OUT = "a message that journalctl left out as too long: run it with --all"


class LogEnvelope(NamedTuple):
    """Parts of a log line.

    `when` parses the time on demand and raises UnplacedError. `speaker`: KERNEL, FABRIC, NETWORK,
    NO_SPEAKER, or the name of another program, which is ignored. `level`: of the fabric manager.
    """

    when: Callable[[LogClock], int]
    speaker: str
    message: str
    host: str = ""
    level: str = ""


class JournaldEntry(msgspec.Struct):
    """Entry of `journalctl -o json`.

    A message that is not UTF-8 is a list of its bytes; one that is too long is null.
    """

    message: str | list[int] | None = msgspec.field(name="MESSAGE", default=None)
    micros: str | int | None = msgspec.field(name="__REALTIME_TIMESTAMP", default=None)
    host: str = msgspec.field(name="_HOSTNAME", default="")
    program: str | list[str] = msgspec.field(name="SYSLOG_IDENTIFIER", default="")
    transport: str = msgspec.field(name="_TRANSPORT", default="")


_CLOCK = r"\d\d:\d\d:\d\d"
_HOST_AND_MESSAGE = r"(?P<host>\S+) (?P<speaker>[^\s\[\]:]+)(?:\[\d+\])?: ?(?P<message>.*)"
_LEVEL = r"(?:<\d{1,3}>|\w+ *:\w+ *: ?)?"
_CALLER = r"(?:\[ *[TC]\d+\] ?)?"
_DELTA = r"(?: <[ \d.]+>)?"  # since the last line, by `dmesg --show-delta`
SHAPES: dict[str, str] = {
    "kmsg": r"\d{1,4},\d+,(?P<micros>\d{1,18}),[^;]*;(?P<message>.*)",
    "monotonic": r"\[ *(?P<s>\d+\.\d+)\] (?P<host>[^\s:\[\]]+) "
    r"(?P<speaker>kernel(?=:)|[^\s\[\]:]+(?=\[\d+\]:))(?:\[\d+\])?: ?(?P<message>.*)",
    "boot": _LEVEL + rf"\[ *(?P<s>\d+\.\d+){_DELTA}\] ?" + _CALLER + r"(?P<message>.*)",
    "ctime": _LEVEL
    + rf"\[\w{{3}} (?P<m>\w{{3}}) +(?P<d>\d\d?) (?P<t>{_CLOCK}) (?P<y>\d{{4}}){_DELTA}\] ?"
    + _CALLER
    + r"(?P<message>.*)",
    "dmesg-iso": _LEVEL + rf"(?P<day>\d{{4}}-\d\d-\d\d)T(?P<t>{_CLOCK},\d+)"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)? ?" + _CALLER + r"(?P<message>.*)",
    "iso": rf"(?P<day>\d{{4}}-\d\d-\d\d)[T ](?P<t>{_CLOCK}(?:\.\d+)?)"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)? " + _HOST_AND_MESSAGE,
    "rfc5424": rf"<\d{{1,3}}>1 (?P<day>\d{{4}}-\d\d-\d\d)T(?P<t>{_CLOCK}(?:\.\d+)?)"
    r"(?P<zone>Z|[+-]\d\d:\d\d) (?P<host>\S+) (?P<speaker>\S+) \S+ \S+ "
    r"(?:-|(?:\[(?:[^\]\\]|\\.)*\])+)(?: (?P<message>.*))?",
    "full": rf"\w{{3}} (?P<day>\d{{4}}-\d\d-\d\d) (?P<t>{_CLOCK}(?:\.\d+)?) (?P<zone>\S+) "
    + _HOST_AND_MESSAGE,
    "unix": r"(?P<s>\d{9,11}\.\d+) " + _HOST_AND_MESSAGE,
    "short": rf"(?P<m>[A-Z][a-z]{{2}}) +(?P<d>\d\d?) (?P<t>{_CLOCK}(?:\.\d+)?) "
    + _HOST_AND_MESSAGE,
    "fabric": rf"\[(?P<m>\w{{3}}) +(?P<d>\d\d?) (?P<y>\d{{4}}) (?P<t>{_CLOCK})\] "
    r"\[(?P<level>\w+)\] (?:\[tid \d+\] )?(?P<message>.*)",
}
# Seconds since boot, and the caller, that syslog repeats before the message.
WITHIN = r"\[ *\d+\.\d+\] ?" + _CALLER
REPEATED = r"message repeated \d+ times: \[ ?(?P<message>.*)\]"  # by rsyslog
# Times of `dmesg -H` and `--time-format delta`, from which no time follows.
_RELATIVE = r"\[(?: *\+\d+\.\d+|<[ \d.]+>|[A-Z][a-z]{2} ?\d+ \d\d:\d\d|\.\.\.)\] ?"


@cache
def _shape(name: str) -> re.Pattern[str]:
    return re.compile(SHAPES[name], re.ASCII)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


@cache
def _journal() -> msgspec.json.Decoder[JournaldEntry]:
    return msgspec.json.Decoder(JournaldEntry, strict=False)


def parse_line(line: str) -> LogEnvelope:
    """Parse a line; a line of unknown format is a kernel message without a time.

    Raises UnplacedError for an invalid journal entry.
    """
    if line.startswith(OBJECT):
        return _of_journal(line)
    for name, take in TAKES.items():
        found = _shape(name).fullmatch(line)
        if found:
            return take(found)
    return LogEnvelope(_bare, KERNEL, _strip_relative(line))


def _strip_relative(line: str) -> str:
    found = _compiled(_RELATIVE).match(line)
    return line[found.end() :] if found else line


def lacks_zone(line: str) -> bool:
    """Return whether a line has a time of day without a zone."""
    line = line.strip(AROUND)
    if line.startswith(OBJECT):
        return False
    for name in TAKES:
        if found := _shape(name).fullmatch(line):
            parts = found.groupdict()
            return name not in ("monotonic", "boot", "kmsg", "unix") and not parts.get("zone")
    return False


def has_known_time(line: str) -> bool:
    """Return whether a line's time has a known format.

    A file without any such line is no log of these formats.
    """
    line = line.strip(AROUND)
    if line.startswith(OBJECT):
        try:
            return _of_journal(line).when is not _bare
        except UnplacedError:
            return False
    return any(_shape(name).fullmatch(line) for name in TAKES)


def _bare(clock: LogClock) -> int:
    if clock.bare_ns is None:
        raise UnplacedError("no time on the line")
    return checked_ns(clock.bare_ns)


def _of_journal(line: str) -> LogEnvelope:
    try:
        found = _journal().decode(line)
        message = found.message
        if isinstance(message, list):
            message = bytes(message).decode("utf-8", "replace")
        micros = None if found.micros is None else int(found.micros)
    except (ValueError, RecursionError) as error:  # no JSON, other types, no bytes, no number
        raise UnplacedError(f"no entry of a journal: {error}") from error
    if micros is None and message is None:
        raise UnplacedError(NO_ENTRY)
    programs = found.program if isinstance(found.program, list) else [found.program]
    speaker = KERNEL if found.transport == "kernel" else _speaker(programs[0] if programs else "")
    if found.transport not in {"", "kernel"} and speaker in (KERNEL, NO_SPEAKER):
        speaker = "another"  # a program that claims to be the kernel
    if speaker == KERNEL and message is None:
        raise UnplacedError(LEFT_OUT)
    when = _bare if micros is None else lambda _: checked_ns(micros * 1000)
    return _unwrap(LogEnvelope(when, speaker, message or "", found.host))


def _speaker(program: str) -> str:
    if program == KERNEL or FABRIC not in program:
        return NETWORK if program == "systemd-networkd" else program
    return FABRIC


def _unwrap(outer: LogEnvelope) -> LogEnvelope:
    """Strip what a relay or a program's own log puts around the message.

    RFC 5424 allows a byte order mark before it; rsyslog writes a second blank there.
    """
    message = outer.message.lstrip("\ufeff ")
    if repeated := _compiled(REPEATED).fullmatch(message):
        message = repeated["message"]
    if outer.speaker == FABRIC:
        found = _shape("fabric").fullmatch(message)
        return outer._replace(message=found["message"], level=found["level"]) if found else outer
    found = _compiled(WITHIN).match(message)
    return outer._replace(message=message[found.end() :] if found else message)


def _relayed(found: re.Match[str], when: Callable[[LogClock], int]) -> LogEnvelope:
    speaker = _speaker(found["speaker"])
    return _unwrap(LogEnvelope(when, speaker, found["message"] or "", found["host"]))


def _kmsg(found: re.Match[str]) -> LogEnvelope:
    return LogEnvelope(
        lambda c: since_boot_ns(int(found["micros"]) * 1000, c), KERNEL, found["message"]
    )


def _boot(found: re.Match[str]) -> LogEnvelope:
    return LogEnvelope(lambda c: since_boot_ns(decimal_ns(found["s"]), c), KERNEL, found["message"])


def _monotonic(found: re.Match[str]) -> LogEnvelope:
    return _relayed(found, lambda c: since_boot_ns(decimal_ns(found["s"]), c))


def _dated(found: re.Match[str], clock: LogClock) -> int:
    return local_ns((int(found["y"]), month_number(found["m"]), int(found["d"])), found["t"], clock)


def _ctime(found: re.Match[str]) -> LogEnvelope:
    return LogEnvelope(lambda c: _dated(found, c), KERNEL, found["message"])


def _fabric(found: re.Match[str]) -> LogEnvelope:
    level = found["level"]
    return LogEnvelope(lambda c: _dated(found, c), FABRIC, found["message"], level=level)


def _iso_of(found: re.Match[str], clock: LogClock) -> int:
    return iso_ns(found["day"], found["t"], found["zone"], clock)


def _dmesg_iso(found: re.Match[str]) -> LogEnvelope:
    return LogEnvelope(lambda c: _iso_of(found, c), KERNEL, found["message"])


def _iso(found: re.Match[str]) -> LogEnvelope:
    return _relayed(found, lambda c: _iso_of(found, c))


def _unix(found: re.Match[str]) -> LogEnvelope:
    return _relayed(found, lambda _: checked_ns(decimal_ns(found["s"])))


def _short(found: re.Match[str]) -> LogEnvelope:
    return _relayed(found, lambda c: yearless_ns(found["m"], found["d"], found["t"], c))


TAKES: dict[str, Callable[[re.Match[str]], LogEnvelope]] = {
    "monotonic": _monotonic,
    "boot": _boot,
    "kmsg": _kmsg,
    "rfc5424": _iso,
    "ctime": _ctime,
    "dmesg-iso": _dmesg_iso,
    "iso": _iso,
    "short": _short,
    "full": _iso,
    "unix": _unix,
    "fabric": _fabric,
}
