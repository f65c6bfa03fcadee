"""Moves of ranks whose numbers were not finite twice to another device, as the policy allows it."""

from __future__ import annotations

from msgspec.structs import replace

from outlast.controller import planned_migration, shared_values
from outlast.controller.controller_state import ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.recovery.recovery_policy import RungRule, unmet
from outlast.transport import messages

FAILURE = "nonfinite"


def begin_move(turn: ControllerTurn, worker: WorkerRecord, body: messages.Status) -> bool:
    """Give up a worker that asks for another device, if a warm spare has one; return whether it
    was. Otherwise its report leads to a retry, and its rank decides what follows."""
    state, fault = turn.state, body.fault
    if fault is None or fault.kind != FAILURE or fault.repeats or fault.traceback:
        return False  # one with a traceback is an exception of the script
    if state.mode not in ("open", "closing") or worker.killed_ns:
        return False
    if why := _why_not(state, worker, turn.now_ns):
        turn.note(f"rank {worker.seat} does not try another device: {why}", worker.name)
        return False
    place = {"n": fault.n, "step": fault.step, "state": fault.state}
    fault = replace(turn.blame(worker, FAILURE, fault.detail), **place)
    planned_migration.give_up(turn, worker, fault, "report")
    return True


def _why_not(state: ControllerState, worker: WorkerRecord, now_ns: int) -> str:
    if state.ending.drain_ns:
        return "the run is about to end"
    leaving = [each for each in state.generation_members() if each.killed_ns]
    spares = [
        spare
        for spare in planned_migration.healthy_first(state, worker.seat)
        if _is_elsewhere(state, worker, spare)
    ]
    if len(spares) <= len(leaving):
        return "no warm spare has another device"
    rules = [rule for rule in state.recovery.rules(FAILURE) if rule.rung in ("migrate", "replace")]
    if not rules:
        return f"the policy {state.recovery.name} has no rung migrate or replace for it"
    means = state.means(now_ns)
    if means.recent("migrate") >= state.recovery.moves_max:
        return f"{state.recovery.moves_max} moves were made within the last hour"
    reasons = [_unmet(state, rule, len(leaving) + 1, now_ns) for rule in rules]
    if "" not in reasons:
        return reasons[0]
    whole = [
        each.seat
        for each in state.generation_members()
        if each.whole and not each.killed_ns and each.name != worker.name
    ]
    return "" if shared_values.donors_of(state, worker.seat, whole) else "no other rank holds it"


def _unmet(state: ControllerState, rule: RungRule, lost: int, now_ns: int) -> str:
    return unmet(state.recovery, rule, state.means(now_ns), lost, 0, state.world)


def _is_elsewhere(state: ControllerState, worker: WorkerRecord, spare: WorkerRecord) -> bool:
    """Return whether a spare computes elsewhere: on another host, on a GPU that no rank has, or
    without GPUs in another process."""
    if spare.agent != worker.agent:
        return True
    devices = spare.hello.devices if spare.hello else 0
    ranks = sum(each.seat >= 0 for each in state.members.crew(worker.agent))
    return not devices or devices > ranks
