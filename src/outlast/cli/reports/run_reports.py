"""`outlast explain`, `outlast summary` and `outlast events`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from outlast.cli.newest_run import chosen_run
from outlast.cli.output_stream import Printer, echo, echo_error, pour, print_json
from outlast.errors import EXIT_DONE, OutlastError, UsageError
from outlast.events import AnyEvent, Event, Fault, RunEnded, Scheduled
from outlast.telemetry import event_store, incident_explanation
from outlast.telemetry.event_store import life_of
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.incident_explanation import finding_lines, open_findings, saves
from outlast.telemetry.run_summary import summarise
from outlast.telemetry.run_watch import RunWatch
from outlast.telemetry.summary_tables import render
from outlast.text_formatting import frame_cause, resume_hint

_FILES_MAX = 64  # more take seconds to read: only the command to read them is printed


def trace_lines(run_dir: Path, incidents: Iterable[Incident]) -> Iterator[str]:
    """Yield a line for each of these incidents that has dumps."""
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
        return f"flight recorders are in {folder}: pip install 'outlast[fleet]' adds the reader"
    except OutlastError as error:
        return f"the flight recorders in {folder} are inconclusive: {error}"


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `saves`: the last schedule; null where nothing was to be chosen."""

    version: int = 1
    saves: Scheduled | None
    incidents: list[Incident]


def explain(run_dir: Path | None = None, incident: int | None = None, *, json: bool = False) -> int:
    """Explain incidents: cause, decision, reason and cost.

    Also prints how each failure was detected, earlier findings of node checks, and
    the save schedule if the run chose it (auto).

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start (default: the newest).
    incident
        Number of one incident (default: all).
    json
        Print one JSON object instead of boxes.
    """
    run_dir = chosen_run(run_dir)
    history = read_history(run_dir)
    events, found = history.events, incidents(history)
    scheduled = next((event for event in reversed(events) if isinstance(event, Scheduled)), None)
    if incident is not None:
        chosen = [one for one in found if one.number == incident]
        if not chosen:
            numbers = f"1 to {len(found)}" if found else "none: no failure occurred"
            raise UsageError(f"{run_dir} has no incident {incident} (it has {numbers})")
        found = chosen
    if json:
        print_json(Explained(saves=scheduled, incidents=found))
        return EXIT_DONE
    if scheduled is not None and incident is None:
        echo(saves(scheduled))
    if found:
        incident_explanation.explain(found, Printer(), life_of(run_dir, events))
        for line in (*finding_lines(found, events), *trace_lines(run_dir, found)):
            echo(line)
    else:
        ended = next((event for event in reversed(events) if isinstance(event, RunEnded)), None)
        framed = frame_cause(ended.outcome, ended.cause) if ended else ""
        text = f"no failure was recorded before the run ended:\n{framed}"
        echo(f"{run_dir}: {text if framed else 'no failure occurred.'}")
    for line in open_findings(events) if incident is None else ():
        echo(line)
    return EXIT_DONE


def summary(run_dir: Path | None = None, *, json: bool = False) -> int:
    """Summarise a run: steps, incidents, time by bucket, ETTR and goodput.

    Of a running run: the time so far.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start (default: the newest).
        The run may still be running.
    json
        Print one JSON object instead of tables.
    """
    result = summarise(chosen_run(run_dir))
    if json:
        print_json(result)
    else:
        render(result, Printer())
    return EXIT_DONE


_FIELDS_APART = {"t_ns", "type"}


def events(run_dir: Path | None = None, *, follow: bool = False, json: bool = False) -> int:
    """List a run's events by time, over all its workers.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start (default: the newest).
        The run may still be running.
    follow
        Print new events as they come, until the run ends or its launcher dies.
    json
        Print one JSON object per line.
    """
    run_dir = chosen_run(run_dir)
    listed = _following(run_dir) if follow else event_store.read_events(run_dir)
    _print(listed, json=json, live=follow)
    return EXIT_DONE


def _following(run_dir: Path) -> Iterator[AnyEvent]:
    watch = RunWatch(run_dir)
    for event in event_store.follow(run_dir, watch.stop, idle=watch.look):
        yield event
        watch.take(event)
    if watch.died:
        echo_error(
            f"outlast: {run_dir}: the launcher died before the run ended; these are all events;"
            f" {resume_hint(str(run_dir))}"
        )


def _print(listed: Iterable[AnyEvent], *, json: bool, live: bool) -> None:
    encode = msgspec.json.Encoder().encode
    pour((encode(event).decode() if json else format_event(event) for event in listed), live=live)


def format_event(event: Event) -> str:
    """Return one event on one line: local time, name, and its fields as key=value."""
    when = datetime.fromtimestamp(event.t_ns / 1e9, tz=UTC).astimezone()
    values = ((name, getattr(event, name)) for name in event.__struct_fields__)
    fields = [f"{name}={_value(value)}" for name, value in values if name not in _FIELDS_APART]
    return " ".join([f"{when:%H:%M:%S.%f}"[:-3], f"{type(event).__name__:<16}", *fields])


def _value(value: object) -> str:
    if isinstance(value, Fault):
        return f"<{value.kind} rank={value.seat} worker={value.worker or '-'}: {value.detail}>"
    if isinstance(value, str) and (not value or any(c.isspace() for c in value)):
        return repr(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
