"""Narrator of one replication, failure by failure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outlast import events
from outlast.config import LIMIT_MAX, Limits
from outlast.controller.recovery.recovery_policy import DEFAULT, RecoveryPolicy
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.errors import UsageError
from outlast.plan.model.answer_values import format_count
from outlast.plan.simulate.controller_peers import TERM, ControllerPeers
from outlast.plan.simulate.incident_recovery import WAIT_MAX_S, IncidentRecovery
from outlast.plan.simulate.narrated_nodes import NarratedNodes
from outlast.plan.simulate.scheduled_failures import (
    FailingNodes,
    FailureSchedule,
    ScheduledNodes,
)
from outlast.plan.simulate.simulated_job import (
    MEMORY,
    STORAGE,
    SimulatedJob,
    check_job,
    check_seed,
)
from outlast.plan.simulate.story_progress import (
    EVENTS_MAX,
    SCRIPT,
    EventBook,
    JobProgress,
    StagePosition,
    StageResult,
    Stretch,
    ns,
)
from outlast.theory.failures import DAY_S

NODES_MAX = 4096
# No deadline or retry limit applies, as in the kernel.
UNLIMITED = Limits(
    hello_s=LIMIT_MAX,
    status_s=LIMIT_MAX,
    join_s=LIMIT_MAX,
    connect_s=LIMIT_MAX,
    transfer_s=LIMIT_MAX,
    attempts_max=int(LIMIT_MAX),
    respawns_max=int(LIMIT_MAX),
)


class NarratedRun(NamedTuple):
    """Outcome of one replication, with the reason where it did not end well.

    An `interrupted` run may have met a bound (failures_max, the events of a run directory).
    `rungs`: ladder rungs that the controller took, and how many incidents each ended.
    `tallies`: as in a row of the kernel.
    """

    outcome: str  # done | gave_up | interrupted
    reason: str
    ended_s: float
    rungs: dict[str, int]
    tallies: dict[str, float]


def narrate(
    job: SimulatedJob,
    *,
    seed: int = 0,
    replication: int = 0,
    run_dir: Path | None = None,
    limits: Limits = UNLIMITED,
    stopped: Callable[[], bool] = lambda: False,
    recovery: RecoveryPolicy = DEFAULT,
    schedule: FailureSchedule | None = None,
) -> NarratedRun:
    """Simulate one replication with the real controller, its policy, and the kernel's failures, or
    those of a schedule.

    With `run_dir`, write a run directory for `outlast explain`. `stopped` is called after each
    failure and ends the narration when true; events so far are complete.

    Raises UsageError naming the field of `job` that is invalid or unsupported;
    RunDirError and StorageError where `run_dir` cannot be written.
    """
    check_job(job)
    check_seed(seed)
    if job.pace != 1:
        raise UsageError("overhead: a story's steps take exactly --step; omit --overhead")
    if job.drop:
        raise UsageError(
            "drop: a story has no rung that continues without replicas; choose another strategy"
        )
    if job.nodes + job.spares > NODES_MAX:
        raise UsageError(
            f"nodes and spares are {job.nodes + job.spares} together: a story has at most"
            f" {NODES_MAX}; `outlast plan simulate` has no such limit"
        )
    book = EventBook(run_dir, job)
    try:
        return _Narrator(
            job,
            ScheduledNodes(schedule) if schedule else NarratedNodes(job, seed, replication),
            book,
            limits,
            stopped,
            recovery,
            schedule,
        ).run()
    finally:
        book.close()


class _Narrator:
    def __init__(
        self,
        job: SimulatedJob,
        nodes: FailingNodes,
        book: EventBook,
        limits: Limits,
        stopped: Callable[[], bool],
        recovery: RecoveryPolicy,
        schedule: FailureSchedule | None,
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._book = book
        self._stopped = stopped
        in_memory = job.copies > 0 or job.software_from == MEMORY
        policy = SavePolicy(memory=int(in_memory), disk=job.versions)
        self._peers = ControllerPeers(
            "story", job.nodes, job.spares, limits, policy, book.emit, recovery
        )
        self._progress = JobProgress(job, self._write_stage, self._write_save)
        self._recovery = IncidentRecovery(
            job, nodes, self._peers, self._progress, self._end_reason, schedule, in_memory=in_memory
        )
        self._schedule = schedule
        self._rungs: Counter[str] = Counter()
        if job.replicas < job.nodes:
            self._peers.needs = "a node holds a part of a replica"
        start_s = schedule.rung_s["respawn"] if schedule else job.restart_s[STORAGE]
        self._peers.start_ns = ns(start_s) - ns(0)

    def run(self) -> NarratedRun:
        peers = self._peers
        progress = self._progress
        nodes = self._nodes
        self._begin()
        now_s = 0.0
        reason = ""
        while peers.end is None:
            back_s = self._recovery.return_s()
            until_s = max(now_s, min(nodes.failure_s(), back_s))  # warm since a recovery
            now_s = progress.run(now_s, until_s, self._end_reason)
            nodes.now_s, peers.now_ns = now_s, ns(now_s)
            peers.n = progress.n
            peers.step = progress.step
            if progress.stage == "done" and not self._recovery.is_returning:
                peers.finish()
                continue
            if not self._end_reason() and back_s <= now_s < nodes.failure_s():
                now_s = self._take_back(now_s)
            elif not self._end_reason():
                now_s = self._recover(now_s)
            if peers.end is None and (reason := self._end_reason()):
                peers.stop(reason)
        end = peers.end
        self._book.emit(
            events.RunEnded(
                t_ns=peers.now_ns,
                outcome=end.outcome,
                exit_code=end.exit_code,
                n=end.n,
                step=end.step,
                cause=end.cause,
            )
        )
        if peers.decided is not None and peers.decided.rung == "stop":
            reason = peers.decided.reason
        reason = reason or (end.cause.detail if end.cause is not None else "")
        row = self._tallies(now_s, end.outcome == "done")
        return NarratedRun(end.outcome, reason, now_s, dict(self._rungs), row)

    def _end_reason(self) -> str:
        """Return why the narration of an unfinished run ends here; "" if it continues."""
        failures = self._nodes.failures
        now_s = self._nodes.now_s
        if self._stopped():
            reason = "interrupted"
        elif self._book.full:
            reason = f"{EVENTS_MAX:,} events are written"
        elif failures >= self._job.failures_max or now_s > WAIT_MAX_S:
            reason = "the work is not done"
        else:
            return ""
        return f"{reason}: {format_count(failures, 'failure')} in {now_s / DAY_S:,.3g} days"

    def _begin(self) -> None:
        peers = self._peers
        peers.now_ns = ns(0)
        self._book.emit(
            events.RunStarted(
                t_ns=peers.now_ns,
                run="story",
                term=TERM,
                world=self._job.nodes,
                spares=self._job.spares,
                script=SCRIPT,
                args=(),
            )
        )
        peers.begin()

    def _tallies(self, now_s: float, done: bool) -> dict[str, float]:
        progress = self._progress
        return {
            "wall_s": now_s if done else math.inf,
            "done_s": self._job.work_s if done else progress.stored.cycle * self._job.interval_s,
            "failures": float(self._nodes.failures),
            "redo_s": progress.redo_s,
            "save_s": progress.save_s,
            "slow_s": progress.slow_s,  # with fewer ranks
            **self._recovery.tallies,
        }

    def _recover(self, now_s: float) -> float:
        peers = self._peers
        progress = self._progress
        seats = peers.state.members.seats
        generation = peers.state.generation
        attempt = progress.break_off()
        end = self._recovery.recover(now_s)
        if end.rung:
            self._rungs[end.rung] += 1
        if peers.end is None:
            lost = (*progress.restore(end.source), Stretch(now_s, min(end.closed_s, end.now_s)))
            self._book.write_lost_attempt(attempt._replace(stretches=lost), seats, generation)
            self._set_pace()
        return end.now_s

    def _take_back(self, now_s: float) -> float:
        """Let absent ranks come back, between two steps, if workers for them are warm."""
        peers = self._peers
        failures = self._nodes.failures
        self._progress.break_off()  # its steps are those of this generation; nothing is redone
        end = self._recovery.take_back(now_s)
        if not end.rung:
            return end.now_s  # none came back
        self._rungs[end.rung] += 1
        if peers.end is None:
            if self._nodes.failures > failures:
                self._progress.restore(end.source)
            self._set_pace()
        return end.now_s

    def _set_pace(self) -> None:
        """Set the pace of work by the ranks that are present."""
        world, absent = self._job.nodes, len(self._peers.absent)
        shares = self._schedule.step_shares if self._schedule else {}
        self._progress.pace = shares.get(absent, 1.0) * world / (world - absent) if absent else 1.0

    def _write_stage(self, result: StageResult) -> None:
        self._book.write_stage(
            result, self._peers.state.members.seats, self._peers.state.generation
        )

    def _write_save(self, when_s: float, position: StagePosition) -> None:
        step = self._progress.step_at(position)
        self._book.emit(
            events.CheckpointSaved(
                t_ns=ns(when_s),
                n=self._progress.n_at(position),
                step=step,
                path=f"checkpoints/{step}",
                size_bytes=0,
                seconds=self._job.cost_s + self._job.flush_s,
            )
        )
