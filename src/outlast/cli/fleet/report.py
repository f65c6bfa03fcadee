"""`outlast fleet report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from outlast.atomic_files import refuse_existing, replace_file
from outlast.cli.output_stream import count_progress, echo, print_json
from outlast.errors import EXIT_DONE, OutlastError, StorageError, UsageError
from outlast.fleet.store.lake import Lake
from outlast.fleet.store.lake_selection import load_window, resolve_cluster
from outlast.process_pool import ProcessPool

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    json
        Print the analyses as one JSON object; then --out may be omitted.
    """
    if out is None and not json:
        raise UsageError("give --out report.html, or --json")
    if out is not None:
        _check_output(out)
    opened = Lake.open(lake)
    notes: list[str] = []
    tables = load_window(opened, since, until, cluster=cluster, notes=notes)
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
            on_progress=advance,
            on_section=on_section,
        )
        figures = drawer.drawn() if drawer else {}
    if out is not None:
        _write(found, figures, out)
    if json:
        print_json(found.report)
    elif out is not None:
        _show(found.report, out)
    return EXIT_DONE


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
    """Draws figures in a process of its own while the next analysis runs.

    Threads of this process would take turns with the analysis.
    """

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


def _write(drawn: DrawnReport, figures: dict[str, str], out: Path) -> None:
    from outlast.fleet.report.fleet_report import render_page

    try:
        replace_file(out, render_page(drawn, figures).encode())
    except OSError as error:
        raise StorageError(
            f"--out {out} could not be written: {error.strerror or error}"
        ) from error


def _show(found: FleetReport, out: Path) -> None:
    for headline in found.headlines:
        echo(Text.assemble((f"{headline.figure:>10}", "bold"), f"  {headline.description}"))
        echo(Padding(Text(headline.rests_on, "dim"), (0, 0, 0, 12)))
    for note in found.notes:
        echo(Text(f"note: {note}", "yellow"))
    echo(f"written to {out}")
