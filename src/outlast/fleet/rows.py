"""The rows of CSV, of JSON with an object a line, and of a JSON list of objects, in parts."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from outlast.errors import SourceError
from outlast.fleet import json_paths, sources
from outlast.fleet.mapping import Mapping
from outlast.fleet.readings import TEXT_CHARS_MAX

ROWS_AT_ONCE = 50_000
CHARS_AT_ONCE = 64 << 20
LIST_BYTES_MAX = 1 << 30  # of a JSON list, which is read whole
FIELD_CHARS_MAX = 1 << 20
HEAD_CHARS = 1 << 16
UNCLOSED = (
    "a quote that is not closed, and whole rows behind it: quotes = false in a mapping reads them"
)
DELIMITERS = (";", "|", "\t")  # that others than commas are mostly


class Rows(NamedTuple):
    """Some rows: the columns that a mapping names, and where and what each row was. `torn`: what
    is no row, with its line and the reason."""

    columns: dict[str, list[str]]
    lines: list[int]
    texts: list[str]
    torn: list[tuple[int, str, str]]


def rows(path: Path, mapping: Mapping, notes: list[str]) -> Iterator[Rows]:
    """Raises SourceError for a file that cannot be read, or whose header has not the columns. What
    no object has is among the `notes`, as objects may leave out what is empty."""
    try:
        with sources.as_text(path) as file:
            start = file.read(HEAD_CHARS).lstrip()[:1]
        with sources.as_text(path, newline="") as file:
            if start == "[":
                yield from _objects(mapping, enumerate(_listed(path), 1), notes)
            elif start == "{":
                yield from _objects(mapping, _documents(path, file), notes)
            else:
                yield from _csv(path, file, mapping)
    except (OSError, EOFError) as error:
        raise sources.unreadable(path, error) from error


def _csv(path: Path, file: TextIO, mapping: Mapping) -> Iterator[Rows]:
    csv.field_size_limit(FIELD_CHARS_MAX)
    read = _Lines(sources.lines(file), mapping.delimiter)
    quoting = csv.QUOTE_MINIMAL if mapping.quotes else csv.QUOTE_NONE
    reader = csv.reader(read, delimiter=mapping.delimiter, quoting=quoting)
    header = [name.strip() for name in next(reader, [])]
    wanted = set(mapping.names)
    if missing := sorted(wanted - set(header)):
        other = next((one for one in DELIMITERS if len(header) == 1 and one in header[0]), None)
        hint = f'; say delimiter = "{other}" in the mapping' if other else ""
        raise SourceError(
            f"{path} has no column {missing[0]!r}, which the mapping names; its columns are"
            f" {', '.join(map(repr, header[:40]))} (separated by {mapping.delimiter!r}){hint}"
        )
    if twice := sorted(name for name in wanted if header.count(name) > 1):
        raise SourceError(
            f"{path} has {header.count(twice[0])} columns {twice[0]!r}, and the mapping names it:"
            " which is meant cannot be told; rename one in the header; nothing was read"
        )
    read.width = len(header)
    places = {name: header.index(name) for name in wanted}
    while True:
        good: list[tuple[int, list[str]]] = []
        torn: list[tuple[int, str, str]] = []
        done = _some(reader, read, good, torn)
        if good or torn:
            yield Rows(
                {name: [row[at] for _, row in good] for name, at in places.items()},
                [line for line, _ in good],
                [mapping.delimiter.join(row) for _, row in good],
                torn,
            )
        if done:
            return


class _Lines:
    """Lines of CSV, and how many were read since `begin`: in all, and with `width` fields."""

    def __init__(self, lines: Iterator[str], delimiter: str) -> None:
        self._lines, self.delimiter = lines, delimiter
        self.width = self.many = self.whole = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.many += 1
        self.whole += line.count(self.delimiter) == self.width - 1
        return line

    def begin(self) -> None:
        self.many = self.whole = 0

    @property
    def are_rows(self) -> bool:
        """Return whether one row was read of several lines each of which could be a row."""
        return self.many > 1 and self.many == self.whole and self.width > 1


def _some(
    reader: Any, read: _Lines, good: list[tuple[int, list[str]]], torn: list[tuple[int, str, str]]
) -> bool:
    """The next rows; whether they are the last."""
    chars, width, delimiter = 0, read.width, read.delimiter
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
            said = "more" if len(row) > width else "fewer"
            torn.append((reader.line_num, f"{said} fields than the header", delimiter.join(row)))
    return False


def _objects(
    mapping: Mapping, numbered: Iterable[tuple[int, str | msgspec.Raw]], notes: list[str]
) -> Iterator[Rows]:
    paths = {name: json_paths.parse(name) for name in mapping.names}
    list_path = json_paths.parse(mapping.items)
    decoder = msgspec.json.Decoder(dict[str, Any])
    source = iter(numbered)
    seen: set[str] = set()
    while some := list(islice(source, ROWS_AT_ONCE)):
        found = Rows({name: [] for name in paths}, [], [], [])
        for line, raw in some:
            text = raw if isinstance(raw, str) else bytes(raw).decode(errors="replace")
            if not text.strip():
                continue
            try:
                one = decoder.decode(text.encode("utf-8", "replace"))
            except (msgspec.DecodeError, RecursionError):
                found.torn.append((line, "no JSON object", text.strip()))
                continue
            for nth, row in enumerate(_rows_of(one, mapping.items, list_path)):
                if not isinstance(row, dict):
                    found.torn.append((line + nth, "no JSON object", _said(row)[:TEXT_CHARS_MAX]))
                    continue
                found.lines.append(line + nth)
                said = text.strip() if row is one else _said(row)
                found.texts.append(said[:TEXT_CHARS_MAX])
                for name, steps in paths.items():
                    value = json_paths.find(row, name, steps)
                    if value is not None:
                        seen.add(name)
                    found.columns[name].append(_said(value))
        yield found
    notes += [
        f"no row has {name!r}, which the mapping names" for name in sorted(paths.keys() - seen)
    ]


def _rows_of(one: dict[str, Any], path: str, steps: tuple[json_paths.Step, ...]) -> list[Any]:
    """Return the rows of an object: those of its list, as in what `kubectl get -o json` writes, or
    itself."""
    found = json_paths.find(one, path, steps)
    return found if isinstance(found, list) else [one]


def _documents(path: Path, file: TextIO) -> Iterable[tuple[int, str | msgspec.Raw]]:
    """Return an object a line, or the one object that the whole file is."""
    first = file.readline(sources.LINE_CHARS_MAX)
    file.seek(0)
    try:
        msgspec.json.decode(first.encode("utf-8", "replace"), type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        data = sources.whole(path, LIST_BYTES_MAX, "write an object a line, as `jq -c .` does")
        try:
            return [(1, msgspec.json.decode(data, type=msgspec.Raw))]
        except (msgspec.DecodeError, RecursionError):
            pass  # neither: its lines tell what is wrong with each
    return enumerate(sources.lines(file), 1)


def _listed(path: Path) -> list[msgspec.Raw]:
    data = sources.whole(path, LIST_BYTES_MAX, "write an object a line, as `jq -c .[]` does")
    try:
        return msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(f"{path} begins as a JSON list, but is none: {error}") from error


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(map(_said, value))
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
