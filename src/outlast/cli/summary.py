"""`outlast summary`: summary of a run."""

from __future__ import annotations

from pathlib import Path

from outlast.cli.output_stream import Printer, as_json
from outlast.errors import EXIT_DONE
from outlast.telemetry.run_summary import summarise
from outlast.telemetry.summary_tables import render


def summary(run_dir: Path, *, json: bool = False) -> int:
    """Summarise a run: steps, incidents, time by bucket, ETTR and goodput.

    Of one that still runs, so far.

    Parameters
    ----------
    run_dir
        The directory that `outlast run` printed at its start. The run may be alive, done or dead.
    json
        One JSON object instead of tables.
    """
    result = summarise(run_dir)
    if json:
        as_json(result)
    else:
        render(result, Printer())
    return EXIT_DONE
