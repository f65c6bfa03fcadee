"""Commands that analyse a window of a lake: `outlast fleet report` and `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter
from msgspec.structs import replace
from rich.padding import Padding
from rich.text import Text

from outlast.atomic_files import refuse_existing, replace_file, write_new
from outlast.cli.output_stream import Printer, count_progress, echo, print_json, write
from outlast.errors import EXIT_DONE, OutlastError, StorageError, UsageError
from outlast.fleet.analysis.exposure import LARGE_GPUS, check_size
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import load_window, resolve_cluster
from outlast.log_records import COST_NAMES
from outlast.process_pool import ProcessPool
from outlast.text_formatting import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from outlast.fleet.analysis.fitted_rates import FittedRates
    from outlast.fleet.record_tables import Tables
    from outlast.fleet.report.fleet_report import DrawnReport, FleetReport
    from outlast.fleet.report.report_sections import DrawnSection


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LakeSelection:
    """Records of a lake that are analysed.

    Attributes
    ----------
    since
        Start of the period, for example 2024-05-01 (UTC without a time zone; default: the first
        record).
    until
        End of the period, exclusive (default: the last record).
    cluster
        Cluster to analyse, if the lake has several; '' for records without a cluster name.
    partition
        Partition of the scheduler whose jobs alone count (default: all).
    above_gpus
        Number of GPUs above which a job counts as large: failure rates are of large jobs.
    """

    since: str | None = None
    until: str | None = None
    cluster: str | None = None
    partition: str | None = None
    above_gpus: int = LARGE_GPUS

    def load(self, lake: Lake, notes: list[str]) -> Tables:
        """Return the records; `notes` gets what was dropped or merged."""
        return load_window(
            lake,
            self.since,
            self.until,
            cluster=self.cluster,
            partition=self.partition,
            notes=notes,
        )


NO_SELECTION = LakeSelection()


def report(
    lake: Path,
    /,
    *,
    out: Path | None = None,
    selection: LakeSelection = NO_SELECTION,
    metrics_file: Path | None = None,
    json: bool = False,
) -> int:
    """Write all analyses of a lake as one HTML page with figures.

    The page is one HTML file without scripts or external resources.

    Parameters
    ----------
    lake
        Directory that `outlast fleet ingest` wrote.
    out
        New file for the page (.html).
    metrics_file
        Write the figures into this file, for Prometheus' node exporter; --out may be omitted.
    json
        Print the analyses as one JSON object; then --out may be omitted.
    """
    if out is None and metrics_file is None and not json:
        raise UsageError("give --out report.html, or --json, or --metrics-file FILE")
    if out is not None:
        _check_output(out)
    export = _metrics_writer(metrics_file, selection)
    check_size(selection.above_gpus)
    opened = Lake.open(lake)
    notes: list[str] = []
    tables = selection.load(opened, notes)
    with count_progress("analyses") as advance, Drawer() if out else nullcontext() as drawer:
        from outlast.fleet.report.fleet_report import (
            build_report as reported,  # while the other process starts
        )
        from outlast.fleet.report.fleet_report import hidden_record_notes

        notes += hidden_record_notes(opened.manifest.sources)
        on_section = drawer.take if drawer else lambda _: None
        found = reported(
            tables,
            str(lake),
            cluster=resolve_cluster(opened, selection.cluster),
            notes=notes,
            above_gpus=selection.above_gpus,
            on_progress=advance,
            on_section=on_section,
        )
        figures = drawer.drawn() if drawer else {}
    if out is not None:
        _write_page(found, figures, out)
    export(found.report)
    if json:
        print_json(found.report)
    elif out is not None:
        _show_report(found.report, out)
    else:
        echo(f"metrics written to {metrics_file}")
    return EXIT_DONE


def _metrics_writer(path: Path | None, selection: LakeSelection) -> Callable[[FleetReport], None]:
    """Return what writes the metrics of a report. Raises UsageError."""
    if path is None:
        return lambda _: None
    from outlast.fleet.report.report_metrics import report_metrics  # an optional package
    from outlast.telemetry.metrics.metrics_file import check_metrics_file, write_metrics

    check_metrics_file(path, "nothing was written")
    partition, size = selection.partition or "", selection.above_gpus

    def export(report: FleetReport) -> None:
        write_metrics(path, report_metrics(report, partition=partition, above_gpus=size))

    return export


def _check_output(out: Path) -> None:
    """Check, before an hour's work, that figures can be drawn and the page written."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: the name must end in .html; nothing was written")
    refuse_existing(out)
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.absolute().parent}")


class Drawer:
    """Draws figures while the next analysis runs, in a process of its own: threads take turns."""

    def __init__(self) -> None:
        self._pool = ProcessPool(1)
        self._figures: dict[str, Future[str]] = {}
        self._pool.submit(_import_drawing)

    def __enter__(self) -> Drawer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, section: DrawnSection) -> None:
        """Draw a section's figure in another process, if it has one."""
        if section.draw:
            with _drawer_alive():
                figure = self._pool.submit(_svg, section.draw, section.section.key)
            self._figures[section.section.key] = figure

    def drawn(self) -> dict[str, str]:
        """Return the SVG of each figure by the key of its section; waits for them."""
        with _drawer_alive():
            return {key: figure.result() for key, figure in self._figures.items()}


@contextmanager
def _drawer_alive() -> Iterator[None]:
    """Convert the death of the pool's process into an OutlastError.

    The pool reports it when it gets another task or when a figure is requested.
    """
    try:
        yield
    except BrokenExecutor as error:
        raise OutlastError(
            "the process that draws the figures was killed, possibly out of memory; nothing"
            " was written; --json without --out draws no figures"
        ) from error


def _import_drawing() -> None:
    """Import the drawing modules (about 0.5 s) while there is nothing to draw yet."""
    from outlast import figure_style
    from outlast.fleet.report import report_figures  # noqa: F401

    figure_style.svg(_draw_nothing, "")


def _draw_nothing(figure: Figure) -> None:
    figure.subplots().set_title("0")


def _svg(draw: Callable[[Figure], None], key: str) -> str:
    from outlast import figure_style

    return figure_style.svg(draw, key)


def _write_page(drawn: DrawnReport, figures: dict[str, str], out: Path) -> None:
    from outlast.fleet.report.fleet_report import render_page

    try:
        replace_file(out, render_page(drawn, figures).encode())
    except OSError as error:
        raise StorageError(
            f"--out {out} could not be written: {error.strerror or error}"
        ) from error


def _show_report(found: FleetReport, out: Path) -> None:
    for headline in found.headlines:
        echo(Text.assemble((f"{headline.figure:>10}", "bold"), f"  {headline.description}"))
        echo(Padding(Text(headline.rests_on, "dim"), (0, 0, 0, 12)))
    for note in found.notes:
        echo(Text(f"note: {note}", "yellow"))
    echo(f"written to {out}")


SECONDS = ("repair", "queue", "window", *COST_NAMES)  # of measured values


def fit(
    lake: Path,
    /,
    *,
    out: Path | None = None,
    selection: LakeSelection = NO_SELECTION,
    json: bool = False,
) -> int:
    """Measure failure and repair rates for `outlast plan --rates`.

    Writes a TOML file in which each figure has its 90 % interval, its number of
    observations and its source.

    Parameters
    ----------
    lake
        Directory that `outlast fleet ingest` wrote.
    out
        New file for the rates (default: stdout).
    json
        Print one JSON object.
    """
    from outlast.fleet.analysis import exposure
    from outlast.fleet.analysis.fitted_rates import fit_rates
    from outlast.fleet.rates_file import RatesSource, format_rates, lake_digest

    check_size(selection.above_gpus)
    opened = Lake.open(lake)
    if out:
        write_new(out, None)
    with Printer(stderr=True).status("measuring"):
        notes: list[str] = []
        tables = selection.load(opened, notes)
        notes += [*exposure.dominant_attempts(tables), *exposure.inventory_notes(tables)]
        rates = fit_rates(tables, above_gpus=selection.above_gpus)
        rates = replace(rates, notes=[*notes, *rates.notes])
    text = format_rates(rates, RatesSource(str(lake), lake_digest(lake)))
    if out:
        write_new(out, text)
    if json:
        print_json(rates)
    elif out:
        _show_rates(rates, out)
    else:
        write(text)
    return EXIT_DONE


def _show_rates(rates: FittedRates, out: Path) -> None:
    rate = rates.rate
    gpu_hours = 3600 * rate.per_gpu_second
    echo(
        f"{rate.per_1000_node_days:.2f} failures in 1000 node-days: {rate.failures:,} in"
        f" {rate.node_days:,.0f} node-days of {rate.basis}"
    )
    echo(
        f"{gpu_hours:.3g} a GPU-hour, {3600 * rate.low_per_gpu_second:.3g} to"
        f" {3600 * rate.high_per_gpu_second:.3g} with 90 % if they were independent; as certain as"
        f" {rate.weight_failures:.3g} such failures"
    )
    for key, one in rates.measured.items():
        format_value = duration if key in SECONDS else "{:.3g}".format
        band = ""
        if one.low is not None and one.high is not None:
            band = f"{format_value(one.low)} to {format_value(one.high)} with 90 %"
        echo(Text.assemble((f"{key:<12}", "bold"), f"  {format_value(one.value):<12}", f"  {band}"))
        echo(Padding(Text(f"{one.description}; counted: {one.count:,}", "dim"), (0, 0, 0, 14)))
    for note in rates.notes:
        echo(Text(f"note: {note}", "yellow"))
    echo(f"written to {out}; next: outlast plan advise --gpus 16384 --rates {out}")
