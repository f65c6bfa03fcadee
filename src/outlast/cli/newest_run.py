"""Run directory of commands that are not given one: the newest in the directory of runs."""

from __future__ import annotations

from pathlib import Path

from outlast import config
from outlast.cli.output_stream import echo_error
from outlast.errors import UsageError

LAST = Path("last")


def chosen_run(given: Path | None) -> Path:
    """Return the run directory that was given. Without one, or for `last`, return the newest run,
    and name it on stderr. Raises UsageError if there is none."""
    if given is not None and (given != LAST or given.exists()):
        return given
    found = newest_run()
    echo_error(f"outlast: the newest run: {found}")
    return found


def newest_run() -> Path:
    """Return the run below the directory of runs that was started or resumed last. Raises
    UsageError if there is none."""
    runs = config.run_dir_default()
    found = [(path.stat().st_mtime_ns, path.parent) for path in runs.glob("*/run.json")]
    if not found:
        raise UsageError(
            f"no run directory was given, and {runs}/ holds none; give the directory that"
            " `outlast run` printed at its start"
        )
    return max(found)[1]
