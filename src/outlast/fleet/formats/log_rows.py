"""Rows of CSV, JSON lines and JSON lists in bounded parts, with paths into JSON."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from outlast.errors import SourceError, UsageError
from outlast.fleet.formats import log_reading
from outlast.fleet.formats.column_mapping import ColumnMapping
from outlast.fleet.formats.log_reading import TEXT_CHARS_MAX

STEPS_MAX = 32
NOT_TRUE = "a condition that is not True"
"""Marks the time at which a condition of Kubernetes became False, if a path names its type alone:
`Admitted` becomes False when a workload is evicted, which is no start time."""
_CHANGES = (["lastTransitionTime"], ["lastUpdateTime"])
_STEP = re.compile(
    r"""(?:^|\.)"(?P<quoted>[^"]*)" | \[(?P<inside>[^\[\]]*)\] | (?:^|\.)(?P<plain>[^.\[\]"]+)""",
    re.VERBOSE,
)
_AND = re.compile(r"\s*(?:,|&&)\s*(?=[@.\w/-]+\s*=)")


class JsonPathStep(NamedTuple):
    """Step of a path into JSON.

    `key` of an object. `place`: index in a list. `where`: keys and values that elements of a list
    must have; empty: all elements.
    """

    key: str = ""
    place: int | None = None
    where: tuple[tuple[str, str], ...] | None = None


def parse_json_path(path: str) -> tuple[JsonPathStep, ...]:
    """Return the steps of a path. Raises UsageError for an invalid one."""
    steps: list[JsonPathStep] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None or match.end() == at or len(steps) == STEPS_MAX:
            raise UsageError(
                f"{path!r} is no path: use one as status.containers[0].name,"
                ' conditions[type=Failed].time or labels."nvidia.com/gpu"'
            )
        steps.append(_step(match))
        at = match.end()
    return tuple(steps)


def find_json_value(value: Any, path: str, steps: tuple[JsonPathStep, ...]) -> Any:
    """Return the value at a path, a list if there are several; None without any."""
    if isinstance(value, dict) and path in value:
        return value[path]
    return _find(value, steps)


def _step(match: re.Match[str]) -> JsonPathStep:
    if match["quoted"] is not None:
        return JsonPathStep(key=match["quoted"])
    if (plain := match["plain"]) is not None:
        return JsonPathStep(key=plain, place=int(plain) if plain.isdecimal() else None)
    inside = match["inside"].removeprefix("?").strip("()@. ")
    if inside.isdecimal():
        return JsonPathStep(place=int(inside))
    if inside in ("", "*"):
        return JsonPathStep(where=())
    pairs = [condition.strip("()@. ").partition("=") for condition in _AND.split(inside)]
    if pairs[0][1]:
        return JsonPathStep(
            where=tuple((key.strip(" ="), value.strip("= '\"")) for key, _, value in pairs)
        )
    return JsonPathStep(key=inside.strip("'\""))


def _find(value: Any, steps: tuple[JsonPathStep, ...]) -> Any:
    for nth, step in enumerate(steps):
        if isinstance(value, list):
            if step.where is not None:
                chosen = [item for item in value if _fits(item, step.where)]
                rest = steps[nth + 1 :]
                if _is_unclear(chosen, step.where, rest):
                    return NOT_TRUE
                values = [_find(item, rest) for item in chosen]
                there = [hit for hit in values if hit is not None]
                return there[0] if len(there) == 1 else there or None
            if step.place is None or step.place >= len(value):
                return None
            value = value[step.place]
        elif isinstance(value, dict):
            if step.key not in value or not step.key:
                return _find_dotted(value, steps[nth:])
            value = value[step.key]
        else:
            return None
    return value


def _find_dotted(value: dict[str, Any], steps: tuple[JsonPathStep, ...]) -> Any:
    """Return the value of a key that contains dots, the longest first."""
    for length in range(len(steps), 1, -1):
        if all(step.key for step in steps[:length]):
            key = ".".join(step.key for step in steps[:length])
            if key in value:
                return _find(value[key], steps[length:])
    return None


def _fits(item: Any, where: tuple[tuple[str, str], ...]) -> bool:
    if not where:
        return True
    return isinstance(item, dict) and all(str(item.get(key)) == value for key, value in where)


def _is_unclear(
    chosen: list[Any], where: tuple[tuple[str, str], ...], rest: tuple[JsonPathStep, ...]
) -> bool:
    """Return whether a path takes the change time of a condition that is not True, by its type."""
    if [key for key, _ in where] != ["type"] or [step.key for step in rest] not in _CHANGES:
        return False
    return any(str(item.get("status", "True")) != "True" for item in chosen)


ROWS_AT_ONCE = 50_000
CHARS_AT_ONCE = 64 << 20
LIST_BYTES_MAX = 1 << 30  # of a JSON list, which is read at once
FIELD_CHARS_MAX = 1 << 20
HEAD_CHARS = 1 << 16
UNCLOSED = (
    "a quote that is not closed, and whole rows behind it: quotes = false in a mapping reads them"
)
DELIMITERS = (";", "|", "\t")  # suggested if a comma does not separate columns


class LogRows(NamedTuple):
    """Some rows: the columns that a mapping names, and each row's line and text.

    `torn`: lines that are no row, with the reason and the text.
    """

    columns: dict[str, list[str]]
    lines: list[int]
    texts: list[str]
    torn: list[tuple[int, str, str]]


def read_rows(path: Path, mapping: ColumnMapping, notes: list[str]) -> Iterator[LogRows]:
    """Yield the rows of a file.

    Raises SourceError if it cannot be read or lacks the columns. A column that no JSON object has
    is only noted, since objects may omit empty values.
    """
    try:
        with log_reading.open_text(path) as file:
            start = file.read(HEAD_CHARS).lstrip()[:1]
        with log_reading.open_text(path, newline="") as file:
            if start == "[":
                yield from _objects(mapping, enumerate(_list_rows(path), 1), notes)
            elif start == "{":
                yield from _objects(mapping, _documents(path, file), notes)
            else:
                yield from _csv(path, file, mapping)
    except (OSError, EOFError) as error:
        raise log_reading.unreadable_error(path, error) from error


def _csv(path: Path, file: TextIO, mapping: ColumnMapping) -> Iterator[LogRows]:
    csv.field_size_limit(FIELD_CHARS_MAX)
    read = _Lines(log_reading.bounded_lines(file), mapping.delimiter)
    quoting = csv.QUOTE_MINIMAL if mapping.quotes else csv.QUOTE_NONE
    reader = csv.reader(read, delimiter=mapping.delimiter, quoting=quoting)
    header = [name.strip() for name in next(reader, [])]
    wanted = set(mapping.names)
    if missing := sorted(wanted - set(header)):
        other = next((mark for mark in DELIMITERS if len(header) == 1 and mark in header[0]), None)
        hint = f'; say delimiter = "{other}" in the mapping' if other else ""
        raise SourceError(
            f"{path} has no column {missing[0]!r}, which the mapping names; its columns are"
            f" {', '.join(map(repr, header[:40]))} (separated by {mapping.delimiter!r}){hint}"
        )
    if twice := sorted(name for name in wanted if header.count(name) > 1):
        raise SourceError(
            f"{path} has {header.count(twice[0])} columns {twice[0]!r}, and the mapping names it:"
            " the name is ambiguous; rename one in the header; nothing was read"
        )
    read.width = len(header)
    places = {name: header.index(name) for name in wanted}
    while True:
        good: list[tuple[int, list[str]]] = []
        torn: list[tuple[int, str, str]] = []
        done = _next_rows(reader, read, good, torn)
        if good or torn:
            yield LogRows(
                {name: [row[at] for _, row in good] for name, at in places.items()},
                [line for line, _ in good],
                [mapping.delimiter.join(row) for _, row in good],
                torn,
            )
        if done:
            return


class _Lines:
    """Lines of CSV, counted since `begin`: all, and those with `width` fields."""

    def __init__(self, lines: Iterator[str], delimiter: str) -> None:
        self._lines = lines
        self.delimiter = delimiter
        self.width = self.many = self.whole = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.many += 1
        self.whole += line.count(self.delimiter) == self.width - 1
        return line

    def begin(self) -> None:
        """Start counting the lines of a row."""
        self.many = self.whole = 0

    @property
    def are_rows(self) -> bool:
        """True if several lines, each of the width of a row, were read as one row."""
        return self.many > 1 and self.many == self.whole and self.width > 1


def _next_rows(
    reader: Any, read: _Lines, good: list[tuple[int, list[str]]], torn: list[tuple[int, str, str]]
) -> bool:
    """Read the next rows; return whether they are the last."""
    chars = 0
    width = read.width
    delimiter = read.delimiter
    while len(good) + len(torn) < ROWS_AT_ONCE and chars < CHARS_AT_ONCE:
        read.begin()
        try:
            row = next(reader)
        except StopIteration:
            return True
        except csv.Error as error:
            torn.append((reader.line_num, f"no row of CSV: {error}", ""))
            continue
        chars += sum(map(len, row))
        if read.are_rows:
            lines = delimiter.join(row).splitlines() + [""] * read.many
            first = reader.line_num - read.many + 1
            torn += [(first + at, UNCLOSED, lines[at]) for at in range(read.many)]
        elif len(row) == width:
            good.append((reader.line_num, row))
        elif row:
            amount = "more" if len(row) > width else "fewer"
            torn.append((reader.line_num, f"{amount} fields than the header", delimiter.join(row)))
    return False


def _objects(
    mapping: ColumnMapping, numbered: Iterable[tuple[int, str | msgspec.Raw]], notes: list[str]
) -> Iterator[LogRows]:
    paths = {name: parse_json_path(name) for name in mapping.names}
    list_path = parse_json_path(mapping.items)
    decoder = msgspec.json.Decoder(dict[str, Any])
    source = iter(numbered)
    present: set[str] = set()
    while some := list(islice(source, ROWS_AT_ONCE)):
        rows = LogRows({name: [] for name in paths}, [], [], [])
        for line, raw in some:
            text = raw if isinstance(raw, str) else bytes(raw).decode(errors="replace")
            if not text.strip():
                continue
            try:
                document = decoder.decode(text.encode("utf-8", "replace"))
            except (msgspec.DecodeError, RecursionError):
                rows.torn.append((line, "no JSON object", text.strip()))
                continue
            for nth, row in enumerate(_rows_of(document, mapping.items, list_path)):
                if not isinstance(row, dict):
                    rows.torn.append((line + nth, "no JSON object", _to_text(row)[:TEXT_CHARS_MAX]))
                    continue
                rows.lines.append(line + nth)
                row_text = text.strip() if row is document else _to_text(row)
                rows.texts.append(row_text[:TEXT_CHARS_MAX])
                for name, steps in paths.items():
                    value = find_json_value(row, name, steps)
                    if value is not None:
                        present.add(name)
                    rows.columns[name].append(_to_text(value))
        yield rows
    notes += [
        f"no row has {name!r}, which the mapping names" for name in sorted(paths.keys() - present)
    ]


def _rows_of(document: dict[str, Any], path: str, steps: tuple[JsonPathStep, ...]) -> list[Any]:
    """Return the rows of an object: those of its list, as of `kubectl get -o json`, or itself."""
    value = find_json_value(document, path, steps)
    return value if isinstance(value, list) else [document]


def _documents(path: Path, file: TextIO) -> Iterable[tuple[int, str | msgspec.Raw]]:
    """Return one object per line, or the single object of the whole file."""
    first = file.readline(log_reading.LINE_CHARS_MAX)
    file.seek(0)
    try:
        msgspec.json.decode(first.encode("utf-8", "replace"), type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        data = log_reading.read_bounded(
            path, LIST_BYTES_MAX, "write an object a line, as `jq -c .` does"
        )
        try:
            return [(1, msgspec.json.decode(data, type=msgspec.Raw))]
        except (msgspec.DecodeError, RecursionError):
            pass  # neither: each line is rejected with its reason
    return enumerate(log_reading.bounded_lines(file), 1)


def _list_rows(path: Path) -> list[msgspec.Raw]:
    data = log_reading.read_bounded(
        path, LIST_BYTES_MAX, "write an object a line, as `jq -c .[]` does"
    )
    try:
        return msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(f"{path} begins as a JSON list, but is none: {error}") from error


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(map(_to_text, value))
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
