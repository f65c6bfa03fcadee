"""Lines that have too few or too many fields, put together where only one way of it makes sense.

A line break or a delimiter can only stand in a field that is free text, and what surrounds it must
look like what its columns hold. Where two ways fit, none is taken: the lines are said to be torn.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from outlast.fleet.sacct import values
from outlast.fleet.sacct.header import Header

LINES_MAX = 1000  # of one record
EXTRA_MAX = 30  # delimiters in the fields of one record
WAYS_MAX = 1000  # that delimiters can be shared out among free columns

SHORT = "too few fields"
LONG = "too many fields: a delimiter stands in one, and in which cannot be told"
MESSAGE = "a message of sacct"

_STATE = "|".join(sorted(values.STATES, key=len, reverse=True))
_SHAPES: dict[str, re.Pattern[str]] = {
    name: re.compile(shape)
    for names, shape in (
        ("jobid jobidraw", r"\d+(_(\d+|\[[^\]]*\]?))?(\+\d+)?(\.\w+)?"),
        ("state", rf"({_STATE})( by \d+)?|[A-Z_]+\+"),
        (
            "start end submit eligible",
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*|\d{9,11}|Unknown|None|N/A",
        ),
        ("elapsed cputime totalcpu suspended", r"[-\d:.]+"),
        ("elapsedraw nnodes allocnodes ncpus alloccpus restarts cputimeraw", r"\d+"),
        ("uid gid timelimitraw reqcpus priority", r"\d*|UNLIMITED|Partition_Limit"),
        ("exitcode", r"\d+:\d+"),
        ("derivedexitcode", r"(\d+:\d+)?"),
        ("alloctres reqtres", r"([\w/:.-]+=[^,|]*(,|$))*"),
    )
    for name in names.split()
}


class Line(NamedTuple):
    number: int
    text: str


class Torn(NamedTuple):
    """A line that belongs to no record that could be told."""

    number: int
    reason: str
    text: str


class Mended(NamedTuple):
    """`rest`: lines that go on with the last field of the record before; `records`: the fields of
    each that was put together, and the number of its first line; blank lines are nowhere."""

    rest: list[str]
    records: list[tuple[int, list[str]]]
    torn: list[Torn]


def mended(
    lines: Sequence[Line], separator: str, delimiter: str, header: Header, *, after_record: bool
) -> Mended:
    """What a run of lines of wrong width comes to. `separator` stands in them for `delimiter`."""
    records: list[tuple[int, list[str]]] = []
    torn: list[Torn] = []
    at = _tail(lines, 0, separator, header) if after_record else 0
    rest = [text.replace(separator, delimiter) for _, text in lines[:at]]
    while at < len(lines):
        number, text = lines[at]
        if not text.strip():
            at += 1
            continue
        taken, fields = _joined(lines, at, separator, delimiter, header)
        if fields:
            records.append((number, [field.replace("\n", " ") for field in fields]))
        else:
            wide = text.count(separator) >= header.width
            reason = MESSAGE if _message(text) else LONG if wide else SHORT
            torn.append(Torn(number, reason, text.replace(separator, delimiter)))
        at += taken
    return Mended(rest, records, torn)


def _joined(
    lines: Sequence[Line], at: int, separator: str, delimiter: str, header: Header
) -> tuple[int, list[str]]:
    """How many lines from `at` on make a record, and its fields; one and none if they make none."""
    text = lines[at].text
    free = header.free()
    if not free or not _begins(text.split(separator), header):
        return 1, []
    for count in range(1, min(LINES_MAX, len(lines) - at) + 1):
        if count > 1:
            text += "\n" + lines[at + count - 1].text
        fields = text.split(separator)
        if len(fields) > header.width + EXTRA_MAX:
            break
        if found := _aligned(fields, delimiter, header):
            return count + _tail(lines, at + count, separator, header), found
        if len(fields) <= free[0]:
            break  # the line ends in a field that cannot have a break
    return 1, []


def _tail(lines: Sequence[Line], at: int, separator: str, header: Header) -> int:
    """How many lines from `at` on can only go on with the last field of the record before."""
    if header.width - 1 not in header.free():
        return 0
    count = 0
    for number, (_, text) in enumerate(lines[at:], 1):
        fields = text.split(separator)
        if _message(text) or (len(fields) > 1 and _begins(fields, header)):
            break
        if text.strip():  # blank lines at the end are not its own
            count = number
    return count


def _aligned(fields: list[str], delimiter: str, header: Header) -> list[str]:
    """Fields given to columns so that only free ones have delimiters and breaks, where all ways to
    do it agree in every column that is not free; no fields if there is none."""
    free = header.free()
    extra = len(fields) - header.width
    if extra < 0 or math.comb(extra + len(free) - 1, extra) > WAYS_MAX:
        return []
    found: list[list[str]] = []
    for shares in itertools.combinations_with_replacement(free, extra):
        row, at = [], 0
        for i in range(header.width):
            step = 1 + shares.count(i)
            row.append(delimiter.join(fields[at : at + step]))
            at += step
        broken = any("\n" in field for i, field in enumerate(row) if i not in free)
        if not broken and _fits(row, header):
            found.append(row)
    firm = {tuple(field for i, field in enumerate(row) if i not in free) for row in found}
    return found[0] if len(firm) == 1 else []


def _begins(fields: list[str], header: Header) -> bool:
    """Whether these can be the first fields of a record, the last of them cut."""
    firm = header.free()[0]  # behind it a delimiter may have moved the fields
    return _fits(fields[:firm] if len(fields) > firm else fields[:-1], header)


def _fits(fields: list[str], header: Header) -> bool:
    """Whether every field can be what its column says; there may be fewer than columns."""
    return all(
        (shape := _SHAPES.get(name.lower())) is None or shape.fullmatch(field) is not None
        for name, field in zip(header.names, fields, strict=False)
    )


def _message(text: str) -> bool:
    return text.startswith(("sacct: ", "slurm_"))
