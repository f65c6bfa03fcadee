"""A simulated agent: starts and reaps workers, forwards frames, renews a lease."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from outlast.controller import hang_detection
from outlast.controller.lifecycle.run_start import REPEATED_REPORTS
from outlast.events import Fault, Warned
from outlast.testing.simulated_host import SimHost, observe_worker
from outlast.testing.simulated_process import SimProcess
from outlast.testing.simulated_terms import EXTENDED_SHARE, UNHEARD_SHARE, USABLE_SHARE
from outlast.testing.simulated_worker import SimWorker
from outlast.transport import messages
from outlast.transport.partner_memory import PartnerRecord, Stage, newest_slots

if TYPE_CHECKING:
    from outlast.testing.simulated_cluster import SimCluster
    from outlast.testing.simulated_controller import SimController

_LOOK_S = 0.5
_NEWS_S = 0.15  # until the controller notices a broken connection
_WORDS = {"prepared": "voting", "torn": "applying"}


class SimAgent(SimHost):
    """One host. Its connection may break; `epoch` counts connections."""

    def __init__(self, cluster: SimCluster, name: str, capacity: int) -> None:
        super().__init__(cluster, name)
        self.capacity = capacity
        self.incarnation = 1
        self.connected = False
        self.link: SimController | None = None  # of the newest connection
        self.epoch = 0
        self.obeyed = 0  # the newest term that it knows: it obeys no lower one
        self.answered_s = 0.0  # when the controller last confirmed a renewal
        self.is_creating = False
        self._confirms_s = -1.0  # when that answer was sent
        self._has_answer = False  # since it last ended its workers
        self._is_known = False  # a controller has answered this process
        self._is_extended = False  # it knew a newer term before its lease ended
        self.blocked_s = 0.0  # no connection before this time
        self._seated: set[str] = set()  # a Seat was passed on to them
        self.lost: deque[messages.WorkerLostReport] = deque(maxlen=64)
        self._last_held: deque[dict[tuple[int, int, Stage, int], PartnerRecord]] = deque(maxlen=8)
        self._reports: dict[str, dict[type[object], tuple[int, messages.AnyBody]]] = {}
        self._met_term = 0
        self._seq = 0
        self._up_s = self._down_s = 0.0
        self._renewals: deque[float] = deque()
        self._lease_from_s = self.line.now_s
        self._memory = hang_detection.WorkerHistory()
        self._dial()
        self._keep_lease()
        self._watch()

    def lose_power(self) -> None:
        """End every process of this host, a controller too; peers hear nothing."""
        waiting, self.frozen = self.frozen or [], None
        self.lives += 1
        for controller in self.cluster.controllers.values():
            if controller.host is self:
                controller.die()
        self.die()
        self.link = None
        self.obeyed = 0
        for what in waiting:  # timers of the next boot; all else finds its host without power
            what()

    # --- the connection ---

    def _dial(self) -> None:
        self.line.after(self.line.between(0.05, 0.3), lambda: self.call(self._dial))
        line = self.line
        if self.connected or not self.present or line.now_s < self.blocked_s:
            return
        controller = self.cluster.controller_of(self)
        if controller is None:
            return
        self.connected = True
        self.link = controller
        self.obeyed = controller.term
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
                unseated=tuple(sorted(self.workers.keys() - self._seated)),
            )
        )
        for lost in self.lost:
            self._say(lost)
        is_new, self._met_term = controller.term != self._met_term, controller.term
        for worker in self.workers.values():
            if is_new:
                for seq, body in sorted(
                    self._reports.get(worker.name, {}).values(), key=itemgetter(0)
                ):
                    self._send(worker.name, seq, body)
            elif worker.hello is not None:
                worker.say(worker.hello)
        if is_new:
            self._renew()  # ends the report

    def hang_up(self, for_s: float) -> None:
        """Break the connection; the controller notices it later."""
        self.blocked_s = max(self.blocked_s, self.line.now_s + for_s)
        if self.connected:
            self.connected = False
            life, link = (self.incarnation, self.epoch), self.link
            assert link is not None
            self.line.after(
                self.line.between(0.0, 0.1), lambda: self.cluster.agent_gone(link, self, life)
            )

    def lag(self, until_s: float) -> None:
        """Let no frame arrive before a time; the connection may break meanwhile."""
        self._up_s, self._down_s = max(self._up_s, until_s), max(self._down_s, until_s)
        if self.line.dice.random() < 0.5:
            self.hang_up(until_s - self.line.now_s)

    def learn(self, term: int) -> None:
        """Obey a newer term, and no lower one any more."""
        if self.line.now_s < self._lease_from_s + USABLE_SHARE * self.cluster.limits.lease_s:
            self._is_extended = True
        self.obeyed = term
        if self.link is not None and self.link.term < term:
            self.hang_up(0.0)

    def _say(self, body: messages.AnyBody) -> None:
        self._seq += 1
        self._send("", self._seq, body)

    def relay(self, worker: SimProcess, seq: int, body: messages.AnyBody) -> None:
        """Forward a worker's frame to the controller; keep what a later one receives again."""
        if isinstance(body, REPEATED_REPORTS):
            self._reports.setdefault(worker.name, {})[type(body)] = seq, body
        passed = self.meet(worker, body) if isinstance(body, messages.Meet) else body
        if passed is not None:
            self._send(worker.name, seq, passed)

    def _send(self, worker: str, seq: int, body: messages.AnyBody) -> None:
        if not self.connected or self.link is None:
            return
        link, confirms_s = self.link, self._confirms_s
        envelope = messages.MessageEnvelope(
            run="sim",
            term=link.term,
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
                link.hear(envelope, confirms_s)

        line.at(self._up_s, arrive)
        if self.cluster.plan.duplicates and line.dice.random() < self.cluster.plan.duplicates:
            line.at(self._up_s + line.between(0.0, 0.5), arrive)

    def deliver(
        self, controller: SimController, workers: tuple[str, ...], body: messages.AnyBody
    ) -> None:
        """Send a frame of the controller to this agent, with a delay."""
        if self.link is None or not (self.connected or self.cluster.terms is not None):
            return
        if controller is not self.link and controller.term > self.link.term:
            return
        sent_s = self.line.now_s
        line, epoch, incarnation = self.line, self.epoch, self.incarnation
        self._down_s = max(self._down_s, line.now_s + line.between(0.0005, 0.01))

        def arrive() -> None:
            is_same = self.connected and epoch == self.epoch and controller is self.link
            late = controller is not self.link and line.dice.random() < 0.2
            if incarnation == self.incarnation and (is_same or late):
                self.call(lambda: self._obey(controller, sent_s, workers, body))

        line.at(self._down_s, arrive)

    def _obey(
        self,
        controller: SimController,
        sent_s: float,
        workers: tuple[str, ...],
        body: messages.AnyBody,
    ) -> None:
        """Handle a frame, unless it is of a lower term than the newest known one."""
        if self.refuses(controller.term) or not self.present:
            self.cluster.ledger.refused += 1
            return
        self.cluster.ledger.obeys(self.name, controller.term)
        if isinstance(body, messages.Renewed) and controller is self.link and self._renewals:
            self._lease_from_s = self._renewals.popleft()
            self.answered_s, self._confirms_s = self.line.now_s, sent_s
            self._is_extended, self._has_answer, self._is_known = False, True, True
            return
        self._hear(workers, body)

    def refuses(self, term: int) -> bool:
        """Return whether a frame of this term comes too late."""
        return term < self.obeyed

    def _hear(self, workers: tuple[str, ...], body: messages.AnyBody) -> None:
        match body:
            case messages.Spawn():
                is_full = len(self.workers) >= self.capacity
                if is_full and self.cluster.terms is None:  # else Kill of others may follow
                    self.cluster.ledger.fail(f"{self.name} has no room for {body.worker}")
                self.workers[body.worker] = SimWorker(self, body.worker)
                self._say(messages.Spawned(worker=body.worker, pid=1))
            case messages.Kill():
                self.line.after(
                    self.line.between(0.0, 0.01), lambda: self._kill(body.worker, body.reason)
                )
            case messages.RunOutcome():
                self.cluster.faults.release(self)
            case messages.PartnerSlotsRequest():
                self._answer_for_partners(body)
            case _:
                if isinstance(body, messages.Seat):
                    self._seated.update(workers)
                for worker in [self.workers[name] for name in workers if name in self.workers]:
                    if isinstance(body, messages.Connect):
                        self.meetings.connect(body.generation, worker.seat)
                    worker.call(partial(worker.hear, body))

    def _answer_for_partners(self, body: messages.PartnerSlotsRequest) -> None:
        memories = [*self._last_held, *(worker.held for worker in self.workers.values())]
        records = [one for each in memories for one in each.values() if one.seat in body.seats]
        keys = {f"{kind}:{body.n}" for kind in ("before", "after", "result")}
        slots = newest_slots(records, keys, body.since)
        self._say(messages.PartnerSlots(n=body.n, since=body.since, slots=slots))

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
            self._reports.pop(worker.name, None)
            if (last := self.workers.pop(worker.name, None)) is not None:
                self._last_held.append(last.held)
            lost = messages.WorkerLostReport(
                worker=worker.name,
                fault=fault,
                n=worker.n,
                step=worker.step,
                state=_WORDS.get(worker.state, worker.state),
                slots=worker.slots.read(),
            )
            self.lost.append(lost)
            self._say(lost)

        self.line.after(self.line.between(0.001, 0.02), reaped)

    def _watch(self) -> None:
        """Run the real hang detection over simulated pages."""
        self.line.after(_LOOK_S, lambda: self.call(self._watch))
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

    # --- the lease ---

    def has_lease(self) -> bool:
        """Return whether this host's workers may act."""
        share = 0.6
        if self.cluster.terms is not None:
            share = EXTENDED_SHARE if self._is_extended else USABLE_SHARE
        return self.line.now_s - self._lease_from_s <= share * self.cluster.limits.lease_s

    def may_succeed(self, successors: tuple[str, ...]) -> bool:
        """Return whether this host may create a term without a lease, as one of these."""
        is_unheard = (
            self.line.now_s - self.answered_s >= UNHEARD_SHARE * self.cluster.limits.lease_s
        )
        is_successor = not successors or self.name in successors
        return self.present and self._is_known and is_unheard and is_successor

    def may_create(self) -> bool:
        """Return whether this host may create a term: a controller has granted its lease."""
        return self.has_lease() and self._has_answer

    def may_apply(self) -> bool:
        """Return whether a worker that has won a vote may apply it: a host that stood still while
        its lease ended kills its workers, and may do so a moment after they wake."""
        return self.cluster.terms is None or self.has_lease()

    def _keep_lease(self) -> None:
        share = 8 if self.cluster.terms is not None else 3
        pause_s = self.cluster.limits.lease_s / share
        self.line.after(pause_s, lambda: self.call(self._keep_lease))
        if not self.present:
            return
        self._renew()
        if (self.workers or self.cluster.terms is not None) and not self.has_lease():
            self.end_processes()  # before others rely on their end

    def _renew(self) -> None:
        if self.connected:
            self._renewals.append(self.line.now_s)
            beats = {w.name: (w.n, w.step, w.state, 0.0) for w in self.workers.values()}
            own_times = {w.name: w.pace.take() for w in self.workers.values()}
            self._say(messages.Renew(beats=beats, own_times=own_times))

    def end_processes(self) -> None:
        """End the workers of this host; its agent goes on."""
        if self.workers:
            self.cluster.note(f"{self.name} ends its workers")
        is_known = self._is_known
        self.die()
        self.present, self._is_known = True, is_known
        if self.cluster.terms is not None:
            self._lease_from_s = self.line.now_s  # for workers to come; none has a seat

    def die(self) -> None:
        """End every worker of this host; the next incarnation starts without their state."""
        self.present = self.is_creating = self._has_answer = self._is_known = False
        self.cluster.shelf.forget(self.line.now_s + _NEWS_S if self.connected else math.inf)
        self.hang_up(0.0)
        self.incarnation += 1
        self._seq = 0
        self.lost.clear()
        self._last_held.clear()
        self._reports.clear()
        workers, self.workers = self.workers, {}
        for worker in workers.values():
            worker.alive = False
            worker.leave()
