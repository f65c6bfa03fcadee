"""A kernel's log, or a journal's, or the fabric manager's, read into findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, tzinfo

from outlast.log_records import Finding
from outlast.symptoms.devices import device
from outlast.symptoms.envelopes import (
    FABRIC,
    KERNEL,
    NETWORK,
    NO_WRITER,
    NOBODY,
    OBJECT,
    Envelope,
    opened,
)
from outlast.symptoms.kernel_rules import by_word, rule_of
from outlast.symptoms.nvidia_lines import WORDS, NoCodeError, Said, fabric_said, said, uuid_of
from outlast.symptoms.policy import Policy
from outlast.symptoms.stamps import Clock, UnplacedError
from outlast.symptoms.unread import Reading, Unread, cut

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
    policy: Policy | None = None,
    on_twice: Callable[[], None] = lambda: None,
) -> Iterator[Reading]:
    """Findings in the order of the lines; lines of ordinary kinds yield nothing.

    `node`: "" takes the host that a line names. `boot_ns`: for lines with seconds since boot;
    `read_ns`: when the log was read, for times without a year; `bare_ns`: where to put lines
    without a time; `zone`: for times without one; `on_twice` is called for each finding whose time
    the zone's clocks showed twice. A line that says something and cannot be placed
    is Unread.
    """
    clock = Clock(boot_ns, read_ns, bare_ns, zone, on_twice)
    words = (*WORDS, *FABRIC_WORDS, *by_word())
    uuids: dict[str, str] = {}
    seen: set[tuple[str, str, str]] = set()  # errors of switches: further lines only detail them
    split = lines.split("\n") if isinstance(lines, str) else lines
    for number, raw in enumerate(split, 1):
        line = raw.rstrip("\r\n")[: LINE_MAX if not raw.startswith(OBJECT) else None]
        if not line.startswith(OBJECT) and not any(word in line for word in words):
            continue
        try:
            envelope = opened(line)
            uuid = uuid_of(envelope.message) if envelope.speaker == KERNEL else None
            if uuid:
                uuids[uuid[0]] = uuid[1]
                continue
            found = _said(envelope, policy)
            if found is None or _only_details(found, envelope.host, seen):
                continue
            t_ns = envelope.when(clock)
        except (UnplacedError, NoCodeError) as error:
            yield Unread(number, str(error), cut(line))
            continue
        detail = cut(found.detail)
        if found.device in uuids:
            detail = f"{detail} [{uuids[found.device]}]"
        yield Finding(
            t_ns=t_ns, cluster=cluster, node=node or envelope.host, check=found.check,
            symptom=found.symptom, severity=found.severity, code=found.code, device=found.device,
            detail=detail,
        )  # fmt: skip


def _said(envelope: Envelope, policy: Policy | None) -> Said | None:
    message = envelope.message[:LINE_MAX]
    if envelope.speaker == NOBODY:
        if _said(envelope._replace(speaker=KERNEL), policy) is None:
            return None
        raise UnplacedError(NO_WRITER)
    if envelope.speaker == FABRIC:
        return fabric_said(message, envelope.level, policy)
    if envelope.speaker == KERNEL:
        if any(word in message for word in WORDS):
            return said(message, policy)
    elif envelope.speaker != NETWORK:
        return None
    ruled = rule_of(message)
    if ruled is None:
        return None
    rule, where = ruled
    return Said(rule.check, rule.symptom, rule.severity, "", device(where), message)


def _only_details(found: Said, host: str, seen: set[tuple[str, str, str]]) -> bool:
    """A switch tells an error in three lines; the second and third (its severity as a number, its
    registers) say nothing that the first did not."""
    if found.check != "kernel.sxid":
        return False
    key = (host, found.device, found.code)
    if found.detail.startswith(("Severity ", "Data {")):
        return key in seen
    seen.add(key)
    return False
