"""`outlast report`: figure and page of a run, as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.atomic_files import replace_file
from outlast.cli.newest_run import chosen_run
from outlast.cli.output_stream import echo, echo_error, print_json
from outlast.errors import EXIT_DONE, RunDirError, StorageError


class ReportFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`: the written files, "" for one whose package is missing."""

    version: int = 1
    figure: str
    page: str


def report(run_dir: Path | None = None, *, out: Path | None = None, json: bool = False) -> int:
    """Write a run's figure and page into files.

    `report.svg` has the loss and the time of each rank, with incidents;
    `report.html` is the page of `outlast view`, which a browser opens from disk.
    Earlier reports are replaced.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start (default: the newest).
    out
        Directory for both files (default: the run directory).
    json
        Print one JSON object.
    """
    run_dir = chosen_run(run_dir)
    folder = run_dir if out is None else out
    if not folder.is_dir():
        raise RunDirError(f"there is no directory {folder}; nothing was written")
    reported = ReportFiles(
        figure=_written(folder / "report.svg", "figures", lambda path: _draw(run_dir, path)),
        page=_written(folder / "report.html", "view", lambda path: _write_page(run_dir, path)),
    )
    if json:
        print_json(reported)
    else:
        for path in filter(None, (reported.figure, reported.page)):
            echo(path)
    return EXIT_DONE


def _written(path: Path, extra: str, make: Callable[[Path], None]) -> str:
    """Return the path that `make` has written, "" where a package is missing. Raises StorageError,
    RunDirError."""
    try:
        make(path)
    except ModuleNotFoundError as error:
        echo_error(
            f"outlast: no {path.name}: {error.name} is missing; pip install 'outlast[{extra}]'"
        )
        return ""
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return str(path)


def _draw(run_dir: Path, path: Path) -> None:
    from outlast.telemetry.run_figure import report as draw_report

    draw_report([(run_dir, run_dir.absolute().name)], path)


def _write_page(run_dir: Path, path: Path) -> None:
    from outlast.cli.reports.view import exported_page

    replace_file(path, exported_page(run_dir, run_dir.absolute().name, 0.0).encode())
