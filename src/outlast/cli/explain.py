"""`outlast explain`: incidents as stories, and when the run saves."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.cli.stream import Printer, as_json, say
from outlast.cli.traced import traced
from outlast.errors import EXIT_DONE, UsageError
from outlast.events import RunEnded, Scheduled
from outlast.telemetry.event_store import read_events
from outlast.telemetry.incident_explanation import explain as tell
from outlast.telemetry.incident_explanation import finding_lines, saves
from outlast.telemetry.incidents import Incident, incidents
from outlast.telemetry.launcher_liveness import life_of
from outlast.text_formatting import frame_cause


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `saves`: as last decided; null where nothing was to be chosen."""

    version: int = 1
    saves: Scheduled | None
    incidents: list[Incident]


def explain(run_dir: Path, incident: int | None = None, *, json: bool = False) -> int:
    """Tell an incident: what broke, what was decided and why, what it cost.

    And how it was noticed, and what node checks had said by then. Before all
    incidents: when the run saves, where that is its own to choose.

    Parameters
    ----------
    run_dir
        The directory that `outlast run` printed at its start.
    incident
        Its number; all of them when left out.
    json
        One JSON object instead of frames.
    """
    events = read_events(run_dir)
    found = incidents(events)
    scheduled = next((one for one in reversed(events) if isinstance(one, Scheduled)), None)
    if incident is not None:
        chosen = [one for one in found if one.number == incident]
        if not chosen:
            known = f"1 to {len(found)}" if found else "none: nothing broke"
            raise UsageError(f"{run_dir} has no incident {incident} (it has {known})")
        found = chosen
    if json:
        as_json(Explained(saves=scheduled, incidents=found))
        return EXIT_DONE
    if scheduled is not None and incident is None:
        say(saves(scheduled))
    if found:
        tell(found, Printer(), life_of(run_dir, events))
        for line in (*finding_lines(found, events), *traced(run_dir, found)):
            say(line)
    else:
        ended = next((one for one in reversed(events) if isinstance(one, RunEnded)), None)
        framed = frame_cause(ended.outcome, ended.cause) if ended else ""
        said = f"no failure was recorded before the run ended:\n{framed}"
        say(f"{run_dir}: {said if framed else 'nothing broke.'}")
    return EXIT_DONE
