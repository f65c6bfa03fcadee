"""Present state of a running job, built from events and heartbeats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outlast.controller.planned_migration import SOURCES
from outlast.events import (
    REHEARSAL,
    AnyEvent,
    AttemptRefused,
    BatchSkipped,
    CheckpointFailed,
    CheckpointSaved,
    Decided,
    Drained,
    DrainFailed,
    GenerationClosed,
    GenerationOpened,
    LoopBegun,
    Metrics,
    NodeReleased,
    PhaseDone,
    RunEnded,
    RunStarted,
    Scheduled,
    Warned,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
    WorkerWarm,
)
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.incidents import Tracker
from outlast.text_formatting import (
    duration,
    fault_text,
    intervals,
    plural,
    rank_and_host,
    size,
    source,
    warning,
)

Beats = dict[str, tuple[int, int, str, float]]
RATE_WINDOW_S = 15.0


@dataclass
class WorkerRow:
    """State of one worker by its last page and events. `loss` is None until one is known."""

    worker: str
    seat: int = -1
    generation: int = 0
    n: int = 0
    step: int = 0
    state: str = "starting"
    loss: float | None = None


@dataclass
class RunBoard:
    """State of a view, fed with events and beats.

    The launcher's events come at once, the workers' whenever they are read. The board itself reads
    no clock, file or terminal.
    """

    run: str = ""
    script: str = ""
    world: int = 0
    term: int = 0
    generation: int = 0
    begin_ns: int = 0
    outcome: str = ""
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    tracker: Tracker = field(default_factory=Tracker)
    incidents_before: int = 0  # under earlier launchers
    steps_total: int | None = None
    saved: dict[str, tuple[int, int]] = field(default_factory=dict)  # tier -> step, time in ns
    failed_saves: Counter[str] = field(default_factory=Counter)  # by tier
    _step: int = 0
    _loss: float | None = None
    _step_ns: int = 0
    _refused_ns: int = 0
    _recovered_ns: int = 0
    _closed_ns: int = 0
    _opened_ns: int = 0
    _rate: list[tuple[int, int]] = field(default_factory=list)
    _rate_begun: bool = False
    _absent: tuple[int, ...] = ()

    def take(self, event: AnyEvent) -> None:
        """Update the board with one event of the run."""
        self.tracker.take(event)
        if isinstance(event, RunStarted):
            self.run, self.script, self.world = event.run, event.script, event.world
            self.term, self.begin_ns = event.term, event.t_ns
            self.incidents_before = self.tracker.count
        elif isinstance(event, WorkerSpawned | WorkerWarm | WorkerSeated | WorkerLost):
            self._staff(event)
        elif isinstance(event, GenerationClosed):
            self._closed_ns = self._closed_ns or event.t_ns
        elif isinstance(event, Decided):
            self._absent = event.absent
        elif isinstance(event, GenerationOpened):
            self._opened(event)
        elif isinstance(event, PhaseDone):
            if event.kind == "step":
                self._step_ns += event.t_ns - max(event.t_begin_ns, self._since_open_ns(event))
        elif isinstance(event, AttemptRefused):
            if event.reason != REHEARSAL:
                self._refused_ns += event.t_ns - event.t_begin_ns
        elif isinstance(event, CheckpointSaved | CheckpointFailed | Drained | DrainFailed):
            self._save(event)
        elif isinstance(event, LoopBegun):
            self.steps_total = event.steps
        elif isinstance(event, Metrics):
            if event.worker in self.workers and "loss" in event.values:
                self.workers[event.worker].loss = event.values["loss"]
        elif isinstance(event, RunEnded):
            self.outcome = event.outcome

    def beat(self, beats: Beats, now_ns: int) -> None:
        """Update the rows of workers with their beats; those of lost workers are ignored."""
        for worker, (n, step, state, loss) in beats.items():
            row = self.workers.get(worker)
            if row is None:
                continue  # the beat of a worker that was lost meanwhile
            row.n, row.step, row.state = n, step, state
            # A page begins with 0 and a worker with NaN: neither is a loss until one is reported.
            if state != "starting" and (loss == loss or row.loss is not None):
                row.loss = loss
        seats = self.seats
        if len(seats) == self.world - len(self._absent) and seats:
            self._step = min(row.step for row in seats)
            self._loss = next((row.loss for row in seats if row.loss is not None), None)
        if not self._rate_begun and self._rate and self.step != self._rate[-1][1]:
            # Neither the start nor the steps before a resumed checkpoint belong to the rate.
            self._rate_begun = True
            self._rate.clear()
        self._rate.append((now_ns, self.step))
        oldest_ns = now_ns - round(RATE_WINDOW_S * 1e9)
        while len(self._rate) > 2 and self._rate[0][0] < oldest_ns:
            del self._rate[0]

    @property
    def seats(self) -> list[WorkerRow]:
        """Rows of the workers that hold a seat, by seat."""
        return sorted(
            (row for row in self.workers.values() if row.seat >= 0), key=lambda row: row.seat
        )

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks without a worker, while the others go on."""
        return self._absent

    @property
    def spares(self) -> list[WorkerRow]:
        """Rows of the workers without a seat."""
        return [row for row in self.workers.values() if row.seat < 0]

    @property
    def step(self) -> int:
        """Steps that every seat had committed at the last complete reading."""
        return self._step

    @property
    def loss(self) -> float | None:
        """Last loss of the first rank that reports one; None if there is none."""
        return self._loss

    @property
    def incidents(self) -> int:
        """Number of incidents under this launcher."""
        return self.tracker.count - self.incidents_before

    @property
    def recovering(self) -> bool:
        """True while the generation is closed for an incident."""
        return self._closed_ns > 0

    def steps_per_s(self) -> float:
        """Return the rate over the last beats since the first step; 0 while it is unknown."""
        if len(self._rate) < 2:
            return 0.0
        (first_ns, first), (last_ns, last) = self._rate[0], self._rate[-1]
        return max(0, last - first) * 1e9 / (last_ns - first_ns) if last_ns > first_ns else 0.0

    def lost_s(self, now_ns: int) -> float:
        """Return the wall seconds lost to failures: discarded attempts and recoveries.

        Averaged over the seats.
        """
        open_ns = now_ns - self._closed_ns if self._closed_ns else 0
        refused_ns = self._refused_ns / self.world if self.world else 0
        return (self._recovered_ns + max(0, open_ns) + refused_ns) / 1e9

    def goodput(self, now_ns: int) -> float | None:
        """Return step time over wall x seats; None until a step is known."""
        wall_ns = (now_ns - self.begin_ns) * self.world
        return min(1.0, self._step_ns / wall_ns) if self._step_ns and wall_ns > 0 else None

    def _save(self, event: CheckpointSaved | CheckpointFailed | Drained | DrainFailed) -> None:
        tier = "disk" if isinstance(event, CheckpointSaved | CheckpointFailed) else "durable"
        if isinstance(event, CheckpointSaved | Drained):
            self.saved[tier] = (event.step, event.t_ns)
        else:
            self.failed_saves[tier] += 1

    def _opened(self, event: GenerationOpened) -> None:
        if self._closed_ns:
            self._recovered_ns += max(0, event.t_ns - self._closed_ns)
        self._closed_ns, self._opened_ns, self.generation = 0, event.t_ns, event.generation
        for row in self.seats:
            row.generation = event.generation

    def _since_open_ns(self, event: PhaseDone) -> int:
        return self._opened_ns if event.generation == self.generation else event.t_begin_ns

    def _staff(self, event: WorkerSpawned | WorkerWarm | WorkerSeated | WorkerLost) -> None:
        if isinstance(event, WorkerLost):
            self.workers.pop(event.worker, None)
            return
        row = self._row(event.worker)
        if isinstance(event, WorkerWarm):
            row.state = "waiting"
            return
        if isinstance(event, WorkerSeated):
            row.generation = event.generation
            for other in [row for row in self.seats if row.seat == event.seat]:
                del self.workers[other.worker]
            self.workers[event.worker] = row
        row.seat = event.seat

    def _row(self, worker: str) -> WorkerRow:
        return self.workers.setdefault(worker, WorkerRow(worker))


def headline(incident: Incident, *, brief: bool = False) -> str:
    """Describe an incident on one line; `brief`: with its longest phase only."""
    text = (
        f"incident {incident.number}: {rank_and_host(incident.cause)} {fault_text(incident.cause)}"
    )
    if incident.is_request:
        return text
    if incident.others:
        text += f" and {plural(len(incident.others), 'fault')} more"
    text += f" {incident.where}"
    for each in incident.replaced:
        text += f", {each.new} took rank {each.seat}"
    if incident.state == "recovered":
        phases = [item for item in incident.phases_ms.items() if item[1] >= 0.1]
        phases = sorted(phases, key=lambda item: -item[1])[:1] if brief else phases
        spent = ", ".join(f"{phase} {duration(ms / 1e3)}" for phase, ms in phases)
        return f"{text}: recovered in {duration(incident.total_ms / 1e3)} ({spent})"
    ended = {"stopped": "the run ended", "died": "its launcher died"}.get(incident.state)
    return f"{text}: {ended}" if ended else f"{text} ..."


def progress(board: RunBoard, now_ns: int) -> str:
    """Describe the progress of the run on one line."""
    rate, total = board.steps_per_s(), board.steps_total
    parts = [f"step {board.step}"]
    if total and board.step > total:  # fewer batches a step, while ranks were absent
        parts[0] += f" ({total} with all ranks present)"
    elif total:
        parts[0] += f" of {total} ({100 * board.step // total} %)"
        if rate and board.step < total:
            parts.append(f"{duration((total - board.step) / rate)} left")
    if board.loss is not None:
        parts.append(f"loss {board.loss:.4f}")
    if rate:
        parts.append(f"{rate:.1f} steps/s" if rate >= 1 else f"{1 / rate:.1f} s/step")
    parts.append(f"generation {board.generation}")
    if board.absent:
        parts.append(f"{len(board.absent)} of {plural(board.world, 'rank')} absent")
    goodput = board.goodput(now_ns)
    if goodput is not None:
        since = " of this launch" if board.term > 1 else ""  # the summary covers all launches
        parts.append(f"goodput {100 * goodput:.0f} %{since}")
    if board.incidents:
        lost = duration(board.lost_s(now_ns))
        parts.append(f"{plural(board.incidents, 'incident')}, {lost} lost")
    return ", ".join(parts)


def milestone(event: AnyEvent, incident: int = 0) -> str:
    """Describe an event that deserves its own line, or return "".

    `incident`: the newest incident's number over the run's life, as `outlast explain` counts.
    """
    if isinstance(event, RunStarted):
        spares = f" and {plural(event.spares, 'spare')}" if event.spares else ""
        again = f", resumed at step {event.resumed_step}" if event.resumed_step >= 0 else ""
        return f"{event.script}: {plural(event.world, 'rank')}{spares}, term {event.term}{again}"
    if isinstance(event, Decided):
        number = incident or event.incident
        if event.rung == "stop":
            return f"incident {number}: stop: {event.reason}"
        lost = "" if event.verdict == "redo" else ", the step is committed"
        return f"incident {number}: {event.rung} from step {event.step}{lost}: {event.reason}"
    if isinstance(event, CheckpointSaved):
        return f"checkpoint of step {event.step}: {event.path}"
    if isinstance(event, CheckpointFailed):
        return f"checkpoint of step {event.step} failed: {event.error} ({event.path})"
    if isinstance(event, Drained):
        detail = f"{size(event.size_bytes)} in {duration(event.seconds)}"
        return f"checkpoint of step {event.step} is in durable storage: {event.where} ({detail})"
    if isinstance(event, DrainFailed):
        return f"durable storage {event.where} is behind, and tried again: {event.error}"
    if isinstance(event, Warned):
        return f"{source(event, SOURCES)}: {warning(event)}"
    if isinstance(event, BatchSkipped):
        return f"the batch of step {event.step} was skipped: {event.detail}"
    if isinstance(event, NodeReleased):
        return f"{event.host} has left the run; outlast run --resume RUN_DIR on it joins again"
    if isinstance(event, Scheduled):
        return f"{intervals(event)}; `outlast explain` shows why"
    return ""
