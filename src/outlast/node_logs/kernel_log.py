"""Findings from a kernel's log, a journal or the fabric manager's log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, tzinfo

from outlast.log_records import Finding
from outlast.node_logs.kernel_rules import rule_of, rules_by_word
from outlast.node_logs.log_envelopes import (
    FABRIC,
    KERNEL,
    NETWORK,
    NO_SPEAKER,
    NO_WRITER,
    OBJECT,
    LogEnvelope,
    parse_line,
)
from outlast.node_logs.log_readings import Reading, UnreadText, cut_text, device_address
from outlast.node_logs.log_timestamps import LogClock, UnplacedError
from outlast.node_logs.nvidia_lines import (
    WORDS,
    LineFinding,
    NoCodeError,
    parse_fabric_message,
    parse_kernel_message,
    uuid_of,
)
from outlast.node_logs.xid_policy import XidPolicy

LINE_MAX = 2048  # characters; the kernel writes no longer ones
FABRIC_WORDS = ("[ERROR]", "[CRITICAL]", "[FATAL]", "detected NVSwitch")


def findings(
    lines: str | Iterable[str],
    *,
    cluster: str,
    node: str,
    boot_ns: int | None = None,
    read_ns: int | None = None,
    bare_ns: int | None = None,
    zone: tzinfo = UTC,
    policy: XidPolicy | None = None,
    on_twice: Callable[[], None] = lambda: None,
) -> Iterator[Reading]:
    """Yield findings in the order of the lines; ordinary lines yield nothing.

    `node`: "" takes the host of each line. `boot_ns`: for times in seconds since boot; `read_ns`:
    when the log was read, for times without a year; `bare_ns`: for lines without a time; `zone`:
    for times without one; `on_twice` is called for each finding whose time is ambiguous in the
    zone. A relevant line without a usable time yields UnreadText.
    """
    clock = LogClock(boot_ns, read_ns, bare_ns, zone, on_twice)
    words = (*WORDS, *FABRIC_WORDS, *rules_by_word())
    uuids: dict[str, str] = {}
    reported: set[tuple[str, str, str]] = set()  # switch errors
    split = lines.split("\n") if isinstance(lines, str) else lines
    for number, raw in enumerate(split, 1):
        line = raw.rstrip("\r\n")[: LINE_MAX if not raw.startswith(OBJECT) else None]
        if not line.startswith(OBJECT) and not any(word in line for word in words):
            continue
        try:
            envelope = parse_line(line)
            uuid = uuid_of(envelope.message) if envelope.speaker == KERNEL else None
            if uuid:
                uuids[uuid[0]] = uuid[1]
                continue
            found = _line_finding(envelope, policy)
            if found is None or _only_details(found, envelope.host, reported):
                continue
            t_ns = envelope.when(clock)
        except (UnplacedError, NoCodeError) as error:
            yield UnreadText(number, str(error), cut_text(line))
            continue
        detail = cut_text(found.detail)
        if found.device in uuids:
            detail = f"{detail} [{uuids[found.device]}]"
        yield Finding(
            t_ns=t_ns, cluster=cluster, node=node or envelope.host, check=found.check,
            symptom=found.symptom, severity=found.severity, code=found.code, device=found.device,
            detail=detail,
        )  # fmt: skip


def _line_finding(envelope: LogEnvelope, policy: XidPolicy | None) -> LineFinding | None:
    message = envelope.message[:LINE_MAX]
    if envelope.speaker == NO_SPEAKER:
        if _line_finding(envelope._replace(speaker=KERNEL), policy) is None:
            return None
        raise UnplacedError(NO_WRITER)
    if envelope.speaker == FABRIC:
        return parse_fabric_message(message, envelope.level, policy)
    if envelope.speaker == KERNEL:
        if any(word in message for word in WORDS):
            return parse_kernel_message(message, policy)
    elif envelope.speaker != NETWORK:
        return None
    ruled = rule_of(message)
    if ruled is None:
        return None
    rule, where = ruled
    return LineFinding(rule.check, rule.symptom, rule.severity, "", device_address(where), message)


def _only_details(found: LineFinding, host: str, reported: set[tuple[str, str, str]]) -> bool:
    """Return whether a line only details a switch error that was found already.

    A switch logs an error in three lines; the second and third (severity as a number, registers)
    add nothing.
    """
    if found.check != "kernel.sxid":
        return False
    key = (host, found.device, found.code)
    if found.detail.startswith(("Severity ", "Data {")):
        return key in reported
    reported.add(key)
    return False
