"""Decision after a failure, once every worker has answered or is dead."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from outlast import events
from outlast.controller import (
    checkpoint_tracking,
    membership,
    node_placement,
    planned_migration,
    shared_values,
)
from outlast.controller.audit import audit_protocol as audit
from outlast.controller.controller_state import (
    S_NS,
    ControllerTurn,
    WorkerRecord,
)
from outlast.controller.inputs import RungTaken
from outlast.controller.lifecycle import run_ending, run_start
from outlast.controller.recovery import (
    incident_response,
    network_cuts,
    partner_slots,
    reconfiguration,
    recovery_ladder,
    root_fault,
    shard_rebuild,
    shrinking,
)
from outlast.controller.recovery.recovery_ladder import RecoveryChoice, Situation
from outlast.controller.recovery.recovery_policy import FROM_A_COPY
from outlast.controller.recovery.shard_rebuild import RebuildPlace


def decide_when_answered(turn: ControllerTurn) -> None:
    """Decide once no worker of the old generation can act in it (invariants (b) and (g))."""
    state = turn.state
    audit.conclude(turn)
    if not state.progress.have_all(state.world, partial(_has_answered, turn)):
        return
    members = list(state.generation_members())
    if any(w.killed_ns or is_silent(turn, w) for w in members):
        return
    survivors = [w for w in members if w.whole and _answer(w) != "joining"]
    n, step = _place(turn, survivors)
    is_taken_back = state.progress.rebuilds
    strange = [w for w in survivors if not _possible(w, n, is_taken_back=is_taken_back)]
    if strange:
        _stop_contradicting(turn, strange, n)
        return
    place, no_copy = shard_rebuild.find_place(state, survivors, n, step)
    if place is not None:
        n, step = place.n, place.step
    is_complete = state.progress.opened and n > state.progress.n
    if leaving := network_cuts.ranks_to_move(turn, is_complete=is_complete):
        for name, fault in leaving.items():
            incident_response.give_up(turn, state.members.workers[name], fault, "peer")
        return
    if survivors and partner_slots.are_awaited(turn, _stateless(turn, n), n):
        return
    if _give_up_unfit_joiners(turn, members, survivors, n):
        return
    _release_fenced(turn)
    _count_attempt(turn, survivors, n)
    checkpoint_tracking.learn_copies(turn, survivors, n)
    situation = _recovery_situation(turn, survivors, n)
    if place is not None:
        situation = replace(situation, copy_step=place.copy.step)
    elif no_copy:
        situation = replace(situation, no_copy=no_copy)
    choice = recovery_ladder.choose(situation, state.recovery)
    begins_again = choice.rung in FROM_A_COPY
    if state.ending.drain_ns and begins_again:
        run_ending.interrupt(turn, f"{state.ending.drain_reason} (while a restart was due)")
    elif choice.rung == "stop":
        _stop(turn, n, step, choice, situation)
    elif begins_again:
        point = state.saves.on_disk if choice.from_disk else state.saves.checkpoint
        _announce(turn, choice, "redo", point.n if point else 0, point.step if point else 0)
        run_start.begin_restart(turn, choice.reason, from_disk=choice.from_disk)
    elif not shrinking.give_up_healthy(turn, choice.leaving, (n, step)):
        absent = set(state.progress.absent).difference(situation.back).union(choice.leaving)
        _continue_with_survivors(turn, survivors, choice, (n, step), place, absent)


def _has_answered(turn: ControllerTurn, seat: int) -> bool:
    """Return whether the seat has no member of the generation, or one that has answered."""
    members = turn.state.members
    worker = members.workers.get(members.seats[seat])
    if worker is None or worker.member != turn.state.progress.generation:
        return True
    return not (worker.killed_ns or is_silent(turn, worker))


def is_silent(turn: ControllerTurn, worker: WorkerRecord) -> bool:
    """Return whether a live worker has yet to answer Close, or to send its address in Hello."""
    if worker.killed_ns:
        return False
    status = worker.status
    has_answered = status is not None and status.generation == turn.state.progress.generation
    return not has_answered or worker.hello is None


def _answer(worker: WorkerRecord) -> str:
    return worker.status.state if worker.status else ""


def _place(turn: ControllerTurn, survivors: list[WorkerRecord]) -> tuple[int, int]:
    """Return (N, step), the farthest completed by a survivor, never behind an earlier decision.

    A decision to rebuild shards, whose generation was never open, stands.
    """
    progress = turn.state.progress
    if progress.rebuilds:
        return progress.n, progress.step
    places = [(w.status.n, w.status.step) for w in survivors if w.status]
    return max([(progress.n, progress.step), turn.state.units.reached, *places])


def _possible(worker: WorkerRecord, n: int, *, is_taken_back: bool) -> bool:
    """Return whether a survivor is at most one undecided phase behind (invariant (a)), or one ahead
    that it has yet to take back."""
    status = worker.status
    assert status is not None
    if is_taken_back and status.n == n + 1:
        return True
    return status.n == n or (status.n == n - 1 and status.state == "prepared")


def _stop_contradicting(turn: ControllerTurn, strange: list[WorkerRecord], n: int) -> None:
    answers = ", ".join(
        f"rank {w.seat} {w.status.state} at phase {w.status.n}" for w in strange if w.status
    )
    detail = (
        f"the ranks contradict each other after generation {turn.state.generation}: phase {n} is"
        f" complete somewhere, but {answers}; nothing was decided, since going on could apply a"
        " step twice or never; restart from the newest checkpoint, and please report this"
    )
    fault = turn.blame(strange[0], "mismatch", detail)
    run_ending.stop(turn, "gave_up", fault, detail)


def _give_up_unfit_joiners(
    turn: ControllerTurn, members: list[WorkerRecord], survivors: list[WorkerRecord], n: int
) -> bool:
    """Give up joiners that are not at phase n, the only place from which they may retry."""
    if not survivors:
        return False
    whole = {w.name for w in survivors}
    unfit = [
        w
        for w in members
        if w.name not in whole
        and w.status is not None
        and not (w.status.state in ("joining", "idle", "running") and w.status.n == n)
    ]
    for worker in unfit:
        detail = f"{worker.name} was to join at phase {n} and cannot ({_answer(worker)})"
        turn.kill(worker.name, turn.blame(worker, "torn", detail))
    for worker in members:
        if worker.name not in whole and worker.name in turn.state.members.workers:
            turn.change(worker.name, whole=False)
    return bool(unfit)


def _release_fenced(turn: ControllerTurn) -> None:
    """Vacate the seat of a given-up worker to which the generation was never announced."""
    state = turn.state
    for worker in tuple(state.members.workers.values()):
        if worker.seat >= 0 and worker.killed_ns:
            state.members.vacate(worker)
            turn.change(worker.name, seat=-1)


def _count_attempt(turn: ControllerTurn, survivors: list[WorkerRecord], n: int) -> None:
    """Count a generation without progress; a completed phase ends the row of failed ones."""
    state = turn.state
    if not survivors:
        n = max([n, *(fault.n for fault in state.incident.faults)])
    newest = incident_response.take_newest(turn)
    if state.progress.opened and n > state.progress.n:
        state.budgets.end_attempts(state.incident.faults)
    else:
        is_cut = bool(network_cuts.describe(state))  # bounded by time
        identity = "" if is_cut else root_fault.failure_identity(newest)
        state.budgets.count_attempt(identity, state.incident.faults)


def _stateless(turn: ControllerTurn, n: int) -> list[int]:
    """Return the seats without a member of the generation whose own state before phase n+1 is not
    known."""
    state = turn.state
    keys = reconfiguration.slot_keys(n)[:2]
    found: list[int] = []
    for seat in range(state.world):
        worker = state.occupant(seat)
        if seat in state.progress.absent:
            continue
        if worker is None or worker.member < state.generation:
            slots = state.members.abandoned_slots.get(seat, {})
            if not any(key in slots for key in keys):
                found.append(seat)
    return found


def _recovery_situation(turn: ControllerTurn, survivors: list[WorkerRecord], n: int) -> Situation:
    state = turn.state
    back = shrinking.returning(state, survivors, n)
    absent = set(state.progress.absent) - set(back)
    empty = (seat for seat in range(state.world) if state.occupant(seat) is None)
    lost = [seat for seat in empty if seat not in absent]
    checkpoint, on_disk = state.saves.checkpoint, state.saves.on_disk
    attempts = {key: count for key, count in state.budgets.attempts.items() if key}
    commonest = max(attempts, key=lambda key: attempts[key], default="")
    causes = tuple(
        fault
        for fault in state.budgets.causes
        if root_fault.failure_identity((fault,)) == commonest
    )
    cut = network_cuts.describe(state)
    units, no_shrink = shrinking.leaving_units(state, survivors, lost)
    exhausted = attempts.get(commonest, 0) >= state.limits.attempts_max
    moved = {name for name, _ in state.findings.moves.values()} | {*state.findings.leaving}
    cause = root_fault.root_fault(causes if exhausted and causes else state.budgets.causes)
    if cut and cause and (cause.kind == "transport" or root_fault.is_accident(cause)):
        cause = events.Fault(kind="transport", detail=cut, t_ns=cause.t_ns)
    return Situation(
        cause=cause,
        lost=tuple(lost),
        planned=tuple(fault.seat for fault in state.incident.faults if fault.worker in moved),
        move=planned_migration.class_of_moves(state, {f.worker for f in state.incident.faults}),
        stateless=tuple(_stateless(turn, n)),
        cut=cut,
        is_cut_for_good=network_cuts.is_final(state),
        unreplicated=shared_values.without_donor(state, [w.seat for w in survivors]),
        donors=0 if state.audit.undecided else len(survivors),
        diverged=state.audit.undecided,
        spares=len(planned_migration.fitting_spares(state, lost)),
        cold=len(node_placement.cold_spares(state, -1)),
        respawns=state.respawns_left(),
        attempts=attempts.get(commonest, 0),
        attempts_all=sum(attempts.values()),
        attempts_max=int(state.limits.attempts_max),
        restarts=state.budgets.restarts,
        world=state.world,
        steps_lost=max(0, state.progress.reached[1] - (checkpoint.step if checkpoint else 0)),
        checkpoint_n=checkpoint.n if checkpoint else 0,
        in_memory=checkpoint is not None and checkpoint.tier == "memory",
        back=back,
        no_shrink=no_shrink,
        units=units,
        parted=state.units.parted,
        rooms=node_placement.rooms(state),
        disk_n=on_disk.n if on_disk else 0,
        disk_steps_lost=max(0, state.progress.reached[1] - (on_disk.step if on_disk else 0)),
        means=state.means(turn.now_ns),
    )


def _continue_with_survivors(
    turn: ControllerTurn,
    survivors: list[WorkerRecord],
    choice: RecoveryChoice,
    where: tuple[int, int],
    rebuilt: RebuildPlace | None,
    absent: set[int],
) -> None:
    """Fill empty seats and keep the survivors' state; the decision is durable first."""
    n, step = where
    state = turn.state
    members = state.members
    progress = state.progress
    commit = any(w.status is not None and w.status.n == n - 1 for w in survivors)
    announced = [w for w in state.generation_members() if w.status is not None]
    slots = _slots_at(members.abandoned_slots, survivors, n)
    before = {*progress.absent}
    apart = members.abandoned_slots
    slots |= {seat: apart.get(seat, {}) for seat in before}
    slots |= {seat: shrinking.leaving_slots(apart.get(seat, {}), n) for seat in absent - before}
    shrinking.return_units(state, survivors, before - absent, slots, n)
    members.set_seats(members.seats, slots)
    base = rebuilt.copy if rebuilt is not None else None
    shrinking.begin_generation(state, absent)
    progress.begin_generation(n, step, "commit" if commit else "redo", base)
    membership.fill_seats(turn)
    run_start.end_takeover(turn)
    reconfiguration.journal(turn)
    _announce(turn, choice, progress.verdict, n, step)
    turn.enter("gathering")
    informed = {worker.seat for worker in announced}
    others = (seat for seat in range(state.world) if seat not in informed)
    progress.seat_later(seat for seat in others if seat not in absent)
    names = [worker.name for worker in announced]
    survivors = members.announce(names, turn.now_ns, member=state.generation, joined=None)
    turn.send_all(survivors, reconfiguration.decide_frame(turn))


def _slots_at(
    abandoned: dict[int, dict[str, bytes]], survivors: list[WorkerRecord], n: int
) -> dict[int, dict[str, bytes]]:
    """Return the slots of phase n that lost workers left, with what the phase returned.

    A worker lost between its vote and its return takes the survivors' result if all results are
    equal, and either shared or returned by every survivor, at least two. A prepared worker has no
    result yet, and a rank's own result implies nothing about another rank's.
    """
    keys = reconfiguration.slot_keys(n)
    prefix = shrinking.left_prefix(n)
    kept = {
        seat: {key: value for key, value in slots.items() if key in keys or key.startswith(prefix)}
        for seat, slots in abandoned.items()
    }
    done = [w.status for w in survivors if w.status is not None and w.status.n == n]
    answers = {status.result for status in done}
    known = any(status.shared for status in done) or len(done) == len(survivors) > 1
    if not (known and len(answers) == 1 and (result := answers.pop())):
        return kept
    return {
        seat: {f"result:{n}": result, **slots} if f"after:{n}" in slots else slots
        for seat, slots in kept.items()
    }


def _announce(
    turn: ControllerTurn, choice: RecoveryChoice, verdict: str, n: int, step: int
) -> None:
    state = turn.state
    replaced = tuple(
        (seat, fault.worker, state.members.seats[seat])
        for seat, fault in _last_fault_by_seat(state.incident.faults).items()
        if fault.worker and state.members.seats[seat] not in ("", fault.worker)
    )
    taken = RungTaken(
        rung=choice.rung,
        rule=choice.rule,
        t_ns=turn.now_ns,
        incident=state.incident.number,
        failure=choice.failure,
        failed=choice.failed,
    )
    state.budgets.take_rung(taken.rung, taken.failure, taken.t_ns, taken.failed)
    turn.journal(taken)
    turn.emit(
        events.Decided(
            t_ns=turn.now_ns,
            incident=state.incident.number,
            generation=state.generation,
            verdict=verdict,
            rung=choice.rung,
            n=n,
            step=step,
            replaced=replaced,
            reason=choice.reason,
            absent=() if choice.rung in FROM_A_COPY else state.progress.absent,
            rule=choice.rule,
        )
    )


def _last_fault_by_seat(faults: tuple[events.Fault, ...]) -> dict[int, events.Fault]:
    return {fault.seat: fault for fault in faults if fault.seat >= 0}


def _stop(
    turn: ControllerTurn, n: int, step: int, choice: RecoveryChoice, situation: Situation
) -> None:
    _announce(turn, choice, "redo", n, step)
    cause = situation.cause or events.Fault(kind="requested", detail=choice.reason)
    audits = turn.state.audit
    never_equal = audits.undecided and audits.whole is None  # so the script built it
    user_error = root_fault.is_user_error(cause) or never_equal
    run_ending.stop(turn, "user_error" if user_error else "gave_up", cause, choice.reason)


def answer_limit_s(turn: ControllerTurn, worker: WorkerRecord) -> float:
    """Return the time limit for a worker's answer. If a computation holds its interpreter, the
    limit is the ceiling, as in an open generation."""
    limits = turn.state.limits
    return max(limits.status_s, limits.hang_ceiling_s) if worker.is_blocked else limits.status_s


def fence_silent(turn: ControllerTurn) -> None:
    """Give up workers that have not answered Close in time; Lost follows."""
    state = turn.state
    for worker in tuple(state.generation_members()):
        limit_s = answer_limit_s(turn, worker)
        if is_silent(turn, worker) and turn.now_ns >= state.clock.since_ns + int(limit_s * S_NS):
            detail = (
                f"rank {worker.seat} has not answered for {limit_s:g} s after"
                f" generation {state.generation} was closed"
            )
            incident_response.give_up(turn, worker, turn.blame(worker, "hung", detail), "deadline")
