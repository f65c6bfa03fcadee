"""`outlast fleet ingest`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from outlast.cli.stream import Printer, as_json, say, tell
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.fleet.formats import Asked, Format
from outlast.fleet.ingest import Read, Summary
from outlast.fleet.ingest import ingest as ingested
from outlast.fleet.lake import said


def ingest(
    lake: Path,
    /,
    *source: Path,
    as_: Annotated[Format | None, Parameter(name="--as")] = None,
    mapping: Path | None = None,
    cluster: str | None = None,
    zone: str | None = None,
    node: str | None = None,
    at: str | None = None,
    boot: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    epoch: str | None = None,
    delimiter: str | None = None,
    columns: str | None = None,
    anonymize: Path | None = None,
    json: bool = False,
) -> int:
    """Read logs into a lake, from which the other commands answer.

    What a log is, is seen from its content. Rows that cannot be read are kept
    with their reason in LAKE/rejects. A log that was read before changes nothing;
    if one of several cannot be read, none is taken over.

    Parameters
    ----------
    lake
        The directory, which is made where there is none.
    source
        Logs of any kinds, and directories of `outlast run`.
    as_
        What the logs are, where their content does not tell.
    mapping
        A TOML file that says which column is what, for CSV and JSON of any shape; else log.toml
        beside log.csv.
    cluster
        The name of the cluster, where a log does not say it.
    zone
        The time zone of times that have none, as in Europe/Paris; else UTC.
    node
        The node that a log is of, where it does not say so.
    at
        When the logs were taken, as in 2024-05-17T10:00; else as old as their files are.
    boot
        When the node was booted, for lines of a kernel that count seconds since then.
    nodes
        How many nodes the cluster has, for a trace of faults, which names those that had one.
    gpus_per_node
        How many GPUs a node has, for a trace of faults.
    epoch
        Day 0 of a trace of faults, as in 2024-03-30.
    delimiter
        What separates the fields of accounting, where its header does not show it.
    columns
        The columns of accounting without a header, as in JobID,State,Start,End.
    anonymize
        Replace the names of people, jobs, hosts and clusters by means of the key in this file,
        which is made where there is none. Keep it for later readings, and to yourself.
    json
        One JSON object instead of text.
    """
    if not source:
        raise UsageError("which logs? `outlast fleet ingest LAKE LOG...`; nothing was read")
    asked = Asked(
        as_, mapping, cluster or "", zone or "", node or "", nodes, gpus_per_node, epoch or "",
        at or "", boot or "", delimiter or "", columns or "",
    )  # fmt: skip
    names = None
    if anonymize:
        from outlast.fleet.anonymous import names_of

        names = names_of(anonymize, lake)
    try:
        with _progress() as on_progress:
            found = ingested(lake, source, asked, names, on_progress)
    except KeyboardInterrupt:
        tell(f"outlast: interrupted: {lake} is whole, and has all of these logs or none of them")
        return EXIT_INTERRUPTED
    if json:
        as_json(found)
    else:
        _show(found)
    return EXIT_DONE


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    console = Printer(stderr=True)
    if not console.is_terminal:
        yield lambda _source, _rows: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda source, rows: bar.update(task, description=f"{source}: {rows:,} rows")


def _show(found: Summary) -> None:
    for one in found.read:
        _show_one(one)
    for kind, added in found.added.items():
        more = [f"{added.again:,} of them the lake had"] if added.again else []
        more += [f"{added.replaced:,} replaced what was known first"] if added.replaced else []
        say(f"{kind}: {added.records:,} read{''.join(f', {each}' for each in more)}")
    holds = ", ".join(f"{rows:,} {kind}" for kind, rows in found.rows.items()) or "nothing"
    say(f"{found.lake} holds {holds}")
    if found.since_ns is not None and found.until_ns is not None:
        say(f"  from {said(found.since_ns)} until {said(found.until_ns)}")


def _show_one(one: Read) -> None:
    source = one.source
    if one.before:
        say(f"{source.name}: read before, on {said(source.read_ns)}: nothing to do")
        return
    say(f"{source.name}: {source.format}")
    records = ", ".join(f"{count:,} {kind}" for kind, count in source.records.items())
    say(f"  {source.rows:,} rows: {records or 'no records'}")
    if source.since_ns is not None and source.until_ns is not None:
        say(f"  from {said(source.since_ns)} until {said(source.until_ns)}")
    for what, rows in source.skipped.items():
        say(f"  left out, as they are no records: {rows:,} {what}")
    for what, rows in source.odd.items():
        say(f"  odd, but kept: {rows:,} {what}")
    for reason, rows in source.rejects.items():
        say(f"  {rows:,} rejected: {reason}")
        for each in (each for each in one.examples if each.reason == reason):
            say(f"    line {each.line}: {each.text[:100]}")
    if source.rejects:
        say(f"  all of them are in rejects/{source.id}.jsonl")
    for note in source.notes:
        say(f"  note: {note}")
