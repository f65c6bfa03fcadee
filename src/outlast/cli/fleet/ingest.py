"""`outlast fleet ingest`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from outlast.cli.output_stream import Printer, echo, echo_error, print_json
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.fleet.formats.format_detection import Format, LogOptions
from outlast.fleet.record_tables import Name
from outlast.fleet.store.ingestion import IngestedLog, IngestSummary
from outlast.fleet.store.ingestion import ingest as ingested
from outlast.fleet.store.lake import format_time
from outlast.text_formatting import plural


def _ingest_flag(text: str, name: str | None = None) -> Parameter:
    return Parameter(help=text, name=name)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class IngestFlags:
    """Flags of `outlast fleet ingest`."""

    as_: Annotated[
        Format | None,
        _ingest_flag("Format of the logs, where it is not recognised by their content.", "--as"),
    ] = None
    mapping: Annotated[
        Path | None,
        _ingest_flag(
            "A TOML file that maps columns to fields, for CSV and JSON of any shape; else"
            " log.toml beside log.csv."
        ),
    ] = None
    cluster: Annotated[
        str | None, _ingest_flag("Name of the cluster, for logs that do not name it.")
    ] = None
    zone: Annotated[
        str | None,
        _ingest_flag("The time zone of times that have none, as in Europe/Paris; else UTC."),
    ] = None
    node: Annotated[
        str | None,
        _ingest_flag(
            "Node of a log that does not name it. In it {name} is the log's name"
            " without its ending, and {folder} that of its directory."
        ),
    ] = None
    at: Annotated[
        str | None,
        _ingest_flag(
            "When the logs were taken, as in 2024-05-17T10:00; else as old as their files are."
        ),
    ] = None
    boot: Annotated[
        str | None,
        _ingest_flag(
            "When the node was booted, for lines of a kernel that count seconds since then."
        ),
    ] = None
    nodes: Annotated[
        int | None,
        _ingest_flag(
            "How many nodes there are, for a trace of faults, which names those that had one."
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None, _ingest_flag("How many GPUs a node has, for a trace of faults.")
    ] = None
    epoch: Annotated[str | None, _ingest_flag("Day 0 of a trace of faults, as in 2024-03-30.")] = (
        None
    )
    delimiter: Annotated[
        str | None,
        _ingest_flag("What separates the fields of accounting, where its header does not show it."),
    ] = None
    columns: Annotated[
        str | None,
        _ingest_flag("The columns of accounting without a header, as in JobID,State,Start,End."),
    ] = None

    label: Annotated[
        str | None,
        _ingest_flag(
            "Label of an experiment, as routing-on, for benchmarks of collectives, which the report"
            " compares by it. {name} and {folder} in it as in --node."
        ),
    ] = None
    policy: Annotated[
        Path | None,
        _ingest_flag("A TOML file with XIDs to judge otherwise than the shipped policy does."),
    ] = None

    def log_options(self) -> LogOptions:
        """Return the request for the readers."""
        return LogOptions(
            format=self.as_,
            mapping=self.mapping,
            cluster=self.cluster or "",
            zone=self.zone or "",
            node=self.node or "",
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            epoch=self.epoch or "",
            at=self.at or "",
            boot=self.boot or "",
            delimiter=self.delimiter or "",
            columns=self.columns or "",
            policy=self.policy,
            label=self.label or "",
        )


LOGS_SHOWN = 20  # of more, only those that have something odd


def ingest(
    lake: Path,
    /,
    *source: Path,
    flags: IngestFlags | None = None,
    anonymize: Path | None = None,
    json: bool = False,
) -> int:
    """Read logs into a lake, which the other commands analyse.

    What a log is, is seen from its content. Rows that cannot be read are kept
    with their reason in LAKE/rejects. A log that was read before changes nothing;
    if one of several cannot be read, none is taken over.

    Parameters
    ----------
    lake
        The directory, which is made where there is none.
    source
        Logs of any kinds, and directories of `outlast run`.
    anonymize
        Replace the names of people, jobs, hosts and clusters by means of the key in this file,
        which is made where there is none. Keep it for later readings, and to yourself.
    json
        One JSON object instead of text.
    """
    if not source:
        raise UsageError("which logs? `outlast fleet ingest LAKE LOG...`; nothing was read")
    options = (flags or IngestFlags()).log_options()
    names = None
    if anonymize:
        from outlast.fleet.store.pseudonyms import load_pseudonyms

        names = load_pseudonyms(anonymize, lake)
    try:
        with _progress() as on_progress:
            found = ingested(lake, source, options, names, on_progress)
    except KeyboardInterrupt:
        echo_error(
            f"outlast: interrupted: {lake} is whole, and has all of these logs or none of them"
        )
        return EXIT_INTERRUPTED
    if json:
        print_json(found)
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


def _show(found: IngestSummary) -> None:
    is_long = len(found.read) > LOGS_SHOWN
    plain: list[IngestedLog] = []
    for one in found.read:
        if is_long and (one.before or _is_plain(one)):
            plain.append(one)
        else:
            _show_one(one)
    if plain:
        before = sum(one.before for one in plain)
        repeated = f", {before:,} of them read before" if before else ""
        echo(f"{plural(len(plain), 'log')} without remarks{repeated}")
    for kind, added in found.added.items():
        more = [f"{added.again:,} of them known already"] if added.again else []
        more += [f"{added.replaced:,} replaced earlier records"] if added.replaced else []
        echo(f"{kind}: {added.records:,} read{''.join(f', {each}' for each in more)}")
    for each in found.odd:
        echo(f"unusual: {each}")
    echo(f"{found.lake} holds {_counts(found.rows) or 'nothing'}")
    if found.since_ns is not None and found.until_ns is not None:
        echo(f"  from {format_time(found.since_ns)} until {format_time(found.until_ns)}")


def _is_plain(one: IngestedLog) -> bool:
    return not (one.source.rejects or one.source.odd or one.source.notes)


def _counts(of: Mapping[Name, int]) -> str:
    return ", ".join(plural(rows, kind.removesuffix("s")) for kind, rows in of.items())


def _show_one(one: IngestedLog) -> None:
    source = one.source
    if one.before:
        echo(f"{source.name}: read before, on {format_time(source.read_ns)}: nothing to do")
        return
    echo(f"{source.name}: {source.format}")
    echo(f"  {plural(source.rows, 'row')}: {_counts(source.records) or 'no records'}")
    if source.since_ns is not None and source.until_ns is not None:
        echo(f"  from {format_time(source.since_ns)} until {format_time(source.until_ns)}")
    for what, rows in source.skipped.items():
        echo(f"  {rows:,} left out as no record: {what}")
    for what, rows in source.odd.items():
        echo(f"  {rows:,} unusual, but kept: {what}")
    for reason, rows in source.rejects.items():
        echo(f"  {rows:,} rejected: {reason}")
        for each in (each for each in one.examples if each.reason == reason):
            echo(f"    line {each.line}: {each.text[:100]}")
    if source.rejects:
        echo(f"  all of them are in rejects/{source.id}.jsonl")
    for note in source.notes:
        echo(f"  note: {note}")
