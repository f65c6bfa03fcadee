"""Answers of a run's first screen: training, speed, incidents, safety of the state, finish.

Pure functions of events and of the time; times are Unix nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from outlast.events import (
    AnyEvent,
    CheckpointFailed,
    DrainFailed,
    GenerationClosed,
    GenerationOpened,
    ReplicasCompared,
    RunEnded,
)
from outlast.telemetry.event_store import Life
from outlast.telemetry.history.event_columns import Integers, last_of_each, of_kind
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.history.state_copies import newest_copies
from outlast.telemetry.run_board import headline
from outlast.telemetry.run_summary import RunSummary
from outlast.text_formatting import duration, percentage, plural, resume_hint

Level = Literal["good", "warn", "bad", "plain"]
QUIET_STEPS = 20  # without a commit for as many step times, and QUIET_MIN_S, a run is not training
QUIET_MIN_S = 30.0
TREND_SHARE = 0.1  # of all steps: the newest ones, whose median is compared with that of all
TREND_MIN = 0.02  # smaller changes are no trend
NEWEST_INCIDENTS = 3


class PageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One question of the first screen, its figure, and the lines below it."""

    key: str
    question: str
    figure: str
    lines: tuple[str, ...]
    level: Level
    at_ns: int | None = None  # a time that it is about, as a date


class StepTimes(NamedTuple):
    """Commits of the job's steps as one rank saw them: when each ended, and how long it took."""

    ends_ns: Integers
    lasted_s: NDArray[np.float64]
    step: Integers

    def median_s(self, share: float = 1.0) -> float:
        """Return the median of the newest `share` of them; 0.0 without any."""
        newest = self.lasted_s[-max(1, round(share * len(self.lasted_s))) :]
        middle = len(newest) // 2
        return float(np.partition(newest, middle)[middle]) if len(newest) else 0.0

    def band_s(self) -> tuple[float, float]:
        """Return the quartiles of the newest steps."""
        newest = self.lasted_s[-max(4, round(TREND_SHARE * len(self.lasted_s))) :]
        if len(newest) < 4:
            return self.median_s(), self.median_s()
        low, _, high = quantiles(newest.tolist(), n=4)
        return low, high


def step_times(history: RunHistory) -> StepTimes:
    """Return the steps of the lowest rank, each once: the last attempt of those done again."""
    phases = history.phases
    which = of_kind(phases, history.kinds, "step")
    which = which[phases.seat[which] == phases.seat.min(initial=np.iinfo(np.int64).max)]
    step = phases.step[which]
    newest = last_of_each(step)
    which, step = which[newest], step[newest]
    ends_ns = phases.t_ns[which]
    lasted_s = (ends_ns - phases.begin_ns[which]) / phases.steps[which] / 1e9
    return StepTimes(ends_ns, lasted_s, step)


def answers(
    events: Sequence[AnyEvent],
    summary: RunSummary,
    run_incidents: Sequence[Incident],
    times: StepTimes,
    *,
    now_ns: int,
    life: Life,
    price_per_hour: float = 0.0,
    predicted: str = "",
) -> tuple[PageAnswer, ...]:
    """Answer the five questions.

    `price_per_hour`: dollars an hour of the whole job; 0: unknown. `predicted`: sentence on what
    the planner has for the run.
    """
    return (
        _training(events, summary, times, now_ns, life),
        _speed(summary, times, predicted),
        _broken(summary, run_incidents),
        _safety(events, summary, now_ns),
        _finish(summary, times, price_per_hour, now_ns if life == "running" else None),
    )


def _ago(t_ns: int, now_ns: int) -> str:
    return f"{duration(max(0, now_ns - t_ns) / 1e9)} ago"


def steps_figure(summary: RunSummary) -> str:
    """Return the committed step, and the last one where it is known."""
    if summary.steps is None:
        return "steps unknown"
    if not summary.steps_total:
        return f"step {summary.steps:,}"
    return f"step {summary.steps:,} of {summary.steps_total:,}"


def _training(
    events: Sequence[AnyEvent], summary: RunSummary, times: StepTimes, now_ns: int, life: Life
) -> PageAnswer:
    lines, level = _activity(events, summary, times, now_ns, life)
    return PageAnswer(
        key="training",
        question="Is it training?",
        figure=steps_figure(summary),
        lines=tuple(lines),
        level=level,
    )


def _activity(
    events: Sequence[AnyEvent], summary: RunSummary, times: StepTimes, now_ns: int, life: Life
) -> tuple[list[str], Level]:
    last = [f"last commit {_ago(int(times.ends_ns[-1]), now_ns)}"] if len(times.ends_ns) else []
    ended = next((event for event in reversed(events) if isinstance(event, RunEnded)), None)
    if summary.exit_code is not None and ended is not None:
        words = f"{summary.outcome.replace('_', ' ')}, exit code {ended.exit_code}"
        return [words, f"ended {_ago(ended.t_ns, now_ns)}"], (
            "good" if summary.outcome == "done" else "bad"
        )
    if life == "died":
        return [f"its launcher died; {resume_hint(summary.run_dir)}", *last], "bad"
    since = next(
        (e for e in reversed(events) if isinstance(e, GenerationClosed | GenerationOpened)), None
    )
    unknown = life == "unknown"
    where = ["written on another host: whether it still runs is unknown"] if unknown else []
    if since is None:
        return ["starting", *where], "plain"
    if isinstance(since, GenerationClosed):
        return [f"recovering since {duration((now_ns - since.t_ns) / 1e9)}", *last, *where], "warn"
    quiet_s = (now_ns - max([*times.ends_ns[-1:].tolist(), since.t_ns])) / 1e9
    if quiet_s > max(QUIET_MIN_S, QUIET_STEPS * times.median_s()):
        return [f"no commit for {duration(quiet_s)}", *last, *where], "plain" if unknown else "bad"
    return [*last, "computing", *where], "plain" if unknown else "good"


def _speed(summary: RunSummary, times: StepTimes, predicted: str) -> PageAnswer:
    lines = []
    if summary.goodput is not None:
        lines.append(f"goodput {percentage(summary.goodput)} of {plural(summary.world, 'rank')}")
    if whole_s := times.median_s():
        now_s = times.median_s(TREND_SHARE)
        change = now_s / whole_s - 1
        trend = f", {abs(change):.0%} {'slower' if change > 0 else 'faster'} than the median"
        trend = trend if abs(change) >= TREND_MIN else ", steady"
        rate = f"{1 / now_s:.1f} steps/s" if now_s < 1 else f"{60 / now_s:.1f} steps/min"
        lines.append(f"{duration(now_s)} a step{trend} ({rate})")
    lost_s = sum(summary.buckets_s[bucket] for bucket in ("lost", "recovery", "down"))
    if summary.world and lost_s:
        lines.append(f"{duration(lost_s / summary.world)} lost to failures, on each rank")
    if predicted:
        lines.append(predicted)
    return PageAnswer(
        key="speed",
        question="How well?",
        figure="ETTR unknown" if summary.ettr is None else f"ETTR {percentage(summary.ettr)}",
        lines=tuple(lines),
        level="plain",
    )


def incidents_figure(run_incidents: Sequence[Incident]) -> str:
    """Return the number of failures in words."""
    failures = sum(not incident.is_request for incident in run_incidents)
    return plural(failures, "incident") if failures else "nothing"


def _broken(summary: RunSummary, run_incidents: Sequence[Incident]) -> PageAnswer:
    failures = [incident for incident in run_incidents if not incident.is_request]
    lost = summary.committed_steps_lost
    lines = [headline(incident, brief=True) for incident in failures[-NEWEST_INCIDENTS:][::-1]]
    if len(failures) > len(lines):
        lines.append(f"and {plural(len(failures) - len(lines), 'incident')} before")
    lines.append(f"{plural(lost, 'committed step')} lost" if lost is not None else "steps unknown")
    is_open = any(incident.state != "recovered" for incident in failures)
    return PageAnswer(
        key="broken",
        question="What broke?",
        figure=incidents_figure(run_incidents),
        lines=tuple(lines),
        level="bad" if is_open else "warn" if lost else "good",
    )


def _safety(events: Sequence[AnyEvent], summary: RunSummary, now_ns: int) -> PageAnswer:
    copies = newest_copies(events, summary.world)
    saved = copies.disk
    failed = next(
        (e for e in reversed(events) if isinstance(e, CheckpointFailed | DrainFailed)), None
    )
    compared = next((e for e in reversed(events) if isinstance(e, ReplicasCompared)), None)
    names = {"in memory": copies.memory, "at peers": copies.peers, "on disk": saved}
    lines = [
        f"{name}: step {copy.step:,}, {_ago(copy.t_ns, now_ns)}"
        for name, copy in {**names, "durable": copies.durable}.items()
        if copy
    ]
    if saved:
        lines.append(plural(summary.checkpoints, "checkpoint"))
    if failed and (saved is None or failed.t_ns > saved.t_ns):
        lines.append(f"the newest save failed: {failed.error}")
    checked = f" ({_ago(compared.t_ns, now_ns)})" if compared else ""
    lines.append(f"replicas: {summary.replicas.sentence}{checked}")
    behind = bool(failed and (saved is None or failed.t_ns > saved.t_ns))
    return PageAnswer(
        key="safety",
        question="Is the state safe?",
        figure=f"checkpoint of step {saved.step:,}" if saved else "no checkpoint",
        lines=tuple(lines),
        level="bad" if behind else "good" if saved else "warn",
    )


def _finish(
    summary: RunSummary, times: StepTimes, price_per_hour: float, now_ns: int | None
) -> PageAnswer:
    spent = f"{duration(summary.wall_s)} so far"
    dollars = f", ${price_per_hour * summary.wall_s / 3600:,.0f}" if price_per_hour else ""
    lines = [spent + dollars]
    figure, at_ns = "unknown", None
    if summary.exit_code is not None:
        figure = "ended"
    elif summary.steps is not None and summary.steps_total and len(times.lasted_s):
        rest = max(0, summary.steps_total - summary.steps)
        ettr = max(summary.ettr or 0.0, 0.01)
        low_s, high_s = times.band_s()
        rest_s = rest * times.median_s(TREND_SHARE) / ettr
        figure = f"in {duration(rest_s)}"
        at_ns = None if now_ns is None else now_ns + round(rest_s * 1e9)
        lines.append(
            f"{duration(rest * low_s)} to {duration(rest * high_s / ettr)}: quartiles of the newest"
            " steps, without failures and at this ETTR"
        )
        if price_per_hour:
            lines.append(f"${price_per_hour * rest_s / 3600:,.0f} more")
    elif summary.exit_code is None:
        lines.append("the script sets no last step")
    return PageAnswer(
        key="finish",
        question="When is it done?",
        figure=figure,
        lines=tuple(lines),
        level="plain",
        at_ns=at_ns,
    )
