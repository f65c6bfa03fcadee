"""`outlast summary`: what a run came to."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from outlast.errors import EXIT_DONE
from outlast.observe.summary import summarise
from outlast.observe.tables import render


def summary(run_dir: Path, *, json: bool = False) -> int:
    """Steps, incidents by cause, time by bucket, ETTR and goodput.

    Parameters
    ----------
    run_dir
        The directory that `outlast run` printed at its start. The run may be alive, done or dead.
    json
        One JSON object instead of tables.
    """
    result = summarise(run_dir)
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        render(result)
    return EXIT_DONE
