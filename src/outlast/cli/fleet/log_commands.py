"""Commands on logs: `outlast fleet ingest` reads them, `synth` generates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from outlast.atomic_files import refuse_existing
from outlast.cli.output_stream import Printer, echo, echo_error, print_json
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.fleet.formats.format_detection import Format, LogOptions
from outlast.fleet.ingestion import IngestedLog, IngestSummary
from outlast.fleet.ingestion import ingest as ingested
from outlast.fleet.lake import format_time
from outlast.fleet.record_tables import Name
from outlast.text_formatting import plural

if TYPE_CHECKING:
    from outlast.fleet.synth.synthetic_cluster import GroundTruth

Update = Callable[[str, float | None], None]
_TEXT = TextColumn("{task.description}", markup=False)


def _ingest_flag(text: str, name: str | None = None) -> Parameter:
    return Parameter(help=text, name=name)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class IngestFlags:
    """Flags of `outlast fleet ingest`."""

    as_: Annotated[
        Format | None,
        _ingest_flag("Format of the logs (default: detected from their content).", "--as"),
    ] = None
    mapping: Annotated[
        Path | None,
        _ingest_flag(
            "TOML file that maps columns to fields, for CSV and JSON of other formats"
            " (default: log.toml beside log.csv)."
        ),
    ] = None
    cluster: Annotated[
        str | None, _ingest_flag("Name of the cluster, for logs that do not contain it.")
    ] = None
    zone: Annotated[
        str | None,
        _ingest_flag("Time zone of times without one, for example Europe/Paris (default: UTC)."),
    ] = None
    node: Annotated[
        str | None,
        _ingest_flag(
            "Name of the node, for logs that do not contain it. {name} stands for the log's"
            " name without suffix, {folder} for its directory's name."
        ),
    ] = None
    at: Annotated[
        str | None,
        _ingest_flag(
            "Time at which the logs were collected, for example 2024-05-17T10:00 (default:"
            " modification time of the file)."
        ),
    ] = None
    boot: Annotated[
        str | None,
        _ingest_flag("Boot time of the node, for kernel logs with times relative to it."),
    ] = None
    nodes: Annotated[
        int | None,
        _ingest_flag(
            "Number of nodes in the cluster, for a fault trace, which lists only nodes with faults."
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None, _ingest_flag("Number of GPUs per node, for a fault trace.")
    ] = None
    epoch: Annotated[
        str | None, _ingest_flag("Date of day 0 of a fault trace, for example 2024-03-30.")
    ] = None
    delimiter: Annotated[
        str | None,
        _ingest_flag("Field delimiter of sacct output (default: detected from the header)."),
    ] = None
    columns: Annotated[
        str | None,
        _ingest_flag(
            "Columns of sacct output without a header, for example JobID,State,Start,End."
        ),
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
        _ingest_flag(
            "TOML file that overrides the severities of NVIDIA XIDs (default: the shipped policy)."
        ),
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
    """Read logs into a lake (a directory of Parquet files).

    The format of a log is detected from its content. Rejected rows are kept in
    LAKE/rejects, with the reason. Logs that were read before are skipped. If one
    log cannot be read, the lake stays unchanged.

    Parameters
    ----------
    lake
        Directory for the records, created if missing.
    source
        Log files of any format, and run directories of `outlast run`.
    anonymize
        Replace names of users, jobs, hosts and clusters by pseudonyms. They are derived from the
        secret key in this file, which is created if missing. Later ingests need the same key.
    json
        Print one JSON object instead of text.
    """
    if not source:
        raise UsageError(
            "no logs were given; nothing was read; try: outlast fleet ingest LAKE LOG..."
        )
    options = (flags or IngestFlags()).log_options()
    names = None
    if anonymize:
        from outlast.fleet.pseudonyms import load_pseudonyms

        names = load_pseudonyms(anonymize, lake)
    try:
        with _progress(SpinnerColumn(), _TEXT, TimeElapsedColumn()) as show:
            summary = ingested(
                lake, source, options, names, lambda log, rows: show(f"{log}: {rows:,} rows", None)
            )
    except KeyboardInterrupt:
        echo_error(f"outlast: interrupted: {lake} is intact, and has all of these logs or none")
        return EXIT_INTERRUPTED
    if json:
        print_json(summary)
    else:
        _show_ingested(summary)
    return EXIT_DONE


@contextmanager
def _progress(*columns: ProgressColumn, total: float | None = None) -> Iterator[Update]:
    """Yield a function that shows a text and the part done, if stderr is a terminal."""
    console = Printer(stderr=True)
    if not console.is_terminal:
        yield lambda _text, _done: None
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, done: bar.update(task, description=text, completed=done)


def _show_ingested(summary: IngestSummary) -> None:
    is_long = len(summary.read) > LOGS_SHOWN
    plain: list[IngestedLog] = []
    for log in summary.read:
        if is_long and not log.differing and (log.before or _is_plain(log)):
            plain.append(log)
        else:
            _show_one(log)
    if plain:
        before = sum(log.before for log in plain)
        repeated = f", {before:,} of them read before" if before else ""
        echo(f"{plural(len(plain), 'log')} without remarks{repeated}")
    for kind, added in summary.added.items():
        more = [f"{added.again:,} of them known already"] if added.again else []
        more += [f"{added.replaced:,} replaced earlier records"] if added.replaced else []
        echo(f"{kind}: {added.records:,} read{''.join(f', {each}' for each in more)}")
    for remark in summary.odd:
        echo(f"unusual: {remark}")
    echo(f"{summary.lake} holds {_counts(summary.rows) or 'nothing'}")
    if summary.since_ns is not None and summary.until_ns is not None:
        echo(f"  from {format_time(summary.since_ns)} until {format_time(summary.until_ns)}")


def _is_plain(log: IngestedLog) -> bool:
    return not (log.source.rejects or log.source.odd or log.source.notes)


def _counts(of: Mapping[Name, int]) -> str:
    return ", ".join(plural(rows, kind.removesuffix("s")) for kind, rows in of.items())


def _show_one(log: IngestedLog) -> None:
    source = log.source
    if log.before:
        known = f"{source.name}: read before, on {format_time(source.read_ns)}"
        if log.differing:
            echo(
                f"{known}, with another {' and '.join(log.differing)}: its records and rejects stay"
                " as they were; read the logs into a new lake to change them"
            )
        else:
            echo(f"{known}: nothing to do")
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
        for each in (example for example in log.examples if example.reason == reason):
            where = f"line {each.line}: " if each.line else ""  # 0: the text as a whole
            echo(f"    {where}{each.text[:100]}")
    if source.rejects:
        echo(f"  all of them are in rejects/{source.id}.jsonl")
    for note in source.notes:
        echo(f"  note: {note}")


class SynthReport(msgspec.Struct, frozen=True):
    """Output of `--json`; the lists of the truth are in truth.json."""

    directory: str
    files: list[str]
    jobs: int
    findings: int
    truth: dict[str, float | int | str | None]


def synth(
    directory: Path,
    /,
    *,
    shape: str = "rsc1",
    days: float = 28.0,
    seed: int = 0,
    nodes: int | None = None,
    json: bool = False,
) -> int:
    """Generate logs of a cluster with known ground truth.

    Writes sacct.txt, health.jsonl and tables of nodes, repairs and outages, with
    the mapping files that `outlast fleet ingest` needs. truth.json holds the true
    rates, causes and lemon nodes.

    Parameters
    ----------
    directory
        New directory. It appears when it is complete.
    shape
        Model of the cluster: rsc1 (2,048 nodes) or rsc2 (1,024) of Kokolis et al. 2025, or
        rsc1-eventful, with failure rates that change over time.
    days
        Length of the logs in days.
    seed
        Random seed. The same seed gives the same logs.
    nodes
        Number of nodes, with jobs in proportion (default: by --shape).
    json
        Print one JSON object instead of text.
    """
    from outlast.fleet.synth.synthetic_cluster import make_cluster, write_files

    refuse_existing(directory)
    try:
        with _progress(_TEXT, BarColumn(), TaskProgressColumn(), total=1.0) as show:
            tables, truth = make_cluster(
                shape, days, seed, nodes, lambda share: show("running", share)
            )
            files = write_files(tables, truth, directory, lambda share: show("writing", share))
    except KeyboardInterrupt:
        echo_error(f"outlast: interrupted: nothing was written to {directory}")
        return EXIT_INTERRUPTED
    jobs, findings = tables.jobs.collect().height, tables.findings.collect().height
    _show_truth(
        SynthReport(str(directory), files, jobs, findings, _truth_summary(truth)), json=json
    )
    return EXIT_DONE


def _truth_summary(truth: GroundTruth) -> dict[str, float | int | str | None]:
    fields = msgspec.to_builtins(truth)
    counts = {name: len(each) for name, each in fields.items() if isinstance(each, list | dict)}
    return {name: counts.get(name, each) for name, each in fields.items()}


def _show_truth(report: SynthReport, *, json: bool) -> None:
    if json:
        print_json(report)
        return
    truth = report.truth
    echo(f"{report.directory}: {', '.join(report.files)}")
    echo(f"{report.jobs:,} attempts of jobs, {report.findings:,} findings")
    rate, counted, node_days = truth["r_f"], truth["failures_counted"], truth["node_days"]
    echo(
        f"true failure rate of jobs above 128 GPUs: {1000 * float(rate or 0):.2f} per 1000"
        f" node-days ({counted} failures that can be counted in {float(node_days or 0):,.0f})"
    )
    echo(
        f"{truth['lemons']} lemons; {truth['failures']} attempts that hardware ended;"
        f" {100 * float(truth['second_order_share'] or 0):.1f} % of the lost goodput is of"
        " preempted jobs"
    )
