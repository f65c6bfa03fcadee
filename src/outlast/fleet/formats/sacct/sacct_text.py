"""Accounting text in blocks of whole records; lines of wrong width are repaired.

Two counts show whether all lines of a block have the right width, as almost always. Only others are
examined one by one, and records that a line break in a field has split are joined.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from outlast.errors import SourceError
from outlast.fleet.formats.sacct import sacct_values
from outlast.fleet.formats.sacct.sacct_columns import SacctHeader

Integers: TypeAlias = npt.NDArray[np.int64]

LINES_MAX = 1000  # of one record
EXTRA_MAX = 30  # delimiters in the fields of one record
WAYS_MAX = 1000  # that delimiters can be shared out among free columns

SHORT = "too few fields"
LONG = "too many fields: one of them contains a delimiter, and which is unknown"
MESSAGE = "a message of sacct"

_STATE = "|".join(sorted(sacct_values.STATES, key=len, reverse=True))
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*|\d{9,11}|Unknown|None|N/A"
_SHAPES: dict[str, re.Pattern[str]] = {
    name: re.compile(shape)
    for names, shape in (
        ("jobid jobidraw", r"\d+(_(\d+|\[[^\]]*\]?))?(\+\d+)?(\.\w+)?"),
        ("state", rf"({_STATE})( by \d+)?|[A-Z_]+\+"),
        ("start end submit eligible", _TIME),
        ("elapsed cputime totalcpu suspended", r"[-\d:.]+"),
        ("elapsedraw nnodes allocnodes ncpus alloccpus restarts cputimeraw", r"\d+"),
        ("uid gid timelimitraw reqcpus priority", r"\d*|UNLIMITED|Partition_Limit"),
        ("exitcode", r"\d+:\d+"),
        ("derivedexitcode", r"(\d+:\d+)?"),
        ("alloctres reqtres", r"([\w/:.-]+=[^,|]*(,|$))*"),
    )
    for name in names.split()
}


class NumberedLine(NamedTuple):
    """A line and its number, from 1 on."""

    number: int
    text: str


class TornLine(NamedTuple):
    """Line that belongs to no identifiable record."""

    number: int
    reason: str
    text: str


class RepairedLines(NamedTuple):
    """Result of a repair.

    `rest`: lines that continue the last field of the previous record; `records`: the fields of each
    repaired record and its first line's number. Blank lines are dropped.
    """

    rest: list[str]
    records: list[tuple[int, list[str]]]
    torn: list[TornLine]


def repair_lines(
    lines: Sequence[NumberedLine],
    separator: str,
    delimiter: str,
    header: SacctHeader,
    *,
    after_record: bool,
) -> RepairedLines:
    """Repair a run of lines of wrong width. `separator` replaces `delimiter` in them."""
    records: list[tuple[int, list[str]]] = []
    torn: list[TornLine] = []
    at = _tail(lines, 0, separator, header) if after_record else 0
    rest = [text.replace(separator, delimiter) for _, text in lines[:at]]
    while at < len(lines):
        number, text = lines[at]
        if not text.strip():
            at += 1
            continue
        taken, fields = _join_lines(lines, at, separator, delimiter, header)
        if fields:
            records.append((number, [field.replace("\n", " ") for field in fields]))
        else:
            wide = text.count(separator) >= header.width
            reason = MESSAGE if _message(text) else LONG if wide else SHORT
            torn.append(TornLine(number, reason, text.replace(separator, delimiter)))
        at += taken
    return RepairedLines(rest, records, torn)


def _join_lines(
    lines: Sequence[NumberedLine], at: int, separator: str, delimiter: str, header: SacctHeader
) -> tuple[int, list[str]]:
    """Return the number of lines from `at` on that make a record, and its fields, or 1 and []."""
    text = lines[at].text
    free = header.free()
    if not free or not _is_first_line(text.split(separator), header):
        return 1, []
    for count in range(1, min(LINES_MAX, len(lines) - at) + 1):
        if count > 1:
            text += "\n" + lines[at + count - 1].text
        fields = text.split(separator)
        if len(fields) > header.width + EXTRA_MAX:
            break
        if found := _align_fields(fields, delimiter, header):
            return count + _tail(lines, at + count, separator, header), found
        if len(fields) <= free[0]:
            break  # the line ends in a field that cannot have a break
    return 1, []


def _tail(lines: Sequence[NumberedLine], at: int, separator: str, header: SacctHeader) -> int:
    """Return the number of lines from `at` on that continue the previous record's last field."""
    if header.width - 1 not in header.free():
        return 0
    count = 0
    for number, (_, text) in enumerate(lines[at:], 1):
        fields = text.split(separator)
        if _message(text) or (len(fields) > 1 and _is_first_line(fields, header)):
            break
        if text.strip():  # blank lines at the end are not its own
            count = number
    return count


def _align_fields(fields: list[str], delimiter: str, header: SacctHeader) -> list[str]:
    """Assign fields to columns so that only free ones have delimiters; [] if it is ambiguous."""
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


def _is_first_line(fields: list[str], header: SacctHeader) -> bool:
    """Return whether these can be a record's first fields, the last of them cut."""
    firm = header.free()[0]  # behind it a delimiter may have moved the fields
    return _fits(fields[:firm] if len(fields) > firm else fields[:-1], header)


def _fits(fields: list[str], header: SacctHeader) -> bool:
    """Return whether each field is valid for its column; there may be fewer than columns."""
    return all(
        (shape := _SHAPES.get(name.lower())) is None or shape.fullmatch(field) is not None
        for name, field in zip(header.names, fields, strict=False)
    )


def _message(text: str) -> bool:
    return text.startswith(("sacct: ", "slurm_"))


RECORD_BYTES_MAX = 16 << 20  # of one record, and of the data kept for the next block
RECORD_BYTES_MIN = 16
NOISE_BYTES = 1 << 18
HELD_LINES_MAX = 50_000
PIECE_BYTES = 1 << 18
NEWLINE = 10
SHOWN_BYTES = 1000
TOO_LONG = f"a line over {RECORD_BYTES_MAX >> 20} MiB, which no record has"


class RecordBlock(NamedTuple):
    """Records of a log.

    `text`: a line of column numbers, then a line for each record, split by `separator` instead of
    the log's `delimiter`; `lines`: first line of each record, from 1 on. `mended`: number of
    repaired records; `garbled`: records with invalid UTF-8; `torn`: lines of no record.
    """

    text: bytes
    separator: bytes
    delimiter: bytes
    lines: Integers
    mended: int
    garbled: int
    torn: list[TornLine]

    def row(self, index: int) -> str:
        """Return one record as in the log."""
        ends = np.flatnonzero(np.frombuffer(self.text, np.uint8) == NEWLINE)
        text = self.text[ends[index] + 1 : ends[index + 1]]
        return text.replace(self.separator, self.delimiter).decode(errors="replace")


def read_blocks(
    file: BinaryIO, header: SacctHeader, line: int, size_bytes: int
) -> Iterator[RecordBlock]:
    """Yield the rest of a log, whose next line is `line`.

    A record is never cut: its block may be larger than `size_bytes`. A line longer than
    RECORD_BYTES_MAX is torn and skipped. Raises OSError.
    """
    delimiter = header.delimiter.encode()
    pending, endless = b"", False
    for read, last in _read(file, size_bytes):
        data = read
        if endless:  # the rest of a line that is no record
            end = data.find(b"\n") + 1
            if end == 0:
                continue
            data, endless = data[end:], False
            line += 1
        if len(data) <= NOISE_BYTES and not data.strip():  # too short for the rest of a record
            if pending:
                yield _block((pending,), delimiter, header, line)
            line += pending.count(b"\n") + data.count(b"\n")
            pending = b""
            continue
        cut = len(data) if last else _last_record_begin(data, delimiter, header.width)
        lines = pending.count(b"\n") + data.count(b"\n") if cut == 0 else 0
        if lines > HELD_LINES_MAX or (cut == 0 and len(pending) + len(data) > RECORD_BYTES_MAX):
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                complete = pending.rfind(b"\n") + 1
                if complete:
                    yield _block((pending[:complete],), delimiter, header, line)
                    line += pending.count(b"\n")
                yield _endless_block(line, pending[complete:] + data, delimiter)
                pending, endless = b"", True
                continue
        if cut == 0:
            pending += data
            continue
        block = _block((pending, memoryview(data)[:cut]), delimiter, header, line)
        line += pending.count(b"\n") + data.count(b"\n", 0, cut)
        pending = data[cut:]
        yield block
    if pending:
        yield _block((pending,), delimiter, header, line)


def _endless_block(line: int, text: bytes, delimiter: bytes) -> RecordBlock:
    """Return a block of one line that is no record."""
    shown = text[:SHOWN_BYTES].decode(errors="replace")
    torn = [TornLine(line, TOO_LONG, shown)]
    return RecordBlock(b"", delimiter, delimiter, np.empty(0, np.int64), 0, 0, torn)


def _read(file: BinaryIO, size_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Yield the rest of a file and whether it is the last piece; smaller pieces for short lines."""
    while data := file.read(size_bytes):
        step = NOISE_BYTES if data.count(b"\n") * RECORD_BYTES_MIN > len(data) else len(data)
        for at in range(0, len(data), step):
            yield data[at : at + step], len(data) < size_bytes and at + step >= len(data)


def _last_record_begin(text: bytes, delimiter: bytes, width: int) -> int:
    """Return the begin of the last whole record, which later lines may continue; 0 for none."""
    end = text.rfind(b"\n") + 1
    while end > 0:
        begin = text.rfind(b"\n", 0, end - 1) + 1
        if text.count(delimiter, begin, end) == width - 1:
            return begin
        end = begin
    return 0


def _block(
    parts: tuple[bytes | memoryview, ...], delimiter: bytes, header: SacctHeader, first: int
) -> RecordBlock:
    separator = delimiter
    if len(delimiter) > 1:
        text = b"".join(parts)
        separator = _unused_delimiter(text)
        parts = (text.replace(delimiter, separator),)
    names = _names(separator, header.width)
    text = b"".join((names, *parts))
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    if not text.endswith(b"\n"):
        text = text.removesuffix(b"\r") + b"\n"
    ends, fields = _fields(np.frombuffer(text, np.uint8, offset=len(names)), separator[0])
    lines = first + np.arange(ends.size, dtype=np.int64)
    mended_count, torn = 0, []
    if not (fields == header.width).all():
        text, lines, mended_count, torn, separator = _repair(
            text[len(names) :], separator, header, lines, ends, fields, delimiter.decode()
        )
        text = _names(separator, header.width) + text
    text, garbled = _utf8(text)
    return RecordBlock(text, separator, delimiter, lines, mended_count, garbled, torn)


def _names(separator: bytes, width: int) -> bytes:
    return separator.join(str(i).encode() for i in range(width)) + b"\n"


def _fields(data: npt.NDArray[np.uint8], separator: int) -> tuple[Integers, Integers]:
    """Return each line's end and its number of fields, computed in cache-sized pieces."""
    ends: list[Integers] = []
    before: list[Integers] = []
    stops_before = 0
    for at in range(0, data.size, PIECE_BYTES):
        piece = data[at : at + PIECE_BYTES]
        newlines, stops = np.flatnonzero(piece == NEWLINE), np.flatnonzero(piece == separator)
        ends.append(newlines + at)
        before.append(np.searchsorted(stops, newlines) + stops_before)
        stops_before += stops.size
    stops_to = np.concatenate([np.zeros(1, np.int64), *before])
    return np.concatenate(ends), stops_to[1:] - stops_to[:-1] + 1


def _repair(
    text: bytes,
    separator: bytes,
    header: SacctHeader,
    lines: Integers,
    ends: Integers,
    fields: Integers,
    delimiter: str,
) -> tuple[bytes, Integers, int, list[TornLine], bytes]:
    """Repair every run of lines of wrong width that has a unique solution.

    A line without any delimiter after a whole record continues its last field.
    """
    begins = np.concatenate([[0], ends[:-1] + 1])
    keep = fields == header.width
    odd = np.flatnonzero(~keep)
    runs = np.split(odd, np.flatnonzero(np.diff(odd) > 1) + 1)
    new = _unused_delimiter(text) if separator == delimiter.encode() else separator
    pieces: list[bytes] = []
    torn: list[TornLine] = []
    at, count = 0, 0
    for run in runs:
        i, j = int(run[0]), int(run[-1])
        piece = text[at : int(begins[i])].replace(separator, new)
        found = [
            NumberedLine(
                int(lines[k]), text[int(begins[k]) : int(ends[k])].decode(errors="surrogateescape")
            )
            for k in range(i, j + 1)
        ]
        result = repair_lines(found, separator.decode(), delimiter, header, after_record=i > 0)
        if result.rest:
            piece = piece[:-1] + b" " + _bytes(" ".join(result.rest)) + b"\n"
            count += 1
        pieces.append(piece)
        for number, record in result.records:
            pieces.append(_bytes(new.decode().join(record)) + b"\n")
            keep[i + number - int(lines[i])] = True
            count += 1
        torn += result.torn
        at = int(ends[j]) + 1
    pieces.append(text[at:].replace(separator, new))
    return b"".join(pieces), lines[keep], count, torn, new


def _unused_delimiter(text: bytes) -> bytes:
    """Return a control character that the text does not contain. Raises SourceError."""
    for code in (0x1F, 0x1E, 0x1D, 0x1C, *range(1, 9), *range(14, 28)):
        if code not in text:
            return bytes([code])
    raise SourceError("the text contains every control character: it is not accounting")


def _utf8(text: bytes) -> tuple[bytes, int]:
    """Replace invalid UTF-8; return the number of affected lines."""
    if text.isascii():
        return text, 0
    try:
        text.decode()
    except UnicodeDecodeError:
        clean = text.decode(errors="replace").encode()
        was = [b"\xef\xbf\xbd" in line for line in text.split(b"\n")]
        now = [b"\xef\xbf\xbd" in line for line in clean.split(b"\n")]
        return clean, sum(new and not old for old, new in zip(was, now, strict=True))
    return text, 0


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
