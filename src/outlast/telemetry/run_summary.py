"""Summary of a run, for people, programs and the tables of a fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from outlast.controller.planned_migration import SOURCES
from outlast.events import (
    RECORDED,
    AnyEvent,
    BatchSkipped,
    CheckpointFailed,
    CheckpointSaved,
    Drained,
    DrainFailed,
    Fault,
    GenerationOpened,
    LoopBegun,
    Note,
    Noticed,
    ScriptUnmanaged,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
    WorkerWarm,
)
from outlast.telemetry.event_store import Life, life_of
from outlast.telemetry.history.event_columns import of_kind, rows
from outlast.telemetry.history.incident_course import PHASES, Incident, Phase
from outlast.telemetry.history.launcher_terms import LauncherTerm, split_terms
from outlast.telemetry.history.phase_blocks import incidents, reach
from outlast.telemetry.history.run_history import RunHistory, read_history
from outlast.telemetry.history.time_buckets import Bucket, TimeTotals
from outlast.telemetry.job_progress import (
    CommittedProgress,
    ReplicaAgreement,
    changed_findings,
    replica_agreement,
    straggler_wait_s,
)
from outlast.telemetry.run_costs import is_failure
from outlast.telemetry.segment_files import SegmentDamage
from outlast.telemetry.time_accounting import account
from outlast.text_formatting import duration, fault_text, plural, rank_and_host, source

NOTES_MAX = 20
RESTART_ONLY = (
    "restart only: the script never called outlast.init(), so it ran as under torchrun: a failure"
    " starts all ranks again, from the script's own checkpoint. With init() and protect(), some six"
    " lines, a lost rank is replaced and no step is lost: docs/howto/port_a_script.md"
)
NO_HELLO = "no worker reached outlast.init()"


class IncidentLine(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one incident. Times are milliseconds."""

    number: int
    cause: str  # a FaultKind
    text: str = msgspec.field(name="said")
    where: str
    faults: int
    step: int
    drain: bool  # no failure: an end of the run was requested
    rung: str
    state: str
    committed_steps_lost: int
    phases_ms: dict[Phase, float]
    total_ms: float


class IncidentCause(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of all incidents of one kind of fault."""

    count: int
    total_s: float
    worst_s: float


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one run, over all its terms.

    `outcome`: done | user_error | gave_up | interrupted | running | died (no recorded end, and no
    process holds the run directory) | unfinished (no recorded end, and this host cannot tell).

    `buckets_s` are seat-seconds and add up to `wall_s` x `world`. Where no worker called
    `outlast.init()`, steps are unknown: `steps`, `committed_steps_lost`, `goodput` and
    `ettr` are None.
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
    steps: int | None
    steps_total: int | None  # where the script has reported it
    phases: int
    committed_steps_lost: int | None
    step_s: float  # median over seats and steps
    loss: float | None  # last report of the lowest rank that reports one
    wall_s: float
    goodput: float | None
    ettr: float | None
    buckets_s: dict[Bucket, float]
    incidents: tuple[IncidentLine, ...]
    causes: dict[str, IncidentCause]
    spares: int
    spares_used: int
    respawns: int  # workers started for a seat, since no spare was waiting
    spares_refilled: int  # spares started in place of earlier ones
    checkpoints: int
    saved_step: int = 0  # of the newest checkpoint; 0: a resumed run begins anew
    durable: dict[str, int]  # checkpoints that reached durable storage, by target
    replicas: ReplicaAgreement = ReplicaAgreement()
    straggler_s: float = 0.0  # that all ranks have waited for slow ones, or slow collectives
    notes: tuple[str, ...]


def summarise(run_dir: Path) -> RunSummary:
    """Read and summarise a run; it may be done, alive or dead.

    Raises RunDirError when `run_dir` holds no run, CorruptionError when the times do not add up.
    """
    damages: list[SegmentDamage] = []
    history = read_history(run_dir, damages.append)
    return summarise_history(history, run_dir, damages, life=life_of(run_dir, history.events))


def summarise_history(
    history: RunHistory,
    run_dir: Path,
    damages: Sequence[SegmentDamage] = (),
    *,
    life: Life = "unknown",
    times: TimeTotals | None = None,
    run_incidents: Sequence[Incident] | None = None,
) -> RunSummary:
    """Summarise a run. `life`: state of the launcher of a run without end.

    `times`, `run_incidents`: those of this history, where they are known already.
    """
    terms = split_terms(history)
    times = times or account(history, running=life == "running")
    run_incidents = incidents(history) if run_incidents is None else run_incidents
    events = history.events
    workers = _Workers(events, terms)
    progress = _Progress(history, terms)
    last = terms[-1]
    measured = workers.sent_hello
    lost = progress.lost + sum(incident.committed_steps_lost for incident in run_incidents)
    unfinished = "unfinished" if life == "unknown" else life
    return RunSummary(
        run=last.started.run,
        run_dir=str(run_dir),
        script=last.started.script,
        outcome=last.ended.outcome if last.ended else unfinished,
        exit_code=last.ended.exit_code if last.ended else None,
        cause=last.ended.cause if last.ended else None,
        restart_only=workers.restart_only,
        world=last.started.world,
        terms=len(terms),
        generations=progress.generation,
        steps=progress.step if measured else None,
        steps_total=_steps_total(events),
        phases=progress.n,
        committed_steps_lost=lost if measured else None,
        step_s=_step_s(history, terms),
        loss=_last_loss(history),
        wall_s=times.wall_ns / 1e9,
        goodput=times.goodput if measured else None,
        ettr=times.ettr if measured else None,
        buckets_s={bucket: ns / 1e9 for bucket, ns in times.totals_ns.items()},
        incidents=tuple(_line(incident) for incident in run_incidents),
        causes=_causes(run_incidents),
        spares=last.started.spares,
        spares_used=workers.spares_used,
        respawns=workers.respawns,
        spares_refilled=workers.spares_refilled,
        checkpoints=sum(isinstance(event, CheckpointSaved) for event in events),
        saved_step=max((e.step for e in events if isinstance(e, CheckpointSaved)), default=0),
        durable=_durable(events),
        replicas=replica_agreement(events),
        straggler_s=straggler_wait_s(events),
        notes=_notes(events, terms, damages, workers.advice(run_dir), run_dir),
    )


def _durable(events: Sequence[AnyEvent]) -> dict[str, int]:
    """Return checkpoints by target; one uploaded twice, after a roll back, counts once."""
    reached = {event.where for event in events if isinstance(event, Drained)}
    return dict(sorted(Counter(where.rpartition("/")[0] for where in reached).items()))


class _Progress:
    """Progress of the job, and the loss when a new launcher resumed it."""

    def __init__(self, history: RunHistory, terms: Sequence[LauncherTerm]) -> None:
        self.n = self.step = self.generation = self.lost = 0
        reached = CommittedProgress()
        for number, term in enumerate(terms):
            if number:
                self.lost += max(0, self.step - max(0, term.started.resumed_step))
            done = 0
            for index, event in enumerate(term.events):
                if isinstance(event, GenerationOpened):
                    self.generation = max(self.generation, event.generation)
                    before = history.phases_before(term.first + index) - term.first_phase
                    reach(reached, rows(term.phases, slice(done, before)))
                    done = before
                reached.take(event)
            reach(reached, rows(term.phases, slice(done, None)))
            self.n, self.step = reached.place
            if term.ended:
                self.n, self.step = max(self.n, term.ended.n), max(self.step, term.ended.step)


def _step_s(history: RunHistory, terms: Sequence[LauncherTerm]) -> float:
    """Return the median duration of single steps; one event may stand for many."""
    phases = rows(history.phases, slice(terms[0].first_phase, None))
    which = of_kind(phases, history.kinds, "step")
    if not len(which):
        return 0.0
    steps = phases.steps[which]
    step_ns = (phases.t_ns[which] - phases.begin_ns[which]) / steps
    if (steps == 1).all():
        middle = sorted({(len(step_ns) - 1) // 2, len(step_ns) // 2})
        found = np.partition(step_ns, middle)[[middle[0], middle[-1]]]
    else:
        order = np.argsort(step_ns, kind="stable")
        ends = np.cumsum(steps[order])
        middle = [(ends[-1] - 1) // 2, ends[-1] // 2]
        found = step_ns[order][np.searchsorted(ends, middle, "right")]
    return float(found.sum()) / 2e9


class _Workers:
    """Workers started, and workers that joined a seat later."""

    def __init__(self, events: Sequence[AnyEvent], terms: Sequence[LauncherTerm]) -> None:
        spawned = [event for event in events if isinstance(event, WorkerSpawned)]
        spares = {event.worker for event in spawned if event.seat < 0}
        seated = {event.worker for event in events if isinstance(event, WorkerSeated)}
        managed = [
            event
            for term in terms
            if not any(isinstance(event, ScriptUnmanaged) for event in term.events)
            for event in term.events
        ]
        self.sent_hello = not spawned or any(
            isinstance(event, WorkerWarm | WorkerSeated | GenerationOpened) for event in managed
        )
        ranks_at_first = sum(term.started.world for term in terms)
        spares_at_first = sum(term.started.spares for term in terms)
        self.spares_used = len(spares & seated)
        self.spares_refilled = max(0, len(spares) - spares_at_first)
        self.respawns = max(0, len(spawned) - len(spares) - ranks_at_first)
        ended_well = any(
            isinstance(event, WorkerLost)
            and (event.fault.kind, event.fault.exit_code) == ("exited", 0)
            for event in events
        )
        done = any(term.ended and term.ended.outcome == "done" for term in terms)
        self.restart_only = not self.sent_hello and (ended_well or done)

    def advice(self, run_dir: Path) -> str:
        """Return advice where no worker sent Hello; "" elsewhere."""
        if self.restart_only:
            return RESTART_ONLY
        return "" if self.sent_hello else f"{NO_HELLO}: see {run_dir}/logs/RANK/WORKER/stderr.log"


def _line(incident: Incident) -> IncidentLine:
    return IncidentLine(
        number=incident.number,
        cause=incident.cause.kind,
        text=f"{rank_and_host(incident.cause)} {fault_text(incident.cause)}",
        where=incident.where,
        faults=1 + len(incident.others),
        step=incident.step,
        drain=incident.is_drain,
        rung=incident.rung,
        state=incident.state,
        committed_steps_lost=incident.committed_steps_lost,
        phases_ms={phase: incident.phases_ms[phase] for phase in PHASES},
        total_ms=incident.total_ms,
    )


def _causes(run_incidents: Sequence[Incident]) -> dict[str, IncidentCause]:
    times_s: dict[str, list[float]] = {}
    for incident in run_incidents:
        if not is_failure(incident):
            continue
        times_s.setdefault(incident.cause.kind, []).append(incident.total_ms / 1e3)
    return {
        kind: IncidentCause(count=len(times_), total_s=sum(times_), worst_s=max(times_))
        for kind, times_ in times_s.items()
    }


def _steps_total(events: Sequence[AnyEvent]) -> int | None:
    for event in reversed(events):
        if isinstance(event, LoopBegun):
            return event.steps
    return None


def _last_loss(history: RunHistory) -> float | None:
    """Return the last loss of the lowest rank that reports one."""
    reported = history.losses()
    return float(reported.loss[-1]) if len(reported.loss) else None


def _notes(
    events: Sequence[AnyEvent],
    terms: Sequence[LauncherTerm],
    damages: Sequence[SegmentDamage],
    advice: str,
    run_dir: Path,
) -> tuple[str, ...]:
    """Return notes for the owner, each once: those of the summary, then those of the run."""
    notes = [advice] if advice else []
    for before, after in pairwise(terms):
        how = before.ended.outcome if before.ended else "ended without a record"
        away = duration((after.started.t_ns - before.end_ns) / 1e9)
        step = max(0, after.started.resumed_step)
        notes.append(f"the launcher {how}; after {away} the run was resumed at step {step}")
    notes += [str(damage) for damage in damages]
    if any(RECORDED in event.fault.detail for event in events if isinstance(event, Noticed)):
        notes.append(f"ranks hung: `outlast explain {run_dir}` names the rank that caused it")
    failed = [event for event in events if isinstance(event, CheckpointFailed)]
    notes += [
        f"checkpoint at step {event.step} failed: {event.error} ({event.path})" for event in failed
    ]
    own = Counter(
        f"rank {event.seat}: {event.text}" if event.seat >= 0 else event.text
        for event in events
        if isinstance(event, Note)
        and event.level == "warning"
        and not any(one.error in event.text for one in failed)  # the launcher's note on the same
    )
    own.update(
        f"durable storage {event.where}: {event.error}"
        for event in events
        if isinstance(event, DrainFailed)
    )
    own.update(
        f"{source(event, SOURCES)}: {event.finding} ({event.host or 'all hosts'}, {event.severity})"
        for event in changed_findings(events)
        if event.severity != "healthy"
    )
    if skipped := [str(event.step) for event in events if isinstance(event, BatchSkipped)]:
        notes.append(f"batches skipped: {len(skipped)}, of steps {', '.join(skipped[:8])}")
    notes += [f"{text} ({count} times)" if count > 1 else text for text, count in own.items()]
    if len(notes) > NOTES_MAX:
        more = plural(len(notes) - NOTES_MAX, "more note")
        notes = [*notes[:NOTES_MAX], f"... and {more}: `outlast events` has them all"]
    return tuple(notes)
