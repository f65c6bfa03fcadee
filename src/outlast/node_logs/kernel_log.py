"""Findings from a kernel's log, a journal or the fabric manager's log, by rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import NamedTuple

from outlast.log_records import Finding, Severity, Symptom
from outlast.node_logs.log_envelopes import (
    AROUND,
    FABRIC,
    KERNEL,
    NETWORK,
    NO_SPEAKER,
    NO_WRITER,
    OBJECT,
    LogEnvelope,
    parse_line,
)
from outlast.node_logs.log_readings import (
    LogClock,
    Reading,
    UnplacedError,
    UnreadText,
    cut_text,
    device_address,
)
from outlast.node_logs.nvidia_errors import (
    WORDS,
    LineFinding,
    NoCodeError,
    XidPolicy,
    parse_fabric_message,
    parse_kernel_message,
    uuid_of,
)

Row = tuple[str, Severity, str]


class KernelRule(NamedTuple):
    """Rule for a kernel message.

    `word` occurs in each matching line, so that most lines need no pattern. The pattern's group
    `dev` is the device. The first matching rule is used.
    """

    word: str
    pattern: str
    check: str
    symptom: Symptom
    severity: Severity


def _rules(check: str, symptom: Symptom, *rows: Row) -> tuple[KernelRule, ...]:
    """Build rules.

    <DEV> in a pattern matches a device, which ends at a blank or at the next part of the pattern.
    """
    return tuple(
        KernelRule(word, pattern.replace("<DEV>", r"(?P<dev>[^\s,;]+?)"), check, symptom, severity)
        for word, severity, pattern in rows
    )


_HARD = r"^(?:mce: )?\[Hardware Error\]: "
_GHES = r"\[Hardware Error\]: event severity: "
_BUS = r"^\S+ <DEV>: (?:AER: )?PCIe Bus Error: severity="
_MESSAGE = r" error (?:message )?received(?:: | from )<DEV>(?:\s|$)"
_EXT4 = r"^EXT4-fs(?: error| warning)? \((?:device )?<DEV>\): "
_MLX = r"^mlx\d_core <DEV>:? .*"
_PORT = r"^(?P<dev>mlx\d_(?:ib|\d+)\S*?):? .*Port:? \d+ Link "
_NIC = r"(?<![\w.@-])(?P<dev>[\w.@-]{1,40}):? (?:NIC (?:\w+ )?)?Link is "
_CPU_HOT = r"^(?:mce: )?(?P<dev>CPU ?\d+): (?:Core|Package) temperature(?:/speed)? (?:is )?"

RULES: tuple[KernelRule, ...] = (
    *_rules(
        "kernel.oom", "oom",
        ("ut of memory: Kill", "warn", r"ut of memory: Kill(?:ed)? process \d+ \((?P<dev>[^)]*)\)"),
    ),
    *_rules(
        "kernel.memory", "main-memory",
        ("EDAC", "now", r"^EDAC <DEV>:.*\b\d+ UE\b"),
        ("EDAC", "warn", r"^EDAC <DEV>:.*\b\d+ CE\b"),
        ("emory failure", "now", r"^Memory failure: <DEV>: .*(?:[Kk]illing|memory corruption)"),
        ("emory failure", "drain", r"^Memory failure: <DEV>: "),
    ),
    *_rules(
        "kernel.mce", "cpu",
        ("[Hardware Error]", "now", r"CPU (?P<dev>\d+): Machine Check Exception: \w+ Bank"),
        ("[Hardware Error]", "warn", r"CPU (?P<dev>\d+): Machine Check: \w+ Bank"),
        ("[Hardware Error]", "now", r"Machine check: Processor context corrupt"),
        ("[Hardware Error]", "warn", _HARD + "Machine check events logged"),
        ("[Hardware Error]", "warn", _HARD + "(?:Corrected|Deferred) error"),
        ("[Hardware Error]", "now", _HARD + "Uncorrected"),
    ),
    *_rules(
        "kernel.ghes", "other",
        ("event severity", "warn", _GHES + "(?:corrected|info)"),
        ("event severity", "drain", _GHES + "recoverable"),
        ("event severity", "now", _GHES + "fatal"),
    ),
    *_rules(
        "kernel.aer", "pcie",
        ("PCIe Bus Error", "warn", _BUS + "Corr"),
        ("PCIe Bus Error", "drain", _BUS + ".*Non-Fatal"),
        ("PCIe Bus Error", "now", _BUS + ".*Fatal"),
        ("AER: ", "warn", r"AER: (?:Multiple )?Corr\w+" + _MESSAGE),
        ("AER: ", "drain", r"AER: (?:Multiple )?Uncorr\w+ \(Non-Fatal\)" + _MESSAGE),
        ("AER: ", "now", r"AER: (?:Multiple )?Uncorr\w+ \(Fatal\)" + _MESSAGE),
        ("DPC: ", "now", r"^\S+ <DEV>: DPC: containment event"),
        ("pciehp", "now", r"^\w+ <DEV>: pciehp: .*(?:Link Down|Card not present)"),
    ),
    *_rules(
        "kernel.ext4", "filesystem",
        ("EXT4-fs", "now", _EXT4 + "(?:Remounting filesystem read-only|previous I/O error)"),
        ("EXT4-fs error", "drain", r"^EXT4-fs error \(device <DEV>\)"),
        ("EXT4-fs warning", "warn", r"^EXT4-fs warning \(device <DEV>\)"),
    ),
    *_rules(
        "kernel.xfs", "filesystem",
        ("XFS (", "now", r"^XFS \(<DEV>\): .*(?:[Ss]hut(?:ting)? ?down|force_shutdown)"),
        ("XFS (", "drain", r"^XFS \(<DEV>\): .*(?:[Cc]orrupt|I/O error)"),
    ),
    *_rules(
        "kernel.nfs", "filesystem",
        ("nfs: server", "now", r"^nfs: server <DEV> not responding, timed out"),
        ("nfs: server", "warn", r"^nfs: server <DEV> not responding"),
        ("nfs: server", "healthy", r"^nfs: server <DEV> OK"),
    ),
    *_rules(
        "kernel.lustre", "filesystem",
        ("Lustre", "now", r"^LustreError: .*was evicted by <DEV>(?:[\s,;.]|$)"),
        ("Lustre", "warn", r"^Lustre: .*Connection to <DEV> .*was lost"),
        ("Lustre", "healthy", r"^Lustre: .*Connection restored to <DEV>(?:[\s,;]|$)"),
        ("Lustre", "warn", r"^LustreError: "),
    ),
    *_rules(
        "kernel.block", "disk",
        ("error, dev ", "now", r"(?:I/O|critical \w+) error, dev (?P<dev>[\w-]+)"),
        ("Buffer I/O error", "drain", r"^Buffer I/O error on dev(?:ice)? (?P<dev>[\w-]+)"),
    ),
    *_rules(
        "kernel.nvme", "disk",
        ("nvme", "now", r"^nvme <DEV>: .*(?:[Rr]emoving after probe failure|Disabling device)"),
        ("nvme", "now", r"^nvme <DEV>: Device not ready"),
        ("nvme", "drain", r"^nvme <DEV>: controller is down"),
        ("nvme", "warn", r"^nvme <DEV>: I/O (?:tag )?\d+.* timeout"),
        ("nvme", "drain", r"^(?P<dev>nvme\d+n\d+): I/O Cmd.*, I/O Error"),
    ),
    *_rules(
        "kernel.iblink", "ib-link",
        ("mlx", "now", r"^mlx\d_core \S+ (?P<dev>ib\w*): Link down"),
        ("mlx", "healthy", r"^mlx\d_core \S+ (?P<dev>ib\w*): Link up"),
        ("mlx", "now", _PORT + "DOWN"),
        ("mlx", "healthy", _PORT + "(?:ACTIVE|UP)"),
        ("mlx", "now", _MLX + "(?:health compromised|[Ff]atal error|assert_var|internal error)"),
        ("mlx", "warn", _MLX + "Port module event.*(?:unplugged|[Ee]rror|[Hh]igh [Tt]emp)"),
        ("carrier", "now", r"^(?P<dev>ib\w*): Lost carrier"),
        ("carrier", "healthy", r"^(?P<dev>ib\w*): Gained carrier"),
    ),
    *_rules(
        "kernel.ethlink", "ethlink",
        ("mlx", "drain", r"^mlx\d_core \S+ (?P<dev>\w+): Link down"),
        ("mlx", "healthy", r"^mlx\d_core \S+ (?P<dev>\w+): Link up"),
        ("Link is ", "drain", _NIC + "[Dd]own"),
        ("Link is ", "healthy", _NIC + "[Uu]p"),
        ("link status def", "drain", r"link status definitely down for interface (?P<dev>[^\s,]+)"),
        ("link status def", "healthy", r"link status definitely up for interface (?P<dev>[^\s,]+)"),
        ("carrier", "drain", r"^(?P<dev>\w+): Lost carrier"),
        ("carrier", "healthy", r"^(?P<dev>\w+): Gained carrier"),
        ("NETDEV WATCHDOG", "drain", r"NETDEV WATCHDOG: (?:CPU: \d+: )?<DEV> .*timed out"),
    ),
    *_rules(
        "kernel.thermal", "thermal",
        ("temperature", "warn", _CPU_HOT + "above threshold"),
        ("temperature", "healthy", _CPU_HOT + "normal"),
        ("temperature", "now", r"^thermal <DEV>: .*critical temperature reached"),
    ),
    *_rules(
        "kernel.stuck", "services",
        ("blocked for more", "warn", r"^INFO: task (?P<dev>.+?):\d+ blocked for more than \d+ sec"),
        ("soft lockup", "drain", r"BUG: soft lockup - (?P<dev>CPU#\d+) stuck"),
        ("rcu: INFO", "warn", r"^rcu: INFO: \w+ (?:self-)?detected (?:expedited )?stall"),
    ),
    *_rules(
        "kernel.crash", "services",
        ("Kernel panic", "now", r"^Kernel panic - not syncing"),
        ("BUG: ", "drain", r"^BUG: (?:unable to handle|kernel NULL pointer)"),
        ("general protection", "drain", r"^(?:Oops: )?general protection fault\b.*(?:SMP|PREEMPT)"),
    ),
    *_rules(
        "kernel.lockup", "cpu",
        ("hard LOCKUP", "now", r"Watchdog detected hard LOCKUP on cpu (?P<dev>\d+)"),
    ),
    *_rules(
        "kernel.clock", "clock",
        ("clocksource", "warn", r"[Mm]arking (?:clocksource )?'?(?P<dev>\w+)'?(?: as)? unstable"),
    ),
)  # fmt: skip
"""The first rule that matches a line counts: InfiniBand before Ethernet."""


@cache
def rules_by_word() -> dict[str, tuple[KernelRule, ...]]:
    """Return the rules by their word."""
    return {
        word: tuple(rule for rule in RULES if rule.word == word)
        for word in dict.fromkeys(rule.word for rule in RULES)
    }


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


def rule_of(message: str) -> tuple[KernelRule, str] | None:
    """Return the rule for a kernel message, and the device; None for an ordinary message."""
    for rule in _candidate_rules(message):
        found = _compiled(rule.pattern).search(message)
        if found:
            return rule, found.groupdict().get("dev") or ""
    return None


def _candidate_rules(message: str) -> Iterator[KernelRule]:
    return chain.from_iterable(rules for word, rules in rules_by_word().items() if word in message)


NO_CLOCK = LogClock()
LINE_MAX = 2048  # characters; the kernel writes no longer lines
FABRIC_WORDS = ("[ERROR]", "[CRITICAL]", "[FATAL]", "detected NVSwitch")


def findings(
    lines: str | Iterable[str],
    *,
    cluster: str,
    node: str,
    clock: LogClock = NO_CLOCK,
    policy: XidPolicy | None = None,
    on_host: Callable[[str], None] = lambda _host: None,
) -> Iterator[Reading]:
    """Yield findings in the order of the lines; ordinary lines yield nothing.

    `node`: "" uses the host of each line. A relevant line without a usable time yields UnreadText.
    `on_host`: called with the host that a finding's line names.
    """
    words = (*WORDS, *FABRIC_WORDS, *rules_by_word())
    uuids: dict[str, str] = {}
    reported: set[tuple[str, str, str]] = set()  # switch errors
    split = lines.split("\n") if isinstance(lines, str) else lines
    for number, raw in enumerate(split, 1):
        line = raw.strip(AROUND)
        line = line[: LINE_MAX if not line.startswith(OBJECT) else None]
        if not line.startswith(OBJECT) and not any(word in line for word in words):
            continue
        try:
            envelope = parse_line(line)
            uuid = uuid_of(envelope.message) if envelope.speaker == KERNEL else None
            if uuid:
                uuids[uuid[0]] = uuid[1]
                continue
            found = _line_finding(envelope, policy)
            if found is None or _is_detail(found, envelope.host, reported):
                continue
            t_ns = envelope.when(clock)
        except (UnplacedError, NoCodeError) as error:
            yield UnreadText(number, str(error), cut_text(line))
            continue
        if envelope.host:
            on_host(envelope.host)
        detail = cut_text(found.detail)
        if found.device in uuids:
            detail = f"{detail} [{uuids[found.device]}]"
        yield Finding(
            t_ns=t_ns,
            cluster=cluster,
            node=node or envelope.host,
            check=found.check,
            symptom=found.symptom,
            severity=found.severity,
            code=found.code,
            device=found.device,
            detail=detail,
        )


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


def _is_detail(found: LineFinding, host: str, reported: set[tuple[str, str, str]]) -> bool:
    """Return whether a line only details a switch error that was already found.

    A switch logs an error in three lines; the second and third (severity as a number, registers)
    are redundant.
    """
    if found.check != "kernel.sxid":
        return False
    key = (host, found.device, found.code)
    if found.detail.startswith(("Severity ", "Data {")):
        return key in reported
    reported.add(key)
    return False
