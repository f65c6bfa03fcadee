"""Recovery of the narrated job from one incident, by decisions of the real controller."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from outlast import events
from outlast.plan.simulate.controller_peers import ControllerPeers
from outlast.plan.simulate.narrated_nodes import NodeStrike
from outlast.plan.simulate.scheduled_failures import FailingNodes, FailureSchedule
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob
from outlast.plan.simulate.story_progress import JobProgress, StagePosition, ns, seconds
from outlast.transport import messages

_SOURCE = {"rollback": MEMORY, "restart": STORAGE}  # any other rung: LIVE
_SOURCE_TALLIES = ("from_live", "from_memory", "from_storage")  # by source
_REASONS = (
    "software failed",
    "software failed on all workers: copies in memory survive",
    "all workers failed: only checkpoints in storage survive",
)  # by source
WAIT_MAX_S = 1e10  # 300 years


class RecoveryResult(NamedTuple):
    """Result of a recovery. `closed_s`: time of the controller's first report; infinity if none.
    `rung`: of the controller's newest decision; "": it decided nothing."""

    now_s: float
    source: int
    closed_s: float
    rung: str


class IncidentRecovery:
    """Recovery from the failures of one job.

    `tallies`: seconds and counts so far. `is_returning`: the controller has decided that absent
    ranks come back at once. `is_over`: returns whether an interrupted recovery must
    not start again. `schedule`: its times of recoveries, by rung; without it those of the job, by
    their source.
    """

    def __init__(
        self,
        job: SimulatedJob,
        nodes: FailingNodes,
        peers: ControllerPeers,
        progress: JobProgress,
        is_over: Callable[[], object],
        schedule: FailureSchedule | None,
        *,
        in_memory: bool,
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._peers = peers
        self._progress = progress
        self._is_over = is_over
        self._schedule = schedule
        self._opened_s = 0.0  # the newest generation
        self._decisions = 0  # before this incident
        self._in_memory = in_memory
        self.is_returning = False  # absent ranks come back at once
        self._shrinks = not peers.needs and peers.state.recovery.shrinks
        self.tallies: dict[str, float] = dict.fromkeys(
            ("incidents", *_SOURCE_TALLIES, "stalls", "detect_s", "restart_s", "wait_s"), 0.0
        )
        self._hosts_in_repair: dict[int, str] = {}  # host by node
        self._now_s = 0.0
        self._unreported: list[tuple[float, NodeStrike]] = []  # time and failure
        self._best_source = LIVE  # that survives the incident's failures
        self._closed_s = math.inf

    def recover(self, now_s: float) -> RecoveryResult:
        """Recover from a failure at the present time until the next generation opens or the run
        ends."""
        self._begin(now_s)
        self.is_returning = False
        self.tallies["incidents"] += 1
        if self._schedule and now_s - self._opened_s >= self._schedule.refill_s:
            self._peers.report_progress()  # spares are started, and warm
        self._strike()
        return self._end(is_open=self._attempt())

    def return_s(self) -> float:
        """Return the time at which an absent rank may come back: a worker for it is warm, or a node
        is repaired; infinity where none is absent."""
        if self.is_returning:
            return self._now_s
        if not self._peers.absent:
            return math.inf
        warm_ns = self._peers.warm_ns()
        warm_s = seconds(warm_ns) if warm_ns is not None else math.inf
        return min(warm_s, self._nodes.next_repair_s() if self._nodes.missing else math.inf)

    def take_back(self, now_s: float) -> RecoveryResult:
        """Let absent ranks come back at the present time, as far as workers for them are warm."""
        self._begin(now_s)
        self._decisions -= self.is_returning
        self.is_returning = False
        self._return_repaired()
        self._peers.end_starts()
        if self._peers.decisions == self._decisions:
            self._peers.report_progress()  # workers are started on hosts that are back
            self._peers.exchange_messages()
        if self._peers.decisions == self._decisions:
            return RecoveryResult(self._now_s, LIVE, math.inf, "")
        self.tallies["incidents"] += 1
        is_open = self._spend("restart_s", self._restart_s())
        if is_open:
            self._peers.report_ready()
            self._nodes.begin_window()
            is_open = self._peers.state.mode == "open"
        return self._end(is_open=is_open)

    def _begin(self, now_s: float) -> None:
        self._closed_s = math.inf
        self._best_source = LIVE
        self._peers.n = self._progress.n
        self._peers.step = self._progress.step
        self._decisions = self._peers.decisions
        self._advance(now_s)

    def _end(self, *, is_open: bool) -> RecoveryResult:
        """Recover again until the generation opens, and return the result."""
        while not is_open:
            if self._peers.end is not None or self._is_over():
                break
            if self._nodes.failure_s() <= self._now_s:
                self._strike()
            is_open = self._attempt()
        self._opened_s = self._now_s
        source = self._source()
        decided = self._peers.decided if self._peers.decisions > self._decisions else None
        if self._peers.absent and self._peers.end is None:
            before = self._peers.decisions
            self._peers.report_progress()  # a step is done: workers for absent ranks are started
            self._peers.exchange_messages()
            self.is_returning = self._peers.decisions > before
        self.tallies[_SOURCE_TALLIES[source]] += 1
        rung = decided.rung if decided else ""
        return RecoveryResult(self._now_s, source, self._closed_s, rung)

    def _source(self) -> int:
        """Return the controller's source, or without a decision the best that survives."""
        decided = self._peers.decided
        if decided is None or self._peers.decisions == self._decisions:
            return self._best_source
        return _SOURCE.get(decided.rung, LIVE)

    def _attempt(self) -> bool:
        """Replace nodes, detect, restart; return whether the job runs. A failure ends the round."""
        self._return_repaired()
        if self._nodes.missing and not self._shrinks and not self._wait_for_nodes():
            return False
        if not self._spend("detect_s", self._detect_s()):
            return False
        before = self._peers.decisions
        self._report_failures()
        if self._shrinks and self._peers.lacks_workers and not self._wait_for_nodes():
            return False
        if not self._await_starts():
            return False
        decisions = self._peers.decisions
        if decisions == before and self._peers.state.mode == "open":
            return True  # a notice for which no rank moves
        if self._peers.end is not None:
            return False
        if not self._spend("restart_s", self._restart_s()):
            return False
        if self._peers.decisions != decisions:
            return False  # a deadline of the controller passed, and it decided again
        self._peers.report_ready()
        self._nodes.begin_window()
        return self._peers.state.mode == "open"

    def _await_starts(self) -> bool:
        """Wait for starting workers that have a rank; return False where a failure came first."""
        while (warm_ns := self._peers.warm_ns(seated=True)) is not None:
            if not self._spend("restart_s", max(0.0, seconds(warm_ns) - self._now_s)):
                return False
            self._peers.end_starts()
        return True

    # --- time ---

    def _detect_s(self) -> float:
        found = [one.detect_s for _, one in self._unreported if one.detect_s is not None]
        return max(found, default=self._job.detect_s)

    def _restart_s(self) -> float:
        decided = self._peers.decided
        own_s = self._job.restart_s[self._source()]
        by_rung: dict[str, float] = {**self._schedule.rung_s} if self._schedule else {}
        return by_rung.get(decided.rung, own_s) if decided else own_s

    def _advance(self, now_s: float) -> None:
        """Advance all clocks to `now_s`; tick the controller at each wake-up that it requested."""
        peers = self._peers
        while peers.wake_ns is not None and peers.wake_ns <= ns(now_s) and peers.end is None:
            self._now_s = max(self._now_s, seconds(peers.wake_ns))
            peers.now_ns = peers.wake_ns
            peers.wake_ns = None
            peers.tick()
        self._now_s = now_s if peers.end is None else self._now_s
        peers.now_ns = ns(self._now_s)
        self._nodes.now_s = self._now_s

    def _spend(self, tally: str, length_s: float) -> bool:
        """Advance the clock; return whether the time passed without a failure or the run's end."""
        before_s = self._now_s
        end_s = before_s + length_s
        failure_s = self._nodes.failure_s()
        self._advance(min(end_s, failure_s))
        self.tallies[tally] += self._now_s - before_s
        return failure_s >= end_s and self._peers.end is None

    def _wait_for_nodes(self) -> bool:
        """Wait for nodes; nothing fails meanwhile. Return False if the run ends."""
        self._report_failures()
        self.tallies["stalls"] += 1
        while self._nodes.missing and self._peers.end is None:
            before_s = self._now_s
            self._advance(min(self._nodes.next_repair_s(), before_s + WAIT_MAX_S))
            if self._now_s >= before_s + WAIT_MAX_S and self._peers.end is None:
                self._peers.stop("no node will ever be available")
            waited_s = self._now_s - before_s
            self.tallies["wait_s"] += waited_s
            self._nodes.pass_waiting_time(waited_s)
            self._progress.wait(waited_s)
            self._return_repaired()
        return self._peers.end is None

    # --- failures, repairs and their reports to the controller ---

    def _return_repaired(self) -> None:
        """Return repaired hosts to the controller."""
        for node in self._nodes.collect_repaired():
            if node not in self._hosts_in_repair:
                self._report_failures()  # repaired before its failure was detected
            if node not in self._hosts_in_repair:
                continue  # its host was another one's
            self._peers.add_host(self._hosts_in_repair.pop(node))
            self._peers.exchange_messages()
            if self._shrinks and self._peers.state.mode == "open" and not self._peers.absent:
                self._peers.report_progress()  # a spare is started there, before ranks leave
                self._peers.exchange_messages()

    def _strike(self) -> None:
        failure = self._nodes.strike()
        self._best_source = max(self._best_source, failure.source)
        if failure.source == STORAGE:
            self._progress.stop_flush(self._now_s)
        self._unreported.append((self._now_s, failure))

    def _report_failures(self) -> None:
        """Report new failures to the controller, which decides."""
        peers = self._peers
        progress = self._progress
        if not self._unreported:
            return
        progress.complete_flush(self._now_s)
        disk = self._checkpoint(progress.stored, "disk")
        memory = self._checkpoint(progress.copied, "memory")
        if peers.state.mode == "open":
            self._closed_s = min(self._closed_s, self._now_s)
            peers.report_save(disk)
            if self._in_memory:
                peers.report_save(memory)
        peers.disk_checkpoint = disk
        peers.restart_checkpoint = (
            memory if self._in_memory and self._best_source != STORAGE else disk
        )
        for when_s, failure in self._unreported:
            self._report_failure(when_s, failure)
            peers.exchange_messages()
        self._unreported.clear()

    def _report_failure(self, when_s: float, failure: NodeStrike) -> None:
        peers = self._peers
        live = failure.source == LIVE
        if failure.kind == "requested":
            peers.report_notice(failure.crashed[0])
            return
        detail = "node failed" + ("" if live else "; its state is lost")
        for its, node in failure.lost_nodes:
            fault = self._fault(when_s, "agent_lost", detail)
            seat = self._present(its)
            host = peers.lose_seat(seat, fault, live=live) if seat >= 0 else ""
            if host := host or peers.host_without_rank():
                peers.remove_host(host)
                self._hosts_in_repair[node] = host
        for its in failure.crashed:
            if (seat := self._present(its)) < 0:
                continue  # it is absent
            kind = failure.kind or "exited"
            fault = self._fault(when_s, kind, "process crashed; node is healthy")
            peers.lose_seat(seat, fault, live=live)
        if failure.lost_nodes or failure.crashed:
            return
        kind = failure.kind or "transport"
        fault = self._fault(when_s, kind, "software failed; all workers are alive")
        if not (live and peers.report_broken_connection(fault)):
            fault = self._fault(when_s, "exited", _REASONS[failure.source])
            peers.lose_seat(peers.seat_to_lose(), fault, live=live)

    def _present(self, seat: int) -> int:
        """Return the rank that a failure of a node's rank strikes; -1 if it is absent. Where some
        of several absent ranks came back, the nodes may have others of them."""
        seats, absent = self._peers.state.members.seats, self._peers.absent
        if seat not in absent:
            return seat if seats[seat] else -1
        others = (one for one in self._nodes.missing if one not in absent and seats[one])
        return next(others, -1)

    def _fault(self, when_s: float, kind: events.FaultKind, detail: str) -> events.Fault:
        return events.Fault(
            kind=kind,
            detail=detail,
            n=self._progress.n,
            step=self._progress.step + 1,
            state="running" if self._peers.state.mode == "open" else "",
            exit_code=int(kind == "exited"),
            t_ns=ns(when_s),
        )

    def _checkpoint(self, position: StagePosition, tier: str) -> messages.Checkpointed:
        n = self._progress.n_at(position)
        step = self._progress.step_at(position)
        return messages.Checkpointed(n=n, step=step, path=f"{tier}/{step}", tier=tier)
