"""`outlast explain`: incidents in words, and the save schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from outlast.cli.output_stream import Printer, as_json, say
from outlast.errors import EXIT_DONE, OutlastError, UsageError
from outlast.events import RunEnded, Scheduled
from outlast.telemetry.event_store import read_events
from outlast.telemetry.incident_explanation import explain as tell
from outlast.telemetry.incident_explanation import finding_lines, saves
from outlast.telemetry.incidents import Incident, incidents
from outlast.telemetry.launcher_liveness import life_of
from outlast.text_formatting import frame_cause

_FILES_MAX = 64  # more take seconds to read: then the command that reads them is named alone


def trace_lines(run_dir: Path, incidents: Iterable[Incident]) -> Iterator[str]:
    """Yield a line for each of these incidents of which there are dumps."""
    folders = [each for each in run_dir.glob("traces/*") if each.is_dir()]
    for incident in incidents:
        details = " ".join(fault.detail for fault in incident.faults)
        for folder in sorted(folders):
            if folder.name in details:
                yield f"incident {incident.number}: {_trace_verdict(folder)}"


def _trace_verdict(folder: Path) -> str:
    more = f"(`outlast fleet trace {folder}`)"
    if sum(1 for _ in folder.iterdir()) > _FILES_MAX:
        return f"the flight recorders of its ranks are in {folder} {more}"
    try:
        from outlast.fleet.flight_recorder.hang_report import analyse_dumps
        from outlast.fleet.flight_recorder.recorder_dumps import read_dumps

        return f"{analyse_dumps(read_dumps([folder])).verdict} {more}"
    except ModuleNotFoundError:
        return (
            f"flight recorders are in {folder}: pip install 'outlast[fleet]' adds what reads them"
        )
    except OutlastError as error:
        return f"the flight recorders in {folder} do not tell: {error}"


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `saves`: the last schedule; null where nothing was to be chosen."""

    version: int = 1
    saves: Scheduled | None
    incidents: list[Incident]


def explain(run_dir: Path, incident: int | None = None, *, json: bool = False) -> int:
    """Explain incidents: cause, decision, reason and cost.

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
            numbers = f"1 to {len(found)}" if found else "none: nothing broke"
            raise UsageError(f"{run_dir} has no incident {incident} (it has {numbers})")
        found = chosen
    if json:
        as_json(Explained(saves=scheduled, incidents=found))
        return EXIT_DONE
    if scheduled is not None and incident is None:
        say(saves(scheduled))
    if found:
        tell(found, Printer(), life_of(run_dir, events))
        for line in (*finding_lines(found, events), *trace_lines(run_dir, found)):
            say(line)
    else:
        ended = next((one for one in reversed(events) if isinstance(one, RunEnded)), None)
        framed = frame_cause(ended.outcome, ended.cause) if ended else ""
        text = f"no failure was recorded before the run ended:\n{framed}"
        say(f"{run_dir}: {text if framed else 'nothing broke.'}")
    return EXIT_DONE
