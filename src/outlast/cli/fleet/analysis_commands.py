"""Commands that analyse a window of a lake: `outlast fleet report` and `fit`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from msgspec.structs import replace
from rich.padding import Padding
from rich.text import Text

from outlast import __version__
from outlast.atomic_files import refuse_existing, replace_file, write_new
from outlast.cli.output_stream import Printer, count_progress, echo, print_json, write
from outlast.errors import EXIT_DONE, LakeError, OutlastError, StorageError, UsageError
from outlast.fleet.analysis.exposure import LARGE_GPUS, check_size
from outlast.fleet.lake import MANIFEST, Lake, format_time
from outlast.fleet.lake_selection import load_window, resolve_cluster
from outlast.log_records import COST_NAMES
from outlast.process_pool import ProcessPool
from outlast.text_formatting import duration, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from outlast.fleet.analysis.fitted_rates import FittedRates
    from outlast.fleet.report.fleet_report import DrawnReport, FleetReport
    from outlast.fleet.report.report_sections import DrawnSection


def report(
    lake: Path,
    /,
    *,
    out: Path | None = None,
    since: str | None = None,
    until: str | None = None,
    cluster: str | None = None,
<<<<<<< HEAD
    metrics_file: Path | None = None,
=======
    partition: str | None = None,
    above_gpus: int = LARGE_GPUS,
>>>>>>> fbe6b718 (Report and fit one partition, and jobs above a size)
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
    since
        Start of the period, for example 2024-05-01 (UTC without a time zone; default: the first
        record).
    until
        End of the period, exclusive (default: the last record).
    cluster
        Cluster to report on, if the lake has several; '' for records without a cluster name.
<<<<<<< HEAD
    metrics_file
        Write the figures into this file, for Prometheus' node exporter; --out may be omitted.
=======
    partition
        Partition of the scheduler whose jobs alone count (default: all).
    above_gpus
        Number of GPUs above which a job counts as large: failure rates are of large jobs.
>>>>>>> fbe6b718 (Report and fit one partition, and jobs above a size)
    json
        Print the analyses as one JSON object; then --out may be omitted.
    """
    if out is None and metrics_file is None and not json:
        raise UsageError("give --out report.html, or --json, or --metrics-file FILE")
    if out is not None:
        _check_output(out)
<<<<<<< HEAD
    export = _metrics_writer(metrics_file)
=======
    check_size(above_gpus)
>>>>>>> fbe6b718 (Report and fit one partition, and jobs above a size)
    opened = Lake.open(lake)
    notes: list[str] = []
    tables = load_window(opened, since, until, cluster=cluster, partition=partition, notes=notes)
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
            cluster=resolve_cluster(opened, cluster),
            notes=notes,
            above_gpus=above_gpus,
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


def _metrics_writer(path: Path | None) -> Callable[[FleetReport], None]:
    """Return what writes the metrics of a report. Raises UsageError."""
    if path is None:
        return lambda _: None
    from outlast.fleet.report.report_metrics import report_metrics  # an optional package
    from outlast.telemetry.metrics.metrics_file import check_metrics_file, write_metrics

    check_metrics_file(path, "nothing was written")
    return lambda report: write_metrics(path, report_metrics(report))


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


FORMAT = "outlast-rates"
VERSION = 1
Value = str | int | float
COMMENT = (
    "# Measured by `outlast fleet fit`; `outlast plan ... --rates FILE` takes [failures] and",
    "# [scenario]; its flags take precedence. The other tables are for people.",
)


class RatesSource(NamedTuple):
    """Origin of the figures. `digest`: of the lake's list of files."""

    lake: str
    digest: str


def format_rates(rates: FittedRates, source: RatesSource) -> str:
    """Return the whole file."""
    span = f"{format_time(rates.since_ns)} to {format_time(rates.until_ns)}"
    name = Path(source.lake).name or "here"
    lines = [*COMMENT, *_toml_lines({"format": FORMAT, "version": VERSION, "name": name})]
    lines += _toml_table("failures", _failure_values(rates, span))
    lines += _toml_table("scenario", rates.scenario)
    for key, one in rates.measured.items():
        values = {"value": one.value, "low": one.low, "high": one.high, "count": one.count}
        lines += _toml_table(f"measured.{key}", {**values, "said": one.description})
    lines += _toml_table("causes", {cause.cause: round(cause.share, 6) for cause in rates.causes})
    lines += _toml_table("provenance", _provenance_values(rates, source, span))
    return "\n".join([*lines, ""])


def _failure_values(rates: FittedRates, span: str) -> dict[str, Value | None]:
    rate = rates.rate
    return {
        "per_gpu_second": rate.per_gpu_second,
        "low_per_gpu_second": rate.low_per_gpu_second,
        "high_per_gpu_second": rate.high_per_gpu_second,
        "per_1000_node_days": rate.per_1000_node_days,
        "weight_failures": rate.weight_failures,
        "failures": rate.failures,
        "node_days": rate.node_days,
        "dispersion": rate.dispersion,
        "source": f"{plural(rate.failures, 'failure')} in {rate.node_days:,.0f} node-days of"
        f" {rate.basis}, {span}",
    }


def _provenance_values(
    rates: FittedRates, source: RatesSource, span: str
) -> dict[str, Value | None]:
    from outlast.fleet.analysis.confidence_intervals import CONVENTION
    from outlast.fleet.analysis.failure_attribution import AFTER_S, BEFORE_S
    from outlast.fleet.analysis.fitted_rates import OUTAGES

    return {
        "lake": source.lake,
        "digest": source.digest,
        "window": span,
        "outlast": __version__,
        "failure": "start of an outage, since no job failed"
        if rates.rate.basis == OUTAGES
        else "NODE_FAIL; FAILED or REQUEUED with a finding of severity now on a node of the job"
        f" from {BEFORE_S} s before its end to {AFTER_S} s after it",
        "interval": f"90 %, of {CONVENTION}",
        "weight_failures": "failures over dispersion, the larger one by job runs or by days",
        "notes": "; ".join(rates.notes),
    }


def _toml_table(name: str, values: Mapping[str, Value | None]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield from _toml_lines(values)


def _toml_lines(values: Mapping[str, Value | None]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None:
            name = (
                key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else None
            )
            yield f"{name or _toml_text(key)} = {_toml_value(value)}"


def _toml_value(value: Value) -> str:
    if isinstance(value, str):
        return _toml_text(value)
    return repr(value)


def _toml_text(value: str) -> str:
    """Return a basic string of TOML: a JSON string with DEL escaped."""
    printed = value.encode(errors="replace").decode()  # a path may hold what no text does
    return json.dumps(printed, ensure_ascii=False).replace("\x7f", "\\u007f")


def lake_digest(lake: Path) -> str:
    """Return the digest of the lake's list of files, which identifies its content.

    Raises LakeError.
    """
    try:
        return xxhash.xxh3_128_hexdigest((lake / MANIFEST).read_bytes())
    except OSError as error:
        raise LakeError(f"{lake / MANIFEST} cannot be read: {error.strerror}") from error


SECONDS = ("repair", "queue", "window", *COST_NAMES)  # of measured values


def fit(
    lake: Path,
    /,
    *,
    out: Path | None = None,
    since: str | None = None,
    until: str | None = None,
    cluster: str | None = None,
    partition: str | None = None,
    above_gpus: int = LARGE_GPUS,
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
    since
        Start of the period, for example 2024-05-01 (UTC without a time zone; default: the first
        record).
    until
        End of the period, exclusive (default: the last record).
    cluster
        Cluster to measure, if the lake has several; '' for records without a cluster name.
    partition
        Partition of the scheduler whose jobs alone count (default: all).
    above_gpus
        Number of GPUs above which a job counts as large: failure rates are of large jobs.
    json
        Print one JSON object.
    """
    from outlast.fleet.analysis import exposure
    from outlast.fleet.analysis.fitted_rates import fit_rates

    check_size(above_gpus)
    opened = Lake.open(lake)
    if out:
        write_new(out, None)
    with Printer(stderr=True).status("measuring"):
        notes: list[str] = []
        tables = load_window(
            opened, since, until, cluster=cluster, partition=partition, notes=notes
        )
        notes += [*exposure.dominant_attempts(tables), *exposure.inventory_notes(tables)]
        rates = fit_rates(tables, above_gpus=above_gpus)
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
