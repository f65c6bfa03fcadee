"""What a run came to: one value, for a person, a program (`--json`) and the fleet's books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from outlast.events import (
    AnyEvent,
    CheckpointFailed,
    CheckpointSaved,
    Decided,
    Fault,
    GenerationOpened,
    Metrics,
    Note,
    PhaseDone,
    WorkerSeated,
    WorkerSpawned,
    WorkerWarm,
)
from outlast.observe.accounting import Term, account, split_terms
from outlast.observe.incidents import PHASES, Incident, Phase, incidents
from outlast.observe.segments import Damage
from outlast.observe.spans import Bucket
from outlast.observe.store import read_events
from outlast.observe.words import counted, duration, what, who

NOTES_MAX = 20
RESTART_ONLY = (
    "restart only: the script never called outlast.init(), so it ran as under torchrun; a failure"
    " starts it again from its own checkpoint"
)


class IncidentLine(msgspec.Struct, frozen=True, kw_only=True):
    """An incident in short. Times are milliseconds."""

    number: int
    cause: str  # a FaultKind
    said: str
    faults: int
    step: int
    rung: str
    state: str
    committed_steps_lost: int
    phases_ms: dict[Phase, float]
    total_ms: float


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """All incidents of one kind of fault."""

    count: int
    total_s: float
    worst_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run, over all its terms. `outcome`: done | user_error | gave_up | interrupted |
    unfinished (no end was recorded: it still runs, or its launcher was killed).

    `buckets_s` are seat-seconds and add up to `wall_s` x `world`. `goodput` and `ettr` are None
    where nothing could be measured (`restart_only`).
    """

    version: int = 1
    run: str
    run_dir: str
    script: str
    outcome: str
    exit_code: int | None
    cause: Fault | None
    restart_only: bool
    world: int
    terms: int
    generations: int
    steps: int
    phases: int
    committed_steps_lost: int
    step_s: float  # median over seats and steps
    loss: float | None  # what rank 0 reported last
    wall_s: float
    goodput: float | None
    ettr: float | None
    buckets_s: dict[Bucket, float]
    incidents: tuple[IncidentLine, ...]
    causes: dict[str, Cause]
    spares: int
    spares_used: int
    respawns: int
    checkpoints: int
    notes: tuple[str, ...]


def summarise(run_dir: Path) -> Summary:
    """Read a run and sum it up; it may be done, alive or dead.

    Raises RunDirError when `run_dir` holds no run, CorruptionError when the times do not add up.
    """
    damages: list[Damage] = []
    events = read_events(run_dir, damages.append)
    return summarise_events(events, run_dir, damages)


def summarise_events(
    events: Sequence[AnyEvent], run_dir: Path, damages: Sequence[Damage] = ()
) -> Summary:
    """As `summarise`, of events (by time) that were read already."""
    terms = split_terms(events)
    times = account(events)
    found = incidents(events)
    workers = _Workers(events, terms)
    progress = _Progress(terms)
    last = terms[-1]
    measured = not workers.restart_only
    return Summary(
        run=last.started.run,
        run_dir=str(run_dir),
        script=last.started.script,
        outcome=last.ended.outcome if last.ended else "unfinished",
        exit_code=last.ended.exit_code if last.ended else None,
        cause=last.ended.cause if last.ended else None,
        restart_only=workers.restart_only,
        world=last.started.world,
        terms=len(terms),
        generations=progress.generation,
        steps=progress.step,
        phases=progress.n,
        committed_steps_lost=progress.lost + sum(one.committed_steps_lost for one in found),
        step_s=progress.step_s(),
        loss=_last_loss(events),
        wall_s=times.wall_ns / 1e9,
        goodput=times.goodput if measured else None,
        ettr=times.ettr if measured else None,
        buckets_s={bucket: ns / 1e9 for bucket, ns in times.totals_ns.items()},
        incidents=tuple(_line(one) for one in found),
        causes=_causes(found),
        spares=last.started.spares,
        spares_used=workers.spares_used,
        respawns=workers.respawns,
        checkpoints=sum(isinstance(event, CheckpointSaved) for event in events),
        notes=_notes(events, terms, damages, restart_only=workers.restart_only),
    )


class _Progress:
    """How far the job came, and what it lost when a new launcher took it up again."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.n = self.step = self.generation = self.lost = 0
        self._step_ns: list[int] = []
        for index, term in enumerate(terms):
            if index:
                resumed = max(0, term.started.resumed_step)
                self.lost += max(0, self.step - resumed)
                self.n, self.step = max(0, term.started.resumed_n), resumed
            for event in term.events:
                self._take(event)
            if term.ended:
                self.n, self.step = max(self.n, term.ended.n), max(self.step, term.ended.step)

    def _take(self, event: AnyEvent) -> None:
        if isinstance(event, PhaseDone):
            self.n, self.step = max(self.n, event.n), max(self.step, event.step)
            if event.kind == "step":
                self._step_ns.append(event.t_ns - event.t_begin_ns)
        elif isinstance(event, Decided):
            self.n, self.step = event.n, event.step
        elif isinstance(event, GenerationOpened):
            self.generation = max(self.generation, event.generation)

    def step_s(self) -> float:
        return median(self._step_ns) / 1e9 if self._step_ns else 0.0


class _Workers:
    """Who was started, and who took a seat later."""

    def __init__(self, events: Sequence[AnyEvent], terms: Sequence[Term]) -> None:
        spawned = [event for event in events if isinstance(event, WorkerSpawned)]
        spares = {event.worker for event in spawned if event.seat < 0}
        seated = {event.worker for event in events if isinstance(event, WorkerSeated)}
        said_hello = any(
            isinstance(event, WorkerWarm | WorkerSeated | GenerationOpened) for event in events
        )
        first = sum(term.started.world + term.started.spares for term in terms)
        self.spares_used = len(spares & seated)
        self.respawns = max(0, len(spawned) - first)
        self.restart_only = bool(spawned) and not said_hello


def _line(one: Incident) -> IncidentLine:
    return IncidentLine(
        number=one.number,
        cause=one.cause.kind,
        said=f"{who(one.cause)} {what(one.cause)}",
        faults=1 + len(one.others),
        step=one.step,
        rung=one.rung,
        state=one.state,
        committed_steps_lost=one.committed_steps_lost,
        phases_ms={phase: one.phases_ms[phase] for phase in PHASES},
        total_ms=one.total_ms,
    )


def _causes(found: Sequence[Incident]) -> dict[str, Cause]:
    times_s: dict[str, list[float]] = {}
    for one in found:
        times_s.setdefault(one.cause.kind, []).append(one.total_ms / 1e3)
    return {
        kind: Cause(count=len(each), total_s=sum(each), worst_s=max(each))
        for kind, each in times_s.items()
    }


def _last_loss(events: Sequence[AnyEvent]) -> float | None:
    for event in reversed(events):
        if isinstance(event, Metrics) and event.seat == 0 and "loss" in event.values:
            return event.values["loss"]
    return None


def _notes(
    events: Sequence[AnyEvent],
    terms: Sequence[Term],
    damages: Sequence[Damage],
    *,
    restart_only: bool,
) -> tuple[str, ...]:
    """What the owner should know: ours first, then what the run said itself, each text once."""
    notes = [RESTART_ONLY] if restart_only else []
    for before, after in pairwise(terms):
        how = before.ended.outcome if before.ended else "ended without a word"
        away = duration((after.started.t_ns - before.end_ns) / 1e9)
        step = max(0, after.started.resumed_step)
        notes.append(f"the launcher {how}; after {away} the run was resumed at step {step}")
    notes += [str(damage) for damage in damages]
    notes += [
        f"checkpoint at step {event.step} failed: {event.error} ({event.path})"
        for event in events
        if isinstance(event, CheckpointFailed)
    ]
    said = Counter(
        f"rank {event.seat}: {event.text}" if event.seat >= 0 else event.text
        for event in events
        if isinstance(event, Note) and event.level == "warning"
    )
    notes += [f"{text} ({count} times)" if count > 1 else text for text, count in said.items()]
    if len(notes) > NOTES_MAX:
        more = counted(len(notes) - NOTES_MAX, "more note")
        notes = [*notes[:NOTES_MAX], f"... and {more}: `outlast events` has them all"]
    return tuple(notes)
