"""Summary tables of a run on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outlast.telemetry.history.time_buckets import BUCKETS, Bucket
from outlast.telemetry.run_summary import IncidentLine, RunSummary
from outlast.terminal_tables import layout_grid, number_column, table, text_column
from outlast.text_formatting import (
    detail_beyond,
    duration,
    error_line,
    fault_text,
    percentage,
    plural,
    rank_and_host,
    resume_hint,
)

STYLE: dict[Bucket, str] = {
    "start": "blue",
    "step": "green",
    "eval": "cyan",
    "checkpoint": "magenta",
    "script": "bright_green",
    "lost": "red",
    "recovery": "yellow",
    "absent": "dim",
    "stop": "bright_black",
    "down": "bright_red",
}
MEANS: dict[Bucket, str] = {
    "start": "until the first phase",
    "step": "committed steps",
    "eval": "committed phases, no optimizer",
    "checkpoint": "writing checkpoints",
    "script": "the script between phases",
    "lost": "discarded attempts",
    "recovery": "from close to open",
    "absent": "no worker, the others went on",
    "stop": "after the last phase",
    "down": "no launcher",
}
_STATE = {"stopped": "then the run ended", "open": "not finished", "died": "then its launcher died"}
INCIDENTS_MAX = 10
_RESUMABLE = ("interrupted", "died")
_OUTCOME = {
    "done": ("done", "green"),
    "user_error": ("ended by an error of the script", "red"),
    "gave_up": ("gave up", "red"),
    "interrupted": ("interrupted", "yellow"),
    "running": ("still running", "blue"),
    "died": ("no end recorded: its launcher died", "red"),
    "unfinished": ("no end recorded: it still runs, or its launcher was killed", "yellow"),
}


def render(summary: RunSummary, console: Console) -> None:
    """Print the summary."""
    console.print(panel(summary))


def panel(summary: RunSummary) -> RenderableType:
    """Return the summary of a run as a panel for the terminal."""
    outcome, style = _OUTCOME.get(summary.outcome, (summary.outcome, "red"))
    parts: list[RenderableType] = [_head(summary, outcome, style)]
    if summary.cause is not None:
        parts.append(_cause(summary))
    if summary.incidents:
        parts += [Text(""), _incidents(summary)]
    if len(summary.incidents) > 1 and summary.causes:
        parts += [Text(""), _causes(summary)]
    if summary.steps is not None:
        parts += [Text(""), _buckets(summary)]
    if summary.notes:
        parts += [Text(""), *(Text(f"note: {note}", style="yellow") for note in summary.notes)]
    title = Text.assemble("outlast: ", (summary.script or summary.run, "bold"))
    return Panel(
        Group(*parts), title=title, title_align="left", border_style=style, box=box.ROUNDED
    )


def _head(summary: RunSummary, outcome: str, style: str) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("outcome", Text(outcome, style=style))
    if summary.outcome in _RESUMABLE:
        grid.add_row("", Text(resume_hint(summary.run_dir)))
        grid.add_row("", _resumed_from(summary))
    grid.add_row("ran", _ran(summary))
    requests = [line for line in summary.incidents if line.drain or line.cause == "save"]
    drains = sum(line.drain for line in requests)
    saves = len(requests) - drains
    text = f"{plural(len(summary.incidents) - len(requests), 'incident')}, "
    text += f"{plural(drains, 'drain')} on request, " if drains else ""
    text += f"{plural(saves, 'checkpoint')} on request, " if saves else ""
    if summary.committed_steps_lost is None:
        lost = Text("steps unknown: no session")
    else:
        lost = Text(f"{summary.committed_steps_lost} committed steps lost")
        lost.stylize("green" if not summary.committed_steps_lost else "red")
    grid.add_row("failures", Text(text) + lost)
    if summary.durable:
        reached = [f"{count} in {target}" for target, count in summary.durable.items()]
        saved = ", ".join([f"{summary.checkpoints} saved", *reached])
        grid.add_row("checkpoints", Text(saved))
    if summary.world > 1 and not summary.restart_only:
        differs = summary.replicas.step < 0 or summary.replicas.differed > 0
        grid.add_row("replicas", Text(summary.replicas.sentence, style="red" if differs else ""))
    if summary.straggler_s:
        waited = f"all ranks have waited {duration(summary.straggler_s)} for slow ones"
        grid.add_row("stragglers", Text(waited, style="yellow"))
    spares = f"{summary.spares} configured, {summary.spares_used} used"
    if summary.spares_refilled:
        spares += f", {summary.spares_refilled} refilled"
    grid.add_row("spares", f"{spares}, {plural(summary.respawns, 'respawn')}")
    if summary.goodput is not None and summary.ettr is not None:
        grid.add_row("ETTR", f"{percentage(summary.ettr)}, goodput {percentage(summary.goodput)}")
    grid.add_row("run directory", Text(summary.run_dir))
    return grid


def _resumed_from(summary: RunSummary) -> Text:
    """Return where a resumed run begins, and what it does again."""
    saved = summary.saved_step
    text = f"from the checkpoint of step {saved}" if saved else "from the beginning: no checkpoint"
    if (again := (summary.steps or 0) - saved) > 0:
        return Text(f"{text}; {plural(again, 'committed step')} will be done again", style="yellow")
    return Text(text)


def _ran(summary: RunSummary) -> str:
    if summary.steps is None:
        return f"{plural(summary.world, 'rank')} for {duration(summary.wall_s)}"
    ran = f"{plural(summary.steps, 'step')} of {summary.world} ranks in {duration(summary.wall_s)}"
    if summary.step_s:
        ran += f", median step {duration(summary.step_s)}"
    if summary.steps_total and summary.outcome != "done":
        ran += f", {100 * summary.steps / summary.steps_total:.0f} % of {summary.steps_total}"
    if summary.loss is not None:
        ran += f", last loss {summary.loss:.4g}"
    return ran


def _cause(summary: RunSummary) -> RenderableType:
    cause = summary.cause
    assert cause is not None
    if cause.kind == "requested":
        return Text.assemble(("root cause  ", "bold"), f"end requested: {cause.detail}")
    detail = detail_beyond(cause)
    text = f"{rank_and_host(cause)} {fault_text(cause)}"
    if error_line(cause) in detail:
        text = detail  # it contains the error, and what to do
    elif detail:
        text += f": {detail}"
    return Text.assemble(("root cause  ", "bold red"), text)


def listed(lines: Sequence[IncidentLine]) -> list[IncidentLine]:
    """Return the worst half and the newest half of many incidents, in order."""
    if len(lines) <= INCIDENTS_MAX:
        return list(lines)
    half = INCIDENTS_MAX // 2
    worst = sorted(lines[:-half], key=_badness)[-half:]
    return sorted([*worst, *lines[-half:]], key=lambda line: line.number)


def _badness(line: IncidentLine) -> tuple[int, float]:
    return line.committed_steps_lost, line.total_ms


def _causes(summary: RunSummary) -> RenderableType:
    grid = table(text_column("cause"), *map(number_column, ("incidents", "total", "worst")))
    for kind, cause in sorted(summary.causes.items(), key=lambda item: -item[1].total_s):
        grid.add_row(kind, str(cause.count), duration(cause.total_s), duration(cause.worst_s))
    return grid


def _incidents(summary: RunSummary) -> RenderableType:
    lines = listed(summary.incidents)
    grid = layout_grid(number_column(style="bold"), text_column(), number_column())
    for line in lines:
        more = f" and {plural(line.faults - 1, 'fault')} more" if line.faults > 1 else ""
        answer = "drain" if line.drain else line.rung or "no decision"
        answer = "checkpoint" if line.cause == "save" else answer
        if line.state != "recovered":
            answer += f", {_STATE[line.state]}"
        line_text = Text.assemble(f"{line.text}{more} {line.where}: ", (answer, "bold"))
        if line.committed_steps_lost:
            line_text.append(f", {plural(line.committed_steps_lost, 'committed step')} lost", "red")
        spent = (
            f"{phase} {duration(ms / 1e3)}" for phase, ms in line.phases_ms.items() if ms >= 0.1
        )
        line_text.append("\n" + ", ".join(spent), style="dim")
        grid.add_row(str(line.number), line_text, Text(duration(line.total_ms / 1e3), style="bold"))
    if more := len(summary.incidents) - len(lines):
        text = f"... and {more} more: outlast explain {summary.run_dir}"
        grid.add_row("", Text(text, style="dim"), "")
    return grid


def _buckets(summary: RunSummary) -> RenderableType:
    capacity_s = summary.wall_s * summary.world or 1.0
    figures = map(number_column, ("rank-s", "share"))
    grid = table(text_column("time"), *figures, text_column(), text_column(style="dim"))
    for bucket in BUCKETS:
        seconds = summary.buckets_s.get(bucket, 0.0)
        if not seconds:
            continue
        part = seconds / capacity_s
        strip = Text("\u2588" * max(1, round(20 * part)), style=STYLE[bucket])
        grid.add_row(bucket, f"{seconds:.1f}", percentage(part), strip, MEANS[bucket])
    grid.add_section()
    grid.add_row("wall x ranks", f"{capacity_s:.1f}", percentage(1.0))
    return grid
