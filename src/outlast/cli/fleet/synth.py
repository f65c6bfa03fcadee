"""`outlast fleet synth`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from outlast.atomic_files import refuse_existing
from outlast.cli.output_stream import Printer, echo, echo_error, print_json
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED
from outlast.fleet.synth.synthetic_cluster import GroundTruth, make_cluster, write_files


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
    refuse_existing(directory)
    try:
        with _progress() as show:
            tables, truth = make_cluster(
                shape, days, seed, nodes, lambda share: show("running", share)
            )
            files = write_files(tables, truth, directory, lambda share: show("writing", share))
    except KeyboardInterrupt:
        echo_error(f"outlast: interrupted: nothing was written to {directory}")
        return EXIT_INTERRUPTED
    jobs, findings = tables.jobs.collect().height, tables.findings.collect().height
    _show(SynthReport(str(directory), files, jobs, findings, _summary(truth)), json=json)
    return EXIT_DONE


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    console = Printer(stderr=True)
    if not console.is_terminal:
        yield lambda _what, _share: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _summary(truth: GroundTruth) -> dict[str, float | int | str | None]:
    fields = msgspec.to_builtins(truth)
    counts = {name: len(each) for name, each in fields.items() if isinstance(each, list | dict)}
    return {name: counts.get(name, each) for name, each in fields.items()}


def _show(report: SynthReport, *, json: bool) -> None:
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
        f" {100 * float(truth['second_order_share'] or 0):.1f} % of the lost goodput is of jobs"
        " that made room for others"
    )
