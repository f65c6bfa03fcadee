"""Readings of node logs: findings, unread text, folded storms, device addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import islice

import msgspec
from msgspec.structs import replace

from outlast.log_records import Finding
from outlast.node_logs.log_timestamps import SECOND_NS, decimal_ns

TEXT_MAX = 400  # characters of a line that are kept


class UnreadText(msgspec.Struct, frozen=True):
    """Text that could not be interpreted.

    `line` counts from 1; 0 is the whole text.
    """

    line: int
    reason: str
    text: str


Reading = Finding | UnreadText


def cut_text(text: str) -> str:
    """Return a text cut to TEXT_MAX characters."""
    text = text.strip()
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


OPEN_MAX = 100_000  # kinds of findings at once; the oldest are yielded first

Key = tuple[str, str, str, str, str, str, str]


@cache
def _count_pattern() -> re.Pattern[str]:
    return re.compile(r" \{(\d{1,18}) times in (\d{1,10}(?:\.\d{1,9})?) s\}$", re.ASCII)


def finding_count(finding: Finding) -> int:
    """Return the number of findings that a folded one stands for."""
    found = _count_pattern().search(finding.detail)
    return int(found[1]) if found else 1


def last_ns(finding: Finding) -> int:
    """Return the time of a finding's last occurrence; `t_ns` is that of the first.

    Of two contradictory findings (a link is down, it is up) the later one holds.
    """
    found = _count_pattern().search(finding.detail)
    return finding.t_ns + (decimal_ns(found[2]) if found else 0)


def fold_storms(readings: Iterable[Reading], window_s: float) -> Iterator[Reading]:
    """Fold repeated findings within `window_s` seconds of the first into one.

    Findings with equal node, check, symptom, severity, code and device are folded. The result has
    the first one's time and detail and the number of times, as in `GPU has fallen off the bus
    {27586 times in 3600 s}`.

    The total number of times is kept, also of findings folded before. Findings are yielded when
    their windows end, not in the order of their times; UnreadText at once. Memory is bounded by the
    number of different findings.
    """
    window_ns = round(window_s * SECOND_NS)
    open_: dict[Key, list[int]] = {}  # first, last, how many
    firsts: dict[Key, Finding] = {}
    for one in readings:
        if not isinstance(one, Finding):
            yield one
            continue
        key = (one.cluster, one.node, one.check, one.symptom, one.severity, one.code, one.device)
        found = open_.get(key)
        if found and abs(one.t_ns - found[0]) <= window_ns:
            found[0], found[1] = min(found[0], one.t_ns), max(found[1], last_ns(one))
            found[2] += finding_count(one)
            continue
        if found:
            yield _folded(firsts.pop(key), open_.pop(key))
        elif len(open_) >= OPEN_MAX:
            for old in list(islice(open_, OPEN_MAX // 10)):
                yield _folded(firsts.pop(old), open_.pop(old))
        open_[key] = [one.t_ns, last_ns(one), finding_count(one)]
        firsts[key] = one
    for key, found in open_.items():
        yield _folded(firsts[key], found)


def _folded(first: Finding, found: list[int]) -> Finding:
    since_ns, until_ns, many = found
    if many == 1:
        return first
    detail = _count_pattern().sub("", first.detail)
    whole_s, rest_ns = divmod(until_ns - since_ns, SECOND_NS)
    seconds = f"{whole_s}.{rest_ns:09d}".rstrip("0").rstrip(".")
    return replace(first, t_ns=since_ns, detail=f"{detail} {{{many} times in {seconds} s}}")


@cache
def _address() -> re.Pattern[str]:
    parts = r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?"
    return re.compile(parts, re.IGNORECASE)


@lru_cache(4096)  # a storm is of few devices
def device_address(text: str) -> str:
    """Return a PCI address as 0000:3b:00.0; any other text unchanged.

    Accepts PCI:0000:3b:00, 00000000:3B:00.0 and 3b:00.0.
    """
    found = _address().fullmatch(text.strip())
    if not found:
        return text.strip()
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus.lower()}:{slot.lower()}.{function or '0'}"
