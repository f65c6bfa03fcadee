"""`outlast explain`: incidents as stories."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console

from outlast.errors import EXIT_DONE, UsageError
from outlast.observe.explain import explain as tell
from outlast.observe.incidents import incidents
from outlast.observe.store import read_events


def explain(run_dir: Path, incident: int | None = None, *, json: bool = False) -> int:
    """What broke, how it was noticed, what was decided and why, and what it cost.

    Parameters
    ----------
    run_dir
        The directory that `outlast run` printed at its start.
    incident
        Its number; all of them when left out.
    json
        One JSON array instead of frames.
    """
    found = incidents(read_events(run_dir))
    if incident is not None:
        chosen = [one for one in found if one.number == incident]
        if not chosen:
            known = f"1 to {len(found)}" if found else "none: nothing broke"
            raise UsageError(f"{run_dir} has no incident {incident} (it has {known})")
        found = chosen
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    elif found:
        tell(found, Console())
    else:
        Console().print(f"{run_dir}: nothing broke.", markup=False, highlight=False, soft_wrap=True)
    return EXIT_DONE
