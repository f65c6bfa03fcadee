"""Reader of accounting logs, text or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import polars as pl

from outlast.errors import SourceError
from outlast.fleet.formats.log_reading import (
    NO_UTF8,
    LogReading,
    ReadTotals,
    RecordBatch,
    make_reject,
    open_unpacked,
    refuse_foreign_format,
    unreadable_error,
)
from outlast.fleet.formats.sacct import sacct_columns, sacct_json, sacct_text
from outlast.fleet.formats.sacct.sacct_columns import SacctHeader, SacctOptions
from outlast.fleet.formats.sacct.sacct_jobs import JobConverter

HEAD_BYTES = 1 << 16
HEAD_LINES = 20  # in which a header must stand
BEFORE = "is before the header"
_NOW = {
    "squeue": re.compile(r"JOBID\s+PARTITION\s+NAME\b"),
    "sinfo": re.compile(r"PARTITION\s+AVAIL\b|NODELIST\s+NODES\b"),
}
_ROW = re.compile(  # of accounting without a header
    r"^\d+[\d_+.a-z]*\|.*\|(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED|OUT_OF_ME)"
)


class _Start(NamedTuple):
    """Begin of the records in a text. `before`: lines above its header."""

    header: SacctHeader
    before: list[tuple[int, str]]
    line: int
    offset: int


def read_sacct(path: Path, options: SacctOptions | None = None) -> LogReading:
    """Read a log of sacct: text with any delimiter and columns, or JSON, also gzipped.

    Only its head is read now. Raises SourceError for a file of another kind, without the necessary
    columns, or that cannot be opened.
    """
    options = options or SacctOptions()
    source = str(path)
    try:
        with open_unpacked(path) as file:
            head = file.read(HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise SourceError(f"{source} cannot be read: {error}") from error
    refuse_foreign_format(path, head)
    if not head.strip():
        raise SourceError(f"{source} is empty")
    if is_json(head):
        sacct_json.refuse_other_commands(source, head)
        return LogReading(
            source, "sacct-json", lambda totals: sacct_json.json_batches(path, options, totals)
        )
    start = _start(source, head, options)
    return LogReading(source, "sacct", lambda totals: _text_parts(path, start, options, totals))


def is_json(head: bytes) -> bool:
    """Return whether a file with this head is JSON."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def is_text(head: bytes) -> bool:
    """Return whether a file with this head has a header of sacct."""
    try:
        return not is_json(head) and bool(_start("", head, SacctOptions()))
    except SourceError:
        return False


def explain_unreadable(source: str, head: bytes) -> SourceError | None:
    """Return the reason that a file of Slurm cannot be read; None for other files."""
    first = head.decode(errors="replace").lstrip().partition("\n")[0]
    for command, words in _NOW.items():
        if words.match(first):
            return SourceError(
                f"{source} is of {command}, which shows the current state; run sacct --allusers"
                f" --parsable2 --duplicates --format={sacct_columns.USUAL}"
            )
    try:
        _start(source, head, SacctOptions())
    except SourceError as error:
        names = re.findall(r"[A-Za-z]+", first.lower())
        named = sum(name in sacct_columns.KNOWN for name in names) * 2 > len(names) > 2
        return error if named or _ROW.search(first) else None
    return None


def _start(source: str, head: bytes, options: SacctOptions) -> _Start:
    before: list[tuple[int, str]] = []
    offset = 0
    for number, line in enumerate(head.splitlines(keepends=True)[:HEAD_LINES], 1):
        text = line.decode(errors="replace").removeprefix("\ufeff")
        offset += len(line)
        if found := sacct_columns.parse_header(text, source, options):
            if options.columns:
                raise SourceError(f"{source} has a header of its own: leave out --columns")
            return _Start(found, before, number + 1, offset)
        if text.strip():
            before.append((number, text.rstrip("\r\n")))
    if options.columns:
        return _Start(
            sacct_columns.header_of_options(source, options),
            [],
            1,
            3 if head[:3] == b"\xef\xbb\xbf" else 0,
        )
    shown = before[0][1][:80] if before else ""
    if '"' in shown and sacct_columns.parse_header(before[0][1].replace('"', ""), source, options):
        raise SourceError(
            f"{source} has quotes around its fields, as a spreadsheet or psql writes them and sacct"
            " does not: save it without them, with | or a tab between fields, or read it by a"
            " --mapping of CSV; nothing was read"
        )
    raise SourceError(
        f"{source} has no header of sacct in its first {HEAD_LINES} lines (the first is {shown!r});"
        " run sacct without --noheader, or list its columns in their order with --columns"
    )


def _text_parts(
    path: Path, start: _Start, options: SacctOptions, totals: ReadTotals
) -> Iterator[RecordBatch]:
    source = str(path)
    top = start.header
    totals.notes += top.notes(options.cluster)
    totals.rows += len(start.before)
    if start.before:
        yield RecordBatch(
            {}, [make_reject(source, number, BEFORE, text) for number, text in start.before]
        )
    converter = JobConverter(source, top.at.keys(), options, totals)
    try:
        with open_unpacked(path) as file:
            file.seek(start.offset)
            for block in _ahead(sacct_text.read_blocks(file, top, start.line, options.block_bytes)):
                yield _part(block, top, source, converter, totals)
    except (OSError, EOFError) as error:
        raise unreadable_error(path, error) from error
    yield converter.last()


def _ahead(blocks: Iterator[sacct_text.RecordBlock]) -> Iterator[sacct_text.RecordBlock]:
    """Yield the blocks while the next one is read in a thread."""
    with ThreadPoolExecutor(1, "outlast-sacct") as pool:
        coming = pool.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = pool.submit(next, blocks, None)
            yield block


def _part(
    block: sacct_text.RecordBlock,
    top: SacctHeader,
    source: str,
    converter: JobConverter,
    totals: ReadTotals,
) -> RecordBatch:
    totals.odd.update(
        {
            key: count
            for key, count in (
                ("records put together from several lines", block.mended),
                (NO_UTF8, block.garbled),
            )
            if count
        }
    )
    torn = [make_reject(source, number, reason, text) for number, reason, text in block.torn]
    totals.rows += len(torn)
    if not block.lines.size:
        return RecordBatch({}, torn)
    part = converter.part(_table(block, top), pl.Series(block.lines), block.row)
    return part._replace(rejects=part.rejects + torn)


def _table(block: sacct_text.RecordBlock, top: SacctHeader) -> pl.DataFrame:
    """Return the used columns as texts; null for an empty field."""
    wanted = {str(i): ours for ours, i in top.at.items()}
    table = pl.read_csv(
        block.text,
        separator=block.separator.decode(),
        quote_char=None,
        infer_schema=False,
        columns=list(wanted),
    )
    assert table.height == block.lines.size
    return table.rename(wanted)
