"""Planned migration: findings of node checks, and moves of ranks away from bad nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from msgspec.structs import replace

from outlast.controller import node_placement, shared_values, spare_preparation
from outlast.controller.controller_state import (
    S_NS,
    ControllerState,
    ControllerTurn,
    MigrateOn,
    WorkerRecord,
)
from outlast.controller.inputs import FindingKey, RankMigrated
from outlast.controller.member_tables import AgentRecord
from outlast.controller.recovery import incident_response
from outlast.events import Warned
from outlast.transport import messages

MOVES_MAX = 3  # per window: a check that always fires must not use all spares
WINDOW_S = 3600.0
WARNED_MAX = 1024  # bound on known findings
MOVED_FOR: dict[MigrateOn, tuple[str, ...]] = {"": (), "now": ("now",), "drain": ("now", "drain")}
_STEPPING = ("idle", "running", "voting", "applying")  # states of a page
_WORST_FIRST = ("now", "drain", "unknown", "warn")


def record_findings(turn: ControllerTurn, agent: AgentRecord, body: messages.NodeChecked) -> None:
    """Replace the findings of a host by those of its newest check; only changes are events."""
    known = turn.state.findings.warned
    found: dict[FindingKey, Warned] = {}
    for one in body.found:
        fresh = replace(one, t_ns=turn.now_ns, host=agent.host)
        same = found.get(_key(fresh))
        if same is None or _badness(fresh) < _badness(same):
            found[_key(fresh)] = fresh
    for key, one in found.items():
        before = known.get(key)
        if before is None and len(known) >= WARNED_MAX:
            continue
        known[key] = one
        if before is None or before.severity != one.severity:
            turn.emit(one)
    for key, one in tuple(known.items()):
        if one.host == agent.host and key not in found and one.check in body.completed:
            del known[key]
            turn.state.findings.unmoved = tuple(
                other for other in turn.state.findings.unmoved if other != key
            )
            turn.emit(replace(one, t_ns=turn.now_ns, severity="healthy", detail="no longer found"))


def record_check(state: ControllerState, agent: AgentRecord, body: messages.Renew) -> None:
    """Note whether all of this agent's ranks have completed a phase of this generation and make
    steps of one kind. Ranks that are cut in their set-up or in a rehearsal cannot be put back."""
    if not state.migrate_on or not state.findings.warned:
        return
    seated = [
        body.beats.get(each.name) for each in state.generation_members() if each.agent == agent.name
    ]
    if all(
        beat is not None and beat[0] > state.progress.n and beat[2] in _STEPPING for beat in seated
    ):
        state.findings.calm[agent.name] = state.generation
    else:
        state.findings.calm.pop(agent.name, None)


def move_when_possible(turn: ControllerTurn) -> None:
    """Give up together all workers with a failing device that warm spares can replace. The recovery
    is that of a failure: close, decide, seat, transfer."""
    state = turn.state
    if not state.migrate_on or state.mode != "open" or state.ending.drain_ns:
        return
    chosen: dict[str, FindingKey] = {}
    for key, one, worker in _wished(state):
        if worker.name in chosen:
            continue
        if why_not := _why_not(state, worker, chosen, turn.now_ns):
            _say_unmoved(turn, key, one, worker, why_not)
        else:
            chosen[worker.name] = key
    for name, key in chosen.items():
        one = state.findings.warned[key]
        state.findings.moves[key] = (name, turn.now_ns)
        turn.journal(RankMigrated(worker=name, finding=key, t_ns=turn.now_ns))
        worker = state.members.workers[name]
        fault = turn.blame(worker, "requested", f"{one.finding}: {one.detail}")
        incident_response.give_up(turn, worker, fault, "check")


def restore_moves(turn: ControllerTurn, entry: RankMigrated) -> None:
    """Restore a move of an earlier term, whose clock may have been ahead of this one."""
    turn.state.findings.moves[entry.finding] = (entry.worker, min(entry.t_ns, turn.now_ns))


def healthy_first(
    state: ControllerState, seat: int, near: Collection[str] = ()
) -> list[WorkerRecord]:
    """Return the warm spares for a seat: those without findings first, then those of the agents
    `near`, then those of near failure domains, then hot ones. A start of all ranks cannot use
    spares that were prepared for a running job, and no seat one that was built for other ranks."""
    unwell, levels = _unwell(state), node_placement.nearness(state, seat)
    is_start = state.mode == "gathering" and state.progress.first
    return sorted(
        (
            each
            for each in state.warm_spares()
            if not (each.preparing and is_start) and spare_preparation.may_take(state, each, seat)
        ),
        key=lambda worker: (
            worker.name in unwell,
            worker.agent not in near,
            -levels.get(worker.agent, 0),
            not worker.is_hot,
        ),
    )


def count_fitting(state: ControllerState, seats: Iterable[int]) -> int:
    """Return how many of the seats warm spares can fill, each seat by the first one that fits."""
    taken: set[str] = set()
    for seat in seats:
        free = (each.name for each in healthy_first(state, seat) if each.name not in taken)
        taken.update(islice(free, 1))
    return len(taken)


def _wished(state: ControllerState) -> list[tuple[FindingKey, Warned, WorkerRecord]]:
    """Return findings that require a move not made yet, with the worker; the worst first."""
    if any(worker.finished for worker in state.generation_members()):
        return []  # the run is about to end
    if any(
        state.findings.calm.get(each.agent) != state.generation
        for each in state.generation_members()
    ):
        return []
    wished = []
    for key, one in state.findings.warned.items():
        worker = state.members.workers.get(one.worker)
        # If the worker of a recorded move still lives, the launcher died before the move.
        done = key in state.findings.moves and state.findings.moves[key][0] != one.worker
        if done or one.severity not in MOVED_FOR[state.migrate_on]:
            continue
        if worker is not None and worker.seat >= 0 and worker.whole and not worker.killed_ns:
            wished.append((key, one, worker))
    return sorted(wished, key=lambda wish: _badness(wish[1]))


def _why_not(
    state: ControllerState, worker: WorkerRecord, chosen: dict[str, FindingKey], now_ns: int
) -> str:
    recent = {
        name for name, t_ns in state.findings.moves.values() if now_ns - t_ns < WINDOW_S * S_NS
    }
    well = [
        spare for spare in healthy_first(state, worker.seat) if spare.name not in _unwell(state)
    ]
    whole = [
        each.seat
        for each in state.generation_members()
        if each.whole and not each.killed_ns and each.name not in {*chosen, worker.name}
    ]
    if len((recent | set(chosen)) - {worker.name}) >= MOVES_MAX:
        return f"{MOVES_MAX} moves were made within the last hour"
    if len(chosen) >= len(well):
        return "no warm spare is on a healthy device"
    if not shared_values.donors_of(state, worker.seat, whole):
        return "no other rank holds the state"
    return ""


def _say_unmoved(
    turn: ControllerTurn, key: FindingKey, one: Warned, worker: WorkerRecord, why: str
) -> None:
    if key in turn.state.findings.unmoved:
        return
    turn.state.findings.unmoved = (*turn.state.findings.unmoved, key)
    turn.note(f"{one.finding}: the rank is not moved yet, since {why}", worker.name, worker.seat)


def _unwell(state: ControllerState) -> set[str]:
    """Return workers with a finding of severity now or drain."""
    return {
        one.worker for one in state.findings.warned.values() if one.severity in MOVED_FOR["drain"]
    }


def _key(one: Warned) -> FindingKey:
    return FindingKey(one.host, one.check, one.symptom, one.code, one.device)


def _badness(one: Warned) -> int:
    return _WORST_FIRST.index(one.severity) if one.severity in _WORST_FIRST else len(_WORST_FIRST)
