"""Checks of a simulated run that compare the controller with what is true on its hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast import events
from outlast.controller import inputs
from outlast.controller.controller_state import ControllerState
from outlast.controller.recovery.recovery_policy import DEFAULT, FROM_A_COPY
from outlast.testing.simulated_process import NS
from outlast.transport import messages

if TYPE_CHECKING:
    from outlast.testing.simulated_cluster import SimCluster
    from outlast.testing.simulated_controller import SimController


class RunChecks:
    """Compares decisions, messages and events of controllers with the processes that live."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._plan, self._ledger = cluster.plan, cluster.ledger
        self.shrinks = 0  # decisions that let ranks leave
        self._warned: list[events.Warned] = []

    def announced(self, controller: SimController, body: messages.AnyBody) -> None:
        """Check a message that the controller wants to send."""
        if isinstance(body, messages.Kill):
            self._kill(controller.state, body)
        elif isinstance(body, messages.Connect):
            cluster, seats = self._cluster, tuple(controller.state.members.seats)
            known = cluster.connecting.setdefault(body.generation, seats)
            if {*body.absent} != {seat for seat, name in enumerate(seats) if not name}:
                self._ledger.fail(f"ranks {body.absent} are absent from {seats}")
            if {rank for rank, _ in body.deputies} != {*body.absent} or any(
                deputy in body.absent for _, deputy in body.deputies
            ):
                self._ledger.fail(f"{body.deputies} are to save the parts of {body.absent}")
            if known != seats and cluster.is_newest(controller):
                self._ledger.fail(f"generation {body.generation} connects two groups: {seats}")

    def observe(self, controller: SimController, event: events.AnyEvent) -> None:
        """Check an event of the run."""
        cluster = self._cluster
        if not cluster.is_newest(controller):
            return
        if isinstance(event, events.Decided):
            cluster.decided = event
        if isinstance(event, events.Decided) and event.rung == "shrink":
            self._may_shrink(controller.state)
        if isinstance(event, events.Decided) and event.rung in FROM_A_COPY:
            cluster.restarts += 1
            if event.absent:
                self._ledger.fail(f"ranks {event.absent} are absent from a start of all ranks")
            self._need(controller.state, event)
        elif isinstance(event, events.ReplicasCompared):
            cluster.audits.compared(event, controller.state.audit.origins)
        elif isinstance(event, events.Warned):
            self._warned.append(event)
            cluster.audits.warned(event)
        elif isinstance(event, events.Noticed) and event.fault.kind == "controller_lost":
            self._took_over(controller.state, event)
        elif isinstance(event, events.WorkerLost):
            for worker in cluster.alive_workers():
                # One that a late Spawn has started, and whose Kill follows, has no seat.
                acts = worker.agent.may_apply() and (cluster.terms is None or worker.seat >= 0)
                if worker.name == event.worker and acts:
                    self._ledger.fail(f"{worker.name} was counted as lost while it lives")

    def fence(self, entry: inputs.DecisionMade) -> None:
        """Check that workers without a seat are dead before the decision (invariant g)."""
        for worker in self._cluster.alive_workers():
            acts = worker.seat >= 0 and worker.agent.may_apply()
            if acts and worker.name not in entry.seats:
                self._ledger.fail(
                    f"generation {entry.generation} was decided while {worker.name}, which has no"
                    f" seat in it, still lives at rank {worker.seat}"
                )

    def origin(self, state: ControllerState, entry: inputs.DecisionMade) -> None:
        """Check that no run starts from a checkpoint that is known to be lost."""
        checkpoint = state.saves.checkpoint if entry.verdict == "start" and entry.n else None
        is_known = not self._plan.takes_over  # a stopped controller hears late of a lost host
        if is_known and self._cluster.shelf.is_known_to_lack(
            checkpoint, self._cluster.timeline.now_s
        ):
            self._ledger.fail(f"{checkpoint} does not exist")

    def _took_over(self, state: ControllerState, event: events.Noticed) -> None:
        """Check that a takeover which meets no failure closes no generation that trains."""
        generation = event.generation
        workers = [w for w in self._cluster.alive_workers() if w.seat >= 0]
        trains = all(w.opened == generation > w.closed and w.is_set_up for w in workers)
        waited_s = (state.clock.now_ns - state.clock.since_ns) / NS
        in_time = waited_s < 0.9 * self._cluster.limits.lease_s
        present = self._ledger.present(generation)
        if (
            {w.seat for w in workers} == present
            and trains
            and in_time
            and not state.ending.drain_ns
        ):
            self._ledger.fail(f"generation {generation} was closed by a takeover alone")

    def _may_shrink(self, state: ControllerState) -> None:
        """Check that ranks leave only where the job allows it."""
        self.shrinks += 1
        options, absent = self._plan.shrinking, state.progress.absent
        if options is None or options.needs_all or options.root in absent:
            self._ledger.fail(f"ranks {absent} have left, which the job does not allow")
        unit = options.unit if options else 1
        parts = {seat // unit for seat in absent}
        if self._plan.shard_sets not in (1, unit) or len(parts) * unit != len(absent):
            self._ledger.fail(f"ranks {absent} have left, and others hold other shards")

    def _kill(self, state: ControllerState, body: messages.Kill) -> None:
        """Check that a worker that answers at once is not killed for silence."""
        ends = state.ending.result
        own_reason = body.reason.partition("(")[0]  # behind it are faults of others
        if "has not answered" not in own_reason or ends or self._news_may_be_lost():
            return
        for worker in self._cluster.alive_workers():
            if worker.name == body.worker and not (worker.struck or worker.hung):
                self._ledger.fail(f"{worker.name} was killed as silent, though it answers")

    def calm(self) -> None:
        """Check that waiting scripts lose nothing; a lone waiter is given up once at most, and all
        ranks start again only where no other one holds its shards."""
        seats: dict[int, set[int]] = {}
        for strike in self._plan.strikes:
            if strike.point == "attempt":
                seats.setdefault(strike.nth, set()).add(strike.seat)
        given_up = sum(len(waiting) < self._plan.world for waiting in seats.values())
        has_replicas = 2 * self._plan.shard_sets <= self._plan.world
        restarts_max = 0 if self._cluster.recovery is DEFAULT and has_replicas else given_up
        if self._cluster.restarts > restarts_max or self._ledger.decided > 1 + given_up:
            self._ledger.fail(
                f"{self._cluster.restarts} restarts and {self._ledger.decided} generations of a run"
                " in which nothing failed"
            )

    def undisturbed(self, outcome: str) -> None:
        """Check that no sentinel has found, moved or ended anything in a run without failures."""
        moves = [key for state in self._states() for key in state.findings.moves]
        if outcome != "done" or self._ledger.decided > 1 or moves or self._warned:
            self._ledger.fail(
                f"a run in which nothing failed ended as {outcome} in generation"
                f" {self._ledger.decided}, with moves {moves} and findings {self._warned}"
            )

    def _states(self) -> list[ControllerState]:
        return [controller.state for controller in self._cluster.controllers.values()]

    def _news_may_be_lost(self) -> bool:
        return (
            len(self._cluster.controllers) > 1
            or any(what not in ("kill", "pair", "stop", "save") for _, what in self._plan.timed)
            or any(strike.deed in ("crash", "drop") for strike in self._plan.strikes)
        )

    def _need(self, state: ControllerState, event: events.Decided) -> None:
        """Check that no restart loses steps while a survivor and all own states exist."""
        if self._news_may_be_lost() or self._plan.flips or self._cluster.recovery is not DEFAULT:
            return
        seated = [w for w in self._cluster.alive_workers() if w.seat >= 0]
        survivors = {w.seat: w for w in seated if w.is_set_up and w.has_state}
        if not survivors or any(not w.is_set_up for w in seated):
            return
        n = max([state.progress.n, *(worker.n for worker in survivors.values())])
        keys = {f"before:{n}", f"after:{n}"}
        slots = self._ledger.slots_left
        lost = set(range(self._plan.world)) - survivors.keys() - {*state.progress.absent}
        shards = {worker.shards() for worker in survivors.values()}
        needed = {b"shards %d" % (seat % self._plan.shard_sets) for seat in lost}
        if needed <= shards and all(keys & slots.get(seat, set()) for seat in lost):
            self._ledger.fail(f"a restart without need: {event.reason}")
