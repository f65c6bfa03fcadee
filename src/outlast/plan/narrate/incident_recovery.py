"""Recovery from one incident: the controller decides, and the job runs again or ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from outlast import events
from outlast.plan.narrate.controller_peers import ControllerPeers
from outlast.plan.narrate.narrated_nodes import NarratedNodes, NodeStrike
from outlast.plan.narrate.story_progress import JobProgress, StagePosition, ns, seconds
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob
from outlast.transport import messages

_SOURCE = {"rollback": MEMORY, "restart": STORAGE}  # any other rung: LIVE
_COUNTS = ("from_live", "from_memory", "from_storage")  # by source
_REASONS = (
    "software failed",
    "software failed everywhere: of the state, copies in memory are left",
    "a failure of everybody: of the state, only storage is left",
)  # by source
FOREVER_S = 1e10  # 300 years


class RecoveryResult(NamedTuple):
    """Result of one recovery. `closed_s`: time of the core's first report; infinity if none."""

    now_s: float
    source: int
    closed_s: float


class IncidentRecovery:
    """Recovery from the failures of one job.

    `tallies`: seconds and counts so far. `enough`: returns whether recoveries that a failure
    interrupted must not be started again.
    """

    def __init__(
        self,
        job: SimulatedJob,
        world: NarratedNodes,
        cast: ControllerPeers,
        progress: JobProgress,
        enough: Callable[[], object],
        *,
        in_memory: bool,
    ) -> None:
        self._job = job
        self._world = world
        self._cast = cast
        self._progress = progress
        self._enough = enough
        self._in_memory = in_memory
        self.tallies: dict[str, float] = dict.fromkeys(
            ("incidents", *_COUNTS, "stalls", "detect_s", "restart_s", "wait_s"), 0.0
        )
        self._away: dict[int, str] = {}  # nodes in repair, and their hosts
        self._now_s = 0.0
        self._untold: list[tuple[float, NodeStrike]] = []  # when, and what
        self._left = LIVE  # the best source that the incident's failures have left
        self._closed_s = math.inf

    def recover(self, now_s: float) -> RecoveryResult:
        """Recover from a failure at the present time until the next generation opens or the run
        ends."""
        self._closed_s = math.inf
        self._left = LIVE
        self._cast.n = self._progress.n
        self._cast.step = self._progress.step
        self.tallies["incidents"] += 1
        self._move(now_s)
        self._strike()
        while not self._round():
            if self._cast.end is not None or self._enough():
                break
            if self._world.failure_s() <= self._now_s:
                self._strike()
        source = self._source()
        self.tallies[_COUNTS[source]] += 1
        return RecoveryResult(self._now_s, source, self._closed_s)

    def _source(self) -> int:
        """Return the source by the core's decision; by the failures without one."""
        decided = self._cast.decided
        if decided is None or self._closed_s == math.inf:
            return self._left
        return _SOURCE.get(decided.rung, LIVE)

    def _round(self) -> bool:
        """Replace nodes, detect, restart; return whether the job runs. A failure ends the round."""
        self._collect()
        if self._world.missing and not self._wait():
            return False
        if not self._pass("detect_s", self._job.detect_s):
            return False
        self._hear()
        decisions = self._cast.decisions
        if self._cast.end is not None:
            return False
        if not self._pass("restart_s", self._job.restart_s[self._source()]):
            return False
        if self._cast.decisions != decisions:
            return False  # a limit of the core's was passed: it has decided anew
        self._cast.ready()
        self._world.recovered()
        return self._cast.state.mode == "open"

    # --- time ---

    def _move(self, now_s: float) -> None:
        """Advance the clock of all; the core is woken when it requested it."""
        cast = self._cast
        while cast.wake_ns is not None and cast.wake_ns <= ns(now_s) and cast.end is None:
            self._now_s = max(self._now_s, seconds(cast.wake_ns))
            cast.now_ns = cast.wake_ns
            cast.wake_ns = None
            cast.tick()
        self._now_s = now_s if cast.end is None else self._now_s
        cast.now_ns = ns(self._now_s)
        self._world.now_s = self._now_s

    def _pass(self, tally: str, length_s: float) -> bool:
        """Advance the clock; return whether the time passed without a failure or the run's end."""
        before_s = self._now_s
        end_s = before_s + length_s
        failure_s = self._world.failure_s()
        self._move(min(end_s, failure_s))
        self.tallies[tally] += self._now_s - before_s
        return failure_s >= end_s and self._cast.end is None

    def _wait(self) -> bool:
        """Wait for nodes; nothing fails meanwhile. Return False where the run ends over it."""
        self._hear()
        self.tallies["stalls"] += 1
        while self._world.missing and self._cast.end is None:
            before_s = self._now_s
            self._move(min(self._world.back_s(), before_s + FOREVER_S))
            if self._now_s >= before_s + FOREVER_S and self._cast.end is None:
                self._cast.stop("no node will ever be there")
            waited_s = self._now_s - before_s
            self.tallies["wait_s"] += waited_s
            self._world.wait(waited_s)
            self._progress.wait(waited_s)
            self._collect()
        return self._cast.end is None

    # --- what happens, and who hears of it ---

    def _collect(self) -> None:
        """Return repaired hosts to the controller."""
        for node in self._world.collect():
            if node not in self._away:
                self._hear()  # it was away for less than detection takes
            self._cast.bring_back(self._away.pop(node))
            self._cast.settle()

    def _strike(self) -> None:
        blow = self._world.strike()
        self._left = max(self._left, blow.source)
        if blow.source == STORAGE:
            self._progress.stop_flush(self._now_s)
        self._untold.append((self._now_s, blow))

    def _hear(self) -> None:
        """Report new failures to the core, which decides."""
        cast = self._cast
        progress = self._progress
        if not self._untold:
            return
        progress.settle(self._now_s)
        disk = self._checkpoint(progress.stored, "disk")
        memory = self._checkpoint(progress.copied, "memory")
        if cast.state.mode == "open":
            self._closed_s = min(self._closed_s, self._now_s)
            cast.saved(memory if self._in_memory else disk)
        cast.found = memory if self._in_memory and self._left != STORAGE else disk
        for when_s, blow in self._untold:
            self._break(when_s, blow)
            cast.settle()
        self._untold.clear()

    def _break(self, when_s: float, blow: NodeStrike) -> None:
        cast = self._cast
        live = blow.source == LIVE
        detail = "its node failed and goes to repair" + ("" if live else ", with all that it held")
        for seat, node in blow.lost_nodes:
            fault = self._fault(when_s, "agent_lost", detail)
            host = cast.lose(seat, fault, live=live)
            cast.take_away(host)
            self._away[node] = host
        for seat in blow.crashed:
            fault = self._fault(when_s, "exited", "it crashed; its node goes on")
            cast.lose(seat, fault, live=live)
        if blow.lost_nodes or blow.crashed:
            return
        fault = self._fault(when_s, "transport", "software failed; every worker lives")
        if not (live and cast.broken(fault)):
            fault = self._fault(when_s, "exited", _REASONS[blow.source])
            cast.lose(cast.somebody(), fault, live=live)

    def _fault(self, when_s: float, kind: events.FaultKind, detail: str) -> events.Fault:
        return events.Fault(
            kind=kind,
            detail=detail,
            n=self._progress.n,
            step=self._progress.step + 1,
            state="running" if self._cast.state.mode == "open" else "",
            exit_code=int(kind == "exited"),
            t_ns=ns(when_s),
        )

    def _checkpoint(self, place: StagePosition, tier: str) -> messages.Checkpointed:
        n = self._progress.n_at(place)
        step = self._progress.step_at(place)
        return messages.Checkpointed(n=n, step=step, path=f"{tier}/{step}", tier=tier)
