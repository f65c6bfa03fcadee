"""The rows of CSV, of JSON with an object a line, and of a JSON list of objects, in parts."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from outlast.errors import SourceError
from outlast.fleet import sources
from outlast.fleet.mapping import Mapping

ROWS_AT_ONCE = 50_000
CHARS_AT_ONCE = 64 << 20
LIST_BYTES_MAX = 1 << 30  # of a JSON list, which is read whole
FIELD_CHARS_MAX = 1 << 20
HEAD_CHARS = 1 << 16
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
                yield from _objects(mapping, enumerate(sources.lines(file), 1), notes)
            else:
                yield from _csv(path, file, mapping)
    except (OSError, EOFError) as error:
        raise sources.unreadable(path, error) from error


def _csv(path: Path, file: TextIO, mapping: Mapping) -> Iterator[Rows]:
    csv.field_size_limit(FIELD_CHARS_MAX)
    reader = csv.reader(sources.lines(file), delimiter=mapping.delimiter)
    header = [name.strip() for name in next(reader, [])]
    wanted = set(mapping.columns.values())
    if missing := sorted(wanted - set(header)):
        other = next((one for one in DELIMITERS if len(header) == 1 and one in header[0]), None)
        hint = f'; say delimiter = "{other}" in the mapping' if other else ""
        raise SourceError(
            f"{path} has no column {missing[0]!r}, which the mapping names; its columns are"
            f" {', '.join(map(repr, header[:40]))} (separated by {mapping.delimiter!r}){hint}"
        )
    places = {name: header.index(name) for name in wanted}
    while True:
        good: list[tuple[int, list[str]]] = []
        torn: list[tuple[int, str, str]] = []
        done = _some(reader, len(header), mapping.delimiter, good, torn)
        if good or torn:
            yield Rows(
                {name: [row[at] for _, row in good] for name, at in places.items()},
                [line for line, _ in good],
                [mapping.delimiter.join(row) for _, row in good],
                torn,
            )
        if done:
            return


def _some(
    reader: Any, width: int, delimiter: str, good: list[tuple[int, list[str]]],
    torn: list[tuple[int, str, str]],
) -> bool:  # fmt: skip
    """The next rows; whether they are the last."""
    chars = 0
    while len(good) + len(torn) < ROWS_AT_ONCE and chars < CHARS_AT_ONCE:
        try:
            row = next(reader)
        except StopIteration:
            return True
        except csv.Error as error:
            torn.append((reader.line_num, f"no row of CSV: {error}", ""))
            continue
        chars += sum(map(len, row))
        if len(row) == width:
            good.append((reader.line_num, row))
        elif row:
            said = "more" if len(row) > width else "fewer"
            torn.append((reader.line_num, f"{said} fields than the header", delimiter.join(row)))
    return False


def _objects(
    mapping: Mapping, numbered: Iterable[tuple[int, str | msgspec.Raw]], notes: list[str]
) -> Iterator[Rows]:
    paths = {name: name.split(".") for name in mapping.columns.values()}
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
            found.lines.append(line)
            found.texts.append(text.strip())
            for name, keys in paths.items():
                value = _at(one, name, keys)
                if value is not None:
                    seen.add(name)
                found.columns[name].append(_said(value))
        yield found
    notes += [
        f"no row has {name!r}, which the mapping names" for name in sorted(paths.keys() - seen)
    ]


def _listed(path: Path) -> list[msgspec.Raw]:
    data = sources.whole(path, LIST_BYTES_MAX, "write an object a line, as `jq -c .[]` does")
    try:
        return msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(f"{path} begins as a JSON list, but is none: {error}") from error


def _at(one: dict[str, Any], name: str, keys: list[str]) -> Any:
    """By its name, or by its path."""
    if name in one:
        return one[name]
    found: Any = one
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(map(_said, value))
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
