"""An incident as a story, for the engineer on call: what broke, where, how it was noticed, what was
decided and why, what it cost, what was kept."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from outlast.events import Fault
from outlast.observe.incidents import PHASES, Incident, Phase
from outlast.observe.words import counted, duration, error_name, in_short, size, what, who

BAR_CELLS = 30
SHOWN_MS_MIN = 0.05
_NOTICED = {
    "pidfd": "the agent's pidfd said that the process had ended",
    "peer": "a peer's connection broke and it reported so",
    "heartbeat": "its heartbeat stood still for longer than this run's steps allow",
    "lease": "its host's agent no longer renewed its lease",
    "report": "the worker reported it itself",
}
_RUNG = {
    "retry": "retry: every worker kept its seat, the groups were connected anew",
    "migrate": "migrate: the seat moved to another worker between steps",
    "replace": "replace: another worker took the seat, its state came from a replica",
    "respawn": "respawn: a new worker was started for the seat, its state came from a replica",
    "rollback": "roll back in memory: the seat's state came from a peer's snapshot",
    "shrink": "shrink: the replica group left, the others went on",
    "restart": "restart: every worker began again from the newest complete checkpoint",
    "stop": "stop: no rung of the ladder could help",
}
_MEANS: dict[Phase, str] = {
    "notice": "the fault, until it was noticed",
    "report": "groups severed, every worker answered",
    "decide": "decision made and durable",
    "join": "joiner built its model, took its dry steps",
    "connect": "groups of the new generation built",
    "transfer": "state copied, digests checked",
    "redo": "until every rank had the step",
}


def explain(found: Sequence[Incident], console: Console) -> None:
    """Print each incident in a frame; a traceback that came before is only pointed at."""
    shown: dict[str, int] = {}
    for one in found:
        console.print(panel(one, shown))


def panel(one: Incident, shown: dict[str, int]) -> RenderableType:
    """One incident. `shown`: tracebacks printed already, and by which incident; added to."""
    cause = one.cause
    when = datetime.fromtimestamp(one.t_ns / 1e9, tz=UTC).astimezone()
    said = "raised " + error_name(cause) if cause.kind == "raised" else what(cause)
    title = Text.assemble((f"incident {one.number}", "bold"), f", {when:%H:%M:%S}: ")
    title.append(f"{who(cause)} {said}")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for head, text in _story(one):
        grid.add_row(head, Text(text))  # no markup: users' words may hold brackets
    parts: list[RenderableType] = [grid, Text(""), _cost(one)]
    for fault in one.faults:
        parts += _traceback(fault, one.number, shown)
    border = "green" if one.state == "recovered" else "red"
    return Panel(
        Group(*parts), title=title, title_align="left", border_style=border, box=box.ROUNDED
    )


def _story(one: Incident) -> list[tuple[str, str]]:
    rows = [("what", _broke(one.cause))]
    rows += [("and", _broke(fault)) for fault in one.others]
    if one.echoes:
        seen = ", ".join(dict.fromkeys(who(fault) for fault in one.echoes))
        rows.append(("seen by", f"{seen}: the connection to a peer broke"))
    rows.append(("where", f"step {one.step}, generation {one.generation_from}"))
    how = dict.fromkeys(one.how)
    rows.append(("noticed", "; ".join(_NOTICED.get(way, way) for way in how)))
    if one.rung:
        rows.append(("decided", _RUNG.get(one.rung, one.rung)))
        rows.append(("why", one.reason))
    rows += [
        ("seat", f"rank {each.seat}: {each.old} gave way to {each.new}") for each in one.replaced
    ]
    rows.append(("kept", _kept(one)))
    rows.append(("now", _now(one)))
    return rows


def _broke(fault: Fault) -> str:
    place = ", ".join(filter(None, (fault.worker, fault.host)))
    said = f"{who(fault)} {what(fault)}" + (f" ({place})" if place else "")
    detail = in_short(fault.detail)
    return f"{said}: {detail}" if detail and detail not in said else said


def _kept(one: Incident) -> str:
    if not one.rung:
        done = f"what was committed before: all up to phase {one.n}" if one.n > 0 else "nothing yet"
        ended = "the run ended" if one.state == "stopped" else "the events end"
        return f"{done} ({ended} before anything was decided)"
    if one.committed_steps_lost:
        lost = counted(one.committed_steps_lost, "committed step")
        return f"all up to phase {one.n}; {lost} had to be redone"
    kept = "every committed step"
    if one.verdict == "commit":
        kept += ", the interrupted one too: some rank had applied it, so all did"
    elif one.verdict == "redo":
        kept += "; the interrupted one was put back and redone with the same batch"
    for copy in one.copies:
        rate = copy.size_bytes / copy.seconds if copy.seconds else 0.0
        kept += (
            f"\nrank {copy.joiner} got {size(copy.size_bytes)} from rank {copy.donor}"
            f" in {duration(copy.seconds)}" + (f" ({size(int(rate))}/s)" if rate else "")
        )
    return kept


def _now(one: Incident) -> str:
    if one.state == "recovered":
        return f"recovered in generation {one.generation_to}, {duration(one.total_ms / 1e3)} in all"
    if one.state == "stopped":
        return "the run ended with it"
    return "open: the run is in the middle of it, or its launcher died here"


def _cost(one: Incident) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    longest_ms = max(one.phases_ms.values(), default=0.0)
    for phase in PHASES:
        ms = one.phases_ms.get(phase, 0.0)
        if ms < SHOWN_MS_MIN:
            continue
        cells = round(BAR_CELLS * ms / longest_ms) if longest_ms else 0
        strip = Text("\u2588" * cells or "\u258f", style="yellow")
        table.add_row(phase, f"{ms:.1f} ms", strip, _MEANS[phase])
    table.add_row("total", f"{one.total_ms:.1f} ms", "", "")
    return table


def _traceback(fault: Fault, number: int, shown: dict[str, int]) -> list[RenderableType]:
    text = fault.traceback.strip()
    if not text:
        return []
    earlier = shown.setdefault(text, number)
    if earlier != number:
        return [Text(f"\nThe traceback is the same as in incident {earlier}.", style="dim")]
    body = Syntax(text, "pytb", background_color="default", word_wrap=True)
    return [Text(f"\n{who(fault)} said:", style="bold"), body]
