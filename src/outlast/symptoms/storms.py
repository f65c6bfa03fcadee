"""Storms of one and the same finding made one finding, with the number of times.

A GPU that goes wrong may write the same line 800,000 times. What matters is that it did, from when
to when, and how often.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice

from msgspec.structs import replace

from outlast.log_records import Finding
from outlast.symptoms.stamps import SECOND_NS, decimal_ns
from outlast.symptoms.unread import Reading

OPEN_MAX = 100_000  # kinds of findings at once; the oldest are given out first

Key = tuple[str, str, str, str, str, str, str]


@cache
def _counted() -> re.Pattern[str]:
    return re.compile(r" \{(\d{1,18}) times in (\d{1,10}(?:\.\d{1,9})?) s\}$", re.ASCII)


def times(finding: Finding) -> int:
    """For how many findings it stands."""
    found = _counted().search(finding.detail)
    return int(found[1]) if found else 1


def last_ns(finding: Finding) -> int:
    """When it was said last; `t_ns` is when it was said first. Of two that contradict each other
    (a link is down, it is up) the one with the later word is how things are."""
    found = _counted().search(finding.detail)
    return finding.t_ns + (decimal_ns(found[2]) if found else 0)


def fold(readings: Iterable[Reading], window_s: float) -> Iterator[Reading]:
    """Findings of the same node, check, code, device and severity, from the first until `window_s`
    seconds after it, as one: at the first's time, with its detail and the number of times, as in
    `GPU has fallen off the bus {27586 times in 3600 s}`.

    The sum of `times` is what it was, also for what was folded before. They come as their windows
    end, not in the order of their times; what was Unread comes at once. Memory is bounded by the
    number of different findings, not by how many there are.
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
            found[2] += times(one)
            continue
        if found:
            yield _folded(firsts.pop(key), open_.pop(key))
        elif len(open_) >= OPEN_MAX:
            for old in list(islice(open_, OPEN_MAX // 10)):
                yield _folded(firsts.pop(old), open_.pop(old))
        open_[key] = [one.t_ns, last_ns(one), times(one)]
        firsts[key] = one
    for key, found in open_.items():
        yield _folded(firsts[key], found)


def _folded(first: Finding, found: list[int]) -> Finding:
    since_ns, until_ns, many = found
    if many == 1:
        return first
    said = _counted().sub("", first.detail)
    whole_s, rest_ns = divmod(until_ns - since_ns, SECOND_NS)
    seconds = f"{whole_s}.{rest_ns:09d}".rstrip("0").rstrip(".")
    return replace(first, t_ns=since_ns, detail=f"{said} {{{many} times in {seconds} s}}")
