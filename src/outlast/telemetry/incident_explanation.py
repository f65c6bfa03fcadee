"""Explanation of an incident for the engineer on call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from outlast.controller.recovery.recovery_policy import FROM_A_COPY
from outlast.events import SENTINELS, AnyEvent, Fault, Scheduled, Warned
from outlast.telemetry.event_store import Life
from outlast.telemetry.history.incident_course import PHASES, Incident, Phase
from outlast.terminal_tables import layout_grid, number_column, text_column
from outlast.text_formatting import (
    detail_beyond,
    duration,
    error_name,
    fault_text,
    intervals,
    plural,
    rank_and_host,
    short_error,
    size,
    warning,
)

BAR_CELLS = 30
SHOWN_MS_MIN = 0.05
LONG_MS = 10_000  # longer durations are shown in seconds
_NOTICED = {
    "pidfd": "the agent's pidfd reported the end of the process",
    "peer": "a peer reported a broken connection",
    "heartbeat": "its heartbeat stopped for longer than the time limit of a hang",
    "lease": "its host's agent no longer renewed its lease",
    "report": "the worker itself reported it",
    "standstill": "no rank computed or wrote to its log for hang_ceiling_s",
    "audit": "an audit: digests of state that must be equal on these ranks differed",
    "straggler": "all ranks waited for a slow one, and it moved between two steps",
    "check": "a node check had a finding on its device, and the rank moved before a failure",
    "room": "there was a worker for it again, and it came back between two steps",
    "unit": "its unit left: ranks that need each other in collectives leave together",
    "notice": "a notice said that it had to leave, and the rank moved before that",
}
_RUNG = {
    "retry": "retry: every worker kept its seat, the groups were reconnected",
    "migrate": "migrate: a warm spare took the seat in time, its state came from a replica",
    "replace": "replace: another worker took the seat, its state came from a replica",
    "respawn": "respawn: a new worker was started for the seat, its state came from a replica",
    "rebuild": "rebuild: lost shards came from keepers' memory, and the other ranks stayed",
    "rollback": "roll back: new workers started for all ranks from the newest copy in memory",
    "shrink": "shrink: nobody could take the rank, and the others went on without it",
    "regrow": "regrow: the rank came back between two steps, its state came from a replica",
    "relaunch": "restart of the group: all ranks were ended and started again, as torchrun does",
    "restart": "restart: new workers started for all ranks from the newest complete checkpoint",
    "stop": "stop: no rung of the ladder applied",
}
_MEANS: dict[Phase, str] = {
    "notice": "the fault, until it was noticed",
    "report": "groups severed, every worker answered",
    "decide": "decision made and durable",
    "join": "new workers started, models built",
    "connect": "groups of the new generation built",
    "transfer": "state copied, digests checked",
    "redo": "dry steps of joiners, then the step, until every rank had completed it",
}
_MEANS_UNMANAGED: dict[Phase, str] = {
    "notice": "the failure, until it was noticed",
    "decide": "the other ranks ended",
    "join": "the run ended",
    "connect": "all ranks started",
}
_MEANS_AGAIN: dict[Phase, str] = {  # after a roll back or a restart
    "connect": "models built, state read, groups of the new generation built",
    "redo": "lost steps and the interrupted one, until every rank had completed them",
}


def explain(incidents: Sequence[Incident], console: Console, life: Life = "unknown") -> None:
    """Print each incident in a frame; a repeated traceback is only referred to.

    `life`: state of the run, for an incident that is open.
    """
    shown: dict[str, int] = {}
    for incident in incidents:
        console.print(panel(incident, shown, life))


def saves(schedule: Scheduled) -> RenderableType:
    """Return the current save schedule and its reasons as text."""
    title = Text.assemble(("saves", "bold"), f", {_when(schedule.t_ns)}")
    body = Text.assemble((intervals(schedule), "bold"), f"\n{schedule.why}")
    return Panel(body, title=title, title_align="left", border_style="blue", box=box.ROUNDED)


def panel(incident: Incident, shown: dict[str, int], life: Life = "unknown") -> RenderableType:
    """Return one incident as a panel. `shown`: tracebacks printed so far, by incident; extended."""
    cause = incident.cause
    headline_text = "raised " + error_name(cause) if cause.kind == "raised" else fault_text(cause)
    title = Text.assemble((f"incident {incident.number}", "bold"), f", {_when(incident.t_ns)}: ")
    title.append(f"{rank_and_host(cause)} {headline_text}")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for head, text in story(incident, life):
        grid.add_row(head, Text(text))  # no markup: users' text may contain brackets
    parts: list[RenderableType] = [grid, Text(""), _cost(incident)]
    for fault in incident.faults:
        parts += _traceback(fault, incident.number, shown)
    border = "green" if incident.state == "recovered" or incident.is_request else "red"
    return Panel(
        Group(*parts), title=title, title_align="left", border_style=border, box=box.ROUNDED
    )


def _when(t_ns: int) -> str:
    """Format a time with its date: a run may take weeks, and be read weeks later."""
    return f"{datetime.fromtimestamp(t_ns / 1e9, tz=UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def story(incident: Incident, life: Life) -> list[tuple[str, str]]:
    """Return the incident as labels and texts: cause, decision, reason, what was kept."""
    if incident.is_request:
        return _request(incident, life)
    rows = [("what", _broke(incident.cause))]
    rows += [("and", _broke(fault)) for fault in incident.others]
    if incident.echoes:
        witnesses = ", ".join(dict.fromkeys(rank_and_host(fault) for fault in incident.echoes))
        rows.append(("seen by", f"{witnesses}: the connection to a peer broke"))
    generation = f", generation {incident.generation_from}" if incident.is_managed else ""
    rows.append(("where", incident.where + generation))
    how = dict.fromkeys(incident.how)
    rows.append(("noticed", "; ".join(_NOTICED.get(way, way) for way in how)))
    if incident.rung:
        stop = "stop: the ranks were not started again"
        answer = _RUNG.get(incident.rung, incident.rung)
        rows.append(
            ("decided", stop if incident.rung == "stop" and not incident.is_managed else answer)
        )
        rows.append(("why", incident.reason))
        if incident.rule:
            rows.append(("rule", incident.rule))
    rows += [
        ("seat", f"rank {each.seat}: {each.old} was replaced by {each.new}")
        for each in incident.replaced
    ]
    rows.append(("kept", _kept(incident)))
    rows.append(("now", _now(incident, life)))
    return rows


def _request(incident: Incident, life: Life) -> list[tuple[str, str]]:
    """Describe a request: no failure and no retry is mentioned."""
    wish = "end" if incident.is_drain else "save the state of"
    rows = [("what", f"a request to {wish} the run: {incident.cause.detail}")]
    rows.append(("where", f"{incident.where}, generation {incident.generation_from}"))
    if incident.rung:
        then = "exit" if incident.is_drain else "continue"
        what = "drain" if incident.is_drain else "save"
        rows.append(
            ("decided", f"{what}: all ranks stop at one place, checkpoint there and {then}")
        )
    rows.append(("kept", "every committed step"))
    if incident.state == "recovered":
        rows.append(
            ("now", f"all ranks were at one place after {duration(incident.total_ms / 1e3)}")
        )
    else:
        rows.append(("now", _now(incident, life)))
    return rows


def _broke(fault: Fault) -> str:
    place = ", ".join(filter(None, (fault.worker, fault.host)))
    text = f"{rank_and_host(fault)} {fault_text(fault)}" + (f" ({place})" if place else "")
    detail = short_error(detail_beyond(fault))
    return f"{text}: {detail}" if detail else text


def _kept(incident: Incident) -> str:
    if not incident.is_managed:
        return "the script's own checkpoints; its steps are unknown to Outlast"
    if not incident.rung:
        done = (
            f"everything committed: all up to phase {incident.n}"
            if incident.n > 0
            else "nothing yet"
        )
        ended = "the run ended" if incident.state == "stopped" else "the events end"
        return f"{done} ({ended} before anything was decided)"
    if incident.committed_steps_lost:
        lost = plural(incident.committed_steps_lost, "committed step")
        kept_steps = _committed(incident) - incident.committed_steps_lost
        kept = f"all up to step {kept_steps}" if kept_steps else "nothing"
        return f"{kept}; {lost} had to be redone"
    if incident.rung == "stop":
        return _kept_by_stop(incident)
    kept = "every committed step" + _of_the_interrupted(incident)
    for copy in incident.copies:
        rate = copy.size_bytes / copy.seconds if copy.seconds else 0.0
        kept += (
            f"\nrank {copy.joiner} got {size(copy.size_bytes)} from rank {copy.donor}"
            f" in {duration(copy.seconds)}" + (f" ({size(int(rate))}/s)" if rate else "")
        )
    return kept


def _kept_by_stop(incident: Incident) -> str:
    """Describe the state that a later start finds: the last checkpoint."""
    place = f"step {incident.checkpoint_step}, the newest checkpoint"
    origin = place if incident.checkpoint_step > 0 else "the beginning: there is no checkpoint"
    done = _committed(incident)
    text = f"{plural(done, 'step')} had been committed" if done else "no step had been committed"
    return f"{text}; the run resumes from {origin} (outlast run --run-dir RUN_DIR ...)"


def _committed(incident: Incident) -> int:
    """Return the steps that every rank had committed at the failure."""
    return incident.step - 1 if incident.redone and incident.kind in ("", "step") else incident.step


def _of_the_interrupted(incident: Incident) -> str:
    if incident.verdict == "commit":
        return ", and the interrupted one: some rank had applied it, so all did"
    if incident.rung in FROM_A_COPY:
        return f": all restarted from step {_committed(incident)}" if incident.n else ""
    if not incident.redone:
        done = ", and the interrupted one: every survivor had completed it"
        return done if incident.kind == "step" else ""
    if incident.rung == "shrink" and incident.kind in ("", "step"):
        return "; the interrupted one was redone, without the batches of the ranks that left"
    if incident.kind in ("", "step"):
        same = " with the same batch" if incident.cause.kind != "regrow" else ""
        return f"; the interrupted one was undone and redone{same}"
    return {
        "eval": "; the evaluation was run again",
        "checkpoint": "; the checkpoint was written again",
    }.get(incident.kind, "; the ranks repeated their agreement")


def _now(incident: Incident, life: Life) -> str:
    if incident.state == "recovered" and not incident.is_managed:
        return f"all ranks were started again after {duration(incident.total_ms / 1e3)}"
    if incident.state == "recovered":
        total = duration(incident.total_ms / 1e3)
        return f"recovered in generation {incident.generation_to}, {total} in all"
    if incident.state == "stopped":
        return "the run ended with it"
    if incident.state == "died" or life == "died":
        resumed = "; a later one resumed the run" if incident.state == "died" else ""
        return f"open: its launcher died here{resumed}"
    if life == "running":
        return "open: the run is in the middle of it"
    return "open: the run is in the middle of it, or its launcher died here"


def _cost(incident: Incident) -> RenderableType:
    grid = layout_grid(
        text_column(style="bold", wrap=False),
        number_column(wrap=False),
        text_column(wrap=False),
        text_column(style="dim"),
    )
    means = {**_MEANS, **_MEANS_AGAIN} if incident.rung in FROM_A_COPY else _MEANS
    means = means if incident.is_managed else _MEANS | _MEANS_UNMANAGED
    longest_ms = max(incident.phases_ms.values(), default=0.0)
    for phase in PHASES:
        ms = incident.phases_ms.get(phase, 0.0)
        if ms < SHOWN_MS_MIN:
            continue
        cells = round(BAR_CELLS * ms / longest_ms) if longest_ms else 0
        strip = Text("\u2588" * cells or "\u258f", style="yellow")
        grid.add_row(phase, _long(ms), strip, means[phase])
    grid.add_row("total", _long(incident.total_ms), "", "")
    return grid


def _long(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < LONG_MS else duration(ms / 1e3)


def _traceback(fault: Fault, number: int, shown: dict[str, int]) -> list[RenderableType]:
    text = fault.traceback.strip()
    if not text:
        return []
    earlier = shown.setdefault(text, number)
    if earlier != number:
        return [Text(f"\nThe traceback is the same as in incident {earlier}.", style="dim")]
    body = Syntax(text, "pytb", background_color="default", word_wrap=True)
    return [Text(f"\ntraceback of {rank_and_host(fault)}:", style="bold"), body]


BEFORE_S = 600.0
LINES_MAX = 5


def findings_before(incident: Incident, events: Sequence[AnyEvent]) -> list[Warned]:
    """Return warnings from the minutes before an incident, and earlier ones that persist.

    Of the host of its worker; of all hosts, where that host is unknown.
    """
    open_ones: dict[tuple[str, ...], Warned] = {}
    recent: list[Warned] = []
    for event in events:
        if event.t_ns > incident.t_ns:
            break
        if not isinstance(event, Warned) or incident.cause.host not in ("", event.host):
            continue
        key = (event.host, event.check, event.symptom, event.code, event.device)
        if event.severity == "healthy":
            open_ones.pop(key, None)
            recent.append(event)
        else:
            open_ones[key] = event
    since_ns = incident.t_ns - int(BEFORE_S * 1e9)
    over = [event for event in recent if event.t_ns >= since_ns]
    return sorted([*open_ones.values(), *over], key=lambda event: event.t_ns)


def finding_lines(incidents: Iterable[Incident], events: Sequence[AnyEvent]) -> Iterator[str]:
    """Yield lines as `incident 1: 3 min 04 s before: now: gpu: XID 79 on GPU 2 (node-7): ...`."""
    for incident in incidents:
        findings = findings_before(incident, events)
        for event in findings[-LINES_MAX:]:
            ago = duration((incident.t_ns - event.t_ns) / 1e9)
            yield f"incident {incident.number}: {ago} before: {warning(event)}"


def open_findings(events: Sequence[AnyEvent]) -> Iterator[str]:
    """Yield a line for each finding of a sentinel that is not over."""
    found: dict[tuple[str, ...], Warned] = {}
    for event in events:
        if isinstance(event, Warned) and event.check in SENTINELS:
            found[event.host, event.check, event.code, event.device] = event
    for event in found.values():
        if event.severity != "healthy":
            yield f"sentinel: {warning(event)}"
