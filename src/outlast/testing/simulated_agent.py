"""A simulated agent: starts and reaps workers, forwards frames, renews a lease."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, cast

from outlast.controller import hang_detection
from outlast.events import Fault, Warned
from outlast.testing.simulated_process import SimProcess
from outlast.testing.simulated_worker import SimWorker
from outlast.transport import messages
from outlast.transport.worker_page import WARM_PHASES, PhasePace, State, WorkerObservation

if TYPE_CHECKING:
    from outlast.testing.simulated_cluster import SimCluster

_PHASE_NS = 100_000_000  # typical duration


def observe_worker(worker: SimWorker) -> WorkerObservation:
    """Return the present observation of a worker, as the hang monitor gets it."""
    word: State = "healing"
    if worker.state in ("starting", "waiting", "setup", "running", "voting", "applying"):
        word = cast("State", worker.state)
    elif worker.state in ("finished", "torn"):
        word = "finished" if worker.state == "finished" else "applying"
    elif worker.stalled or worker.opened == worker.generation > max(worker.closed, worker.answered):
        word = "idle"
    return WorkerObservation(
        worker=worker.name,
        seat=worker.seat,
        n=worker.n,
        state=word,
        collectives=0,
        t_ns=worker.moved_ns,
        paces={0: PhasePace(worker.completed, _PHASE_NS if worker.completed > WARM_PHASES else 0)},
        waits=word == "voting",
        letter="T" if worker.hung else "S",
    )


_LOOK_S = 0.5
_NEWS_S = 0.15  # until the controller notices a broken connection
_WORDS = {"prepared": "voting", "torn": "applying"}


class SimAgent:
    """One host. Its connection may break; `epoch` counts connections."""

    def __init__(self, cluster: SimCluster, name: str, capacity: int) -> None:
        self.cluster, self.name, self.capacity = cluster, name, capacity
        self.line = cluster.timeline
        self.present = True
        self.incarnation = 1
        self.connected = False
        self.epoch = 0
        self.blocked_s = 0.0  # no connection before this time
        self.workers: dict[str, SimWorker] = {}
        self.lost: deque[messages.WorkerLostReport] = deque(maxlen=64)
        self._seq = 0
        self._up_s = self._down_s = 0.0
        self._renewals: deque[float] = deque()
        self._lease_from_s = 0.0
        self._memory = hang_detection.WorkerHistory()
        self._dial()
        self._keep_lease()
        self._watch()

    # --- the connection ---

    def _dial(self) -> None:
        self.line.after(self.line.between(0.05, 0.3), self._dial)
        line = self.line
        if self.connected or not self.present or line.now_s < self.blocked_s:
            return
        if not self.cluster.controller_up:
            return
        self.connected = True
        self.epoch += 1
        self._renewals.clear()
        self._renewals.append(line.now_s)
        self._say(
            messages.AgentHello(
                host=self.name,
                address="",
                capacity=self.capacity,
                lease_s=self.cluster.limits.lease_s,
                workers=tuple(self.workers),
            )
        )
        for lost in self.lost:
            self._say(lost)
        for worker in self.workers.values():
            if worker.hello is not None:
                worker.say(worker.hello)

    def hang_up(self, for_s: float) -> None:
        """Break the connection; the controller notices it later."""
        self.blocked_s = max(self.blocked_s, self.line.now_s + for_s)
        if self.connected:
            self.connected = False
            incarnation, epoch = self.incarnation, self.epoch
            self.line.after(
                self.line.between(0.0, 0.1),
                lambda: self.cluster.agent_gone(self, incarnation, epoch),
            )

    def _say(self, body: messages.AnyBody) -> None:
        self._seq += 1
        self._send("", self._seq, body)

    def relay(self, worker: SimProcess, seq: int, body: messages.AnyBody) -> None:
        """Forward a worker's frame to the controller."""
        self._send(worker.name, seq, body)

    def _send(self, worker: str, seq: int, body: messages.AnyBody) -> None:
        if not self.connected:
            return
        envelope = messages.MessageEnvelope(
            run="sim",
            term=self.cluster.term,
            agent=self.name,
            incarnation=self.incarnation,
            worker=worker,
            seq=seq,
            body=body,
        )
        line, epoch = self.line, self.epoch
        self._up_s = max(self._up_s, line.now_s + line.between(0.0005, 0.01))

        def arrive() -> None:
            is_same = self.connected and epoch == self.epoch
            if is_same or line.dice.random() < 0.2:  # a frame of a broken connection may come late
                self.cluster.controller_hears(envelope)

        line.at(self._up_s, arrive)
        if self.cluster.plan.duplicates and line.dice.random() < self.cluster.plan.duplicates:
            line.at(self._up_s + line.between(0.0, 0.5), arrive)

    def deliver(self, workers: tuple[str, ...], body: messages.AnyBody) -> None:
        """Send a frame of the controller to this agent, with a delay."""
        if not self.connected:
            return
        line, epoch, incarnation = self.line, self.epoch, self.incarnation
        self._down_s = max(self._down_s, line.now_s + line.between(0.0005, 0.01))

        def arrive() -> None:
            if self.connected and (epoch, incarnation) == (self.epoch, self.incarnation):
                self._hear(workers, body)

        line.at(self._down_s, arrive)

    def _hear(self, workers: tuple[str, ...], body: messages.AnyBody) -> None:
        match body:
            case messages.Spawn():
                if len(self.workers) >= self.capacity:
                    self.cluster.ledger.fail(f"{self.name} has no room for {body.worker}")
                self.workers[body.worker] = SimWorker(self, body.worker)
                self._say(messages.Spawned(worker=body.worker, pid=1))
            case messages.Kill():
                self.line.after(
                    self.line.between(0.0, 0.01), lambda: self._kill(body.worker, body.reason)
                )
            case messages.Renewed():
                if self._renewals:
                    self._lease_from_s = self._renewals.popleft()
            case _:
                for worker in [self.workers[name] for name in workers if name in self.workers]:
                    worker.call(partial(worker.hear, body))

    # --- workers ---

    def _kill(self, name: str, reason: str) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            worker.die(Fault(kind="requested", detail=reason))
            return
        losses = [lost for lost in self.lost if lost.worker == name]
        fault = Fault(kind="requested", detail="never started")
        report = messages.WorkerLostReport(worker=name, fault=fault, n=-1, state="starting")
        self._say(losses[0] if losses else report)

    def reap(self, worker: SimProcess, fault: Fault) -> None:
        """Report a dead worker once its session is reaped."""
        incarnation = self.incarnation

        def reaped() -> None:
            if incarnation != self.incarnation or not self.present:
                return
            self.workers.pop(worker.name, None)
            lost = messages.WorkerLostReport(
                worker=worker.name,
                fault=fault,
                n=worker.n,
                step=worker.n,
                state=_WORDS.get(worker.state, worker.state),
                slots=worker.slots.read(),
            )
            self.lost.append(lost)
            self._say(lost)

        self.line.after(self.line.between(0.001, 0.02), reaped)

    def _watch(self) -> None:
        """Run the real hang detection over simulated pages."""
        self.line.after(_LOOK_S, self._watch)
        looks = [observe_worker(worker) for worker in self.workers.values() if worker.alive]
        now_ns = self.line.now_ns
        self._memory, verdict = hang_detection.watch(
            self._memory, looks, now_ns, self.cluster.limits
        )
        for fault in verdict.suspects:
            self._say(messages.Suspect(worker=fault.worker, fault=fault))
        if verdict.retry is not None:
            self._say(messages.Suspect(worker="", fault=verdict.retry))

    def check(self) -> None:
        """Report a node check that finds broken devices, or none, or cannot tell."""
        dice = self.line.dice
        names = sorted(self.workers)
        findings = tuple(
            Warned(
                t_ns=self.line.now_ns,
                host=self.name,
                check="gpu",
                symptom="gpu-memory",
                severity=dice.choice(("now", "now", "drain", "warn", "unknown")),
                code="",
                device=f"GPU {dice.randint(0, 3)}",
                detail="simulated",
                worker=dice.choice(names) if names else "",
            )
            for _ in range(dice.choice((0, 1, 1, 1, 2)))
        )
        self._say(messages.NodeChecked(found=findings, completed=dice.choice(((), ("gpu",)))))

    # --- the lease and the host ---

    def _keep_lease(self) -> None:
        lease_s = self.cluster.limits.lease_s
        self.line.after(lease_s / 3, self._keep_lease)
        if not self.present:
            return
        if self.connected:
            self._renewals.append(self.line.now_s)
            beats = {w.name: (w.n, w.n, w.state, 0.0) for w in self.workers.values()}
            self._say(messages.Renew(beats=beats))
        if self.workers and self.line.now_s - self._lease_from_s > 0.6 * lease_s:
            self.die()  # it cannot renew: all processes here end before others rely on their end
            self.present = True

    def die(self) -> None:
        """End every process of this host; the next incarnation starts without their state."""
        self.present = False
        self.cluster.shelf.forget(self.line.now_s + _NEWS_S if self.connected else math.inf)
        self.hang_up(0.0)
        self.incarnation += 1
        self._seq = 0
        self.lost.clear()
        workers, self.workers = self.workers, {}
        for worker in workers.values():
            worker.alive = False
            worker.leave()
