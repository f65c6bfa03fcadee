"""Planned migration: findings of node checks, notices, and moves of ranks away from such nodes.

A rank moves between two steps: `Leave` asks its worker to answer before its next phase, and that
answer closes the generation, so that no rank repeats what it had computed. A device that fails now,
or a worker that does not come to a boundary in time, is given up at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from outlast.controller import node_placement, shared_values, spare_preparation
from outlast.controller.controller_state import (
    S_NS,
    ControllerState,
    ControllerTurn,
    MigrateOn,
    WorkerRecord,
)
from outlast.controller.inputs import FindingKey, RankMigrated, SchedulerChecked
from outlast.controller.member_tables import AgentRecord
from outlast.controller.recovery import incident_response
from outlast.controller.recovery.recovery_policy import NOTICE, STRAGGLER, why_no_move
from outlast.events import Fault, Warned
from outlast.transport import messages

WINDOW_S = 3600.0
WARNED_MAX = 1024  # bound on known findings
PREPARE_PART = 0.25  # of the time until a deadline, for spares to build their models
BOUNDARY_PART = 0.5  # of the time until a deadline, for a worker to come to a boundary
MOVED_FOR: dict[MigrateOn, tuple[str, ...]] = {"": (), "now": ("now",), "drain": ("now", "drain")}
SCHEDULER = "slurm"
# Checks whose findings are notices: somebody else has decided that the ranks have to leave.
ROLL = "roll"  # the host leaves the run behind its ranks (node_release)
UNLIMITED = ("operator", ROLL, "signal", "file", "aws", "gcp", "azure")  # in moves an hour
SOURCES = (SCHEDULER, *UNLIMITED)
NO_SPARE = "no warm spare is on a healthy device"
_STEPPING = ("idle", "running", "voting", "applying")  # states of a page
_OF_RANKS = ("gpu-", "nvlink", "pcie", "nccl-timeout", "oom")  # symptoms of no node as a whole
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
            turn.state.findings.awaited.pop(key, None)
            turn.state.findings.unmoved = tuple(
                other for other in turn.state.findings.unmoved if other != key
            )
            turn.emit(replace(one, t_ns=turn.now_ns, severity="healthy", detail="no longer found"))


def add_finding(turn: ControllerTurn, one: Warned) -> None:
    """Record the finding of a sentinel, which stays open; a repeated one is no event."""
    known = turn.state.findings.warned
    before = known.get(_key(one))
    if before is None and len(known) >= WARNED_MAX:
        return
    known[_key(one)] = one
    if before is None or before.severity != one.severity:
        turn.emit(one)


def record_scheduler(turn: ControllerTurn, event: SchedulerChecked) -> None:
    """Replace the scheduler's findings of all hosts. It asks for the move of a node's ranks."""
    for agent in tuple(turn.state.members.agents.values()):
        names = (agent.host, agent.host.partition(".")[0])  # Slurm may know the short one
        found = tuple(one for one in event.found if one.host in names)
        body = messages.NodeChecked(found=found, completed=(event.check,))
        record_findings(turn, agent, body)


def _asks_for_move(state: ControllerState, one: Warned) -> bool:
    """Return whether ranks leave for a finding: as --migrate-on has it, or for a notice, or since
    all ranks wait for a slow one."""
    is_due = one.check == STRAGGLER and one.severity == "drain"
    return one.severity in MOVED_FOR[state.migrate_on] or one.check in SOURCES or is_due


def record_check(state: ControllerState, agent: AgentRecord, body: messages.Renew) -> None:
    """Note whether all of this agent's ranks have completed a phase of this generation and make
    steps of one kind. Ranks that are cut in their set-up or in a rehearsal cannot be put back."""
    found = state.findings.warned.values()
    may_move = bool(found) and (state.migrate_on or any(_asks_for_move(state, x) for x in found))
    if not (may_move or state.progress.absent):
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


class _Move(NamedTuple):
    """A finding, and the ranks that are to leave: that of its device, or all of its node."""

    key: FindingKey
    finding: Warned
    workers: tuple[WorkerRecord, ...]

    @property
    def names(self) -> set[str]:
        return {worker.name for worker in self.workers}


def move_when_possible(turn: ControllerTurn) -> None:
    """Move together all workers that warm spares can replace and whose device, or node, fails or
    has to be left."""
    state = turn.state
    if not state.findings.warned or state.mode != "open" or state.ending.drain_ns:
        return
    chosen = _choose(turn)
    departing = state.findings.departing
    if any(_is_due(state, move) for move in chosen):
        _move(turn, chosen)
        return
    ready = (move for move in chosen if not _awaits_spares(turn, move))
    for worker in (each for move in ready for each in move.workers):
        if departing.get(worker.name, (0, 0))[0] != state.generation:
            departing[worker.name] = state.generation, turn.now_ns
            turn.send(worker, messages.Leave(generation=state.generation))


def begin_departure(turn: ControllerTurn, worker: WorkerRecord, body: messages.Status) -> None:
    """Carry out the planned moves, since one of their workers stands at a boundary. If they are no
    longer wanted, its answer leads to a retry."""
    state = turn.state
    since, _ = state.findings.departing.get(worker.name, (0, 0))
    is_at_boundary = since == state.generation and body.state == "idle" and body.fault is None
    if state.mode != "open" or not is_at_boundary:
        return
    chosen = [] if state.ending.drain_ns else _choose(turn, is_at_boundary=True)
    if any(worker.name in move.names for move in chosen):
        _move(turn, chosen)
    else:
        detail = f"rank {worker.seat} stood ready to move, which is not wanted any more"
        fault = turn.blame(worker, "requested", detail)
        incident_response.record_fault(turn, fault, "notice")


def departure_ns(state: ControllerState) -> int:
    """Return the earliest time at which a move does not wait for a boundary any more."""
    found = [_move_ns(state, move) for move in _wished(state)]
    return min(found, default=1 << 62)


def _is_due(state: ControllerState, move: _Move) -> bool:
    """Return whether a move is made at once: the device fails, or no boundary came in time."""
    is_urgent = move.finding.severity == "now" and move.finding.check not in SOURCES
    return is_urgent or _move_ns(state, move) <= state.clock.now_ns


def _move_ns(state: ControllerState, move: _Move) -> int:
    departing, generation = state.findings.departing, state.generation
    times = [departing[name] for name in move.names if name in departing]
    begun = [t_ns for since, t_ns in times if since == generation]
    if not begun:
        return 1 << 62
    limit_ns = min(begun) + int(state.limits.hang_ceiling_s * S_NS)
    if until_ns := deadline_ns(move.finding):
        rest_ns = int(BOUNDARY_PART * (until_ns - min(begun)))
        limit_ns = min(limit_ns, min(begun) + max(0, rest_ns))
    return limit_ns


def deadline_ns(one: Warned) -> int:
    """Return the time at which the ranks have to be elsewhere; 0 if it is unknown."""
    return one.t_ns + int(one.within_s * S_NS) if one.within_s else 0


def _choose(turn: ControllerTurn, *, is_at_boundary: bool = False) -> list[_Move]:
    """Return the moves that are wanted and possible; note the others."""
    state = turn.state
    chosen: list[_Move] = []
    for move in _wished(state, is_at_boundary=is_at_boundary):
        taken = {name for other in chosen for name in other.names}
        if move.names <= taken:
            continue
        if why_not := _why_not(state, move, chosen, turn.now_ns):
            _say_unmoved(turn, move, why_not)
        else:
            others = tuple(each for each in move.workers if each.name not in taken)
            chosen.append(move._replace(workers=others))
    return chosen


def _move(turn: ControllerTurn, chosen: list[_Move]) -> None:
    """Give up the workers. The recovery is that of a failure: close, decide, seat, transfer."""
    state = turn.state
    state.findings.leaving = tuple(each.name for move in chosen for each in move.workers)
    state.findings.departing, state.findings.awaited = {}, {}
    _note_unprepared(turn, chosen)
    for key, one, workers in chosen:
        state.findings.moves[key] = (workers[0].name, turn.now_ns)
        turn.journal(RankMigrated(worker=workers[0].name, finding=key, t_ns=turn.now_ns))
        for worker in workers:
            fault = turn.blame(worker, "requested", f"{one.finding}: {one.detail}")
            how = _failure_class(one) if one.check in (*SOURCES, STRAGGLER) else "check"
            incident_response.give_up(turn, worker, fault, how)


def give_up(turn: ControllerTurn, worker: WorkerRecord, fault: Fault, how: str) -> None:
    """Give up a worker whose rank moves to a spare, beside others that leave at once."""
    turn.state.findings.leaving = (*turn.state.findings.leaving, worker.name)
    incident_response.give_up(turn, worker, fault, how)


def _awaits_spares(turn: ControllerTurn, move: _Move) -> bool:
    """Return whether a move waits until its spares have built their models, as far as the script
    allows that: the ranks train meanwhile."""
    state, one = turn.state, move.finding
    spares = fitting_spares(state, (worker.seat for worker in move.workers))
    if all(each.is_hot or spare_preparation.why_unprepared(state, each) for each in spares):
        return False
    since_ns = state.findings.awaited.setdefault(move.key, turn.now_ns)
    limit_ns = since_ns + int(state.limits.join_s * S_NS)
    if until_ns := deadline_ns(one):
        limit_ns = min(limit_ns, since_ns + int(PREPARE_PART * max(0, until_ns - since_ns)))
    return turn.now_ns < limit_ns


def _note_unprepared(turn: ControllerTurn, chosen: list[_Move]) -> None:
    """Note which spares build their models while the others wait, and why."""
    state = turn.state
    seats = [worker.seat for move in chosen for worker in move.workers]
    late = [each for each in fitting_spares(state, seats) if not each.is_hot]
    if late:
        why = spare_preparation.why_unprepared(state, late[0]) or "they were not ready in time"
        names = ", ".join(each.name for each in late)
        turn.note(f"{names}: built while the ranks wait for the move, since {why}", late[0].name)


def restore_moves(turn: ControllerTurn, entry: RankMigrated) -> None:
    """Restore a move of an earlier term, whose clock may have been ahead of this one."""
    turn.state.findings.moves[entry.finding] = (entry.worker, min(entry.t_ns, turn.now_ns))


def healthy_first(
    state: ControllerState, seat: int, near: Collection[str] = ()
) -> list[WorkerRecord]:
    """Return the warm spares for a seat: those without findings first, then those of the agents
    `near`, of nodes below their share of ranks, and of near failure domains, then hot ones. A start
    of all ranks cannot use spares that were prepared for a running job, and no seat one that was
    built for other ranks."""
    unwell, levels = _unwell(state), node_placement.nearness(state, seat)
    is_start = state.mode == "gathering" and state.progress.first
    return sorted(
        (
            each
            for each in state.warm_spares()
            if not (each.preparing and is_start)
            and spare_preparation.may_take(state, each, seat)
            and node_placement.takes_ranks(state, each.agent)
        ),
        key=lambda worker: (
            worker.name in unwell,
            worker.agent not in near,
            node_placement.is_full(state, worker.agent),
            -levels.get(worker.agent, 0),
            not worker.is_hot,
        ),
    )


def fitting_spares(state: ControllerState, seats: Iterable[int]) -> list[WorkerRecord]:
    """Return the warm spares that can fill these seats, for each seat the first one that fits."""
    found: dict[str, WorkerRecord] = {}
    for seat in seats:
        free = (each for each in healthy_first(state, seat) if each.name not in found)
        found.update((each.name, each) for each in islice(free, 1))
    return list(found.values())


def is_calm(state: ControllerState) -> bool:
    """Return whether the ranks of all hosts make steps of one kind, by their newest renewals."""
    calm, generation = state.findings.calm, state.generation
    return all(calm.get(each.agent) == generation for each in state.generation_members())


def _wished(state: ControllerState, *, is_at_boundary: bool = False) -> list[_Move]:
    """Return the moves that findings require and that were not made yet; the worst first."""
    if any(worker.finished for worker in state.generation_members()):
        return []  # the run is about to end
    if not is_at_boundary and not is_calm(state):
        return []
    wished = []
    for key, one in state.findings.warned.items():
        if not _asks_for_move(state, one):
            continue
        move = _Move(key, one, _concerned(state, one))
        # If the worker of a recorded move still lives, the launcher died before the move.
        done = key in state.findings.moves and state.findings.moves[key][0] not in move.names
        if not done and move.workers:
            wished.append(move)
    return sorted(wished, key=lambda move: _badness(move.finding))


def _concerned(state: ControllerState, one: Warned) -> tuple[WorkerRecord, ...]:
    """Return the ranks that a finding concerns, by seat: that of its device; in a run of several
    nodes all of the node, if its symptom is that of a node. () if one of them cannot leave now."""
    members = state.members
    workers = [members.workers[one.worker]] if one.worker in members.workers else []
    if not one.worker and state.placement.agents and not one.symptom.startswith(_OF_RANKS):
        workers = [each for each in members.crew(one.host) if each.seat >= 0]
    if any(worker.seat < 0 or not worker.whole or worker.killed_ns for worker in workers):
        return ()
    return tuple(sorted(workers, key=lambda worker: worker.seat))


def _why_not(state: ControllerState, move: _Move, chosen: list[_Move], now_ns: int) -> str:
    recent = {
        name for name, t_ns in state.findings.moves.values() if now_ns - t_ns < WINDOW_S * S_NS
    }
    recent |= {other.workers[0].name for other in chosen}
    leaving = {name for other in (*chosen, move) for name in other.names}
    unwell = _unwell(state)
    well = min(
        sum(spare.name not in unwell for spare in healthy_first(state, worker.seat))
        for worker in move.workers
    )
    whole = [
        each.seat
        for each in state.generation_members()
        if each.whole and not each.killed_ns and each.name not in leaving
    ]
    is_limited = move.finding.check not in UNLIMITED
    moves_max = state.recovery.moves_max  # a check that always fires must not use all spares
    means, failure = state.means(now_ns), _failure_class(move.finding)
    if why := why_no_move(state.recovery, means, len(leaving), state.world, failure):
        return why
    if is_limited and len(recent - {move.workers[0].name}) >= moves_max:
        return f"{moves_max} moves were made within the last hour"
    if len(leaving) > well:
        return NO_SPARE
    if not all(shared_values.donors_of(state, worker.seat, whole) for worker in move.workers):
        return "no other rank holds the state"
    return ""


def _failure_class(one: Warned) -> str:
    return STRAGGLER if one.check == STRAGGLER else NOTICE


def class_of_moves(state: ControllerState, names: Collection[str]) -> str:
    """Return the class of failure of the moves that have given up these workers."""
    checks = {key.check for key, (name, _) in state.findings.moves.items() if name in names}
    return STRAGGLER if checks == {STRAGGLER} else NOTICE


def _say_unmoved(turn: ControllerTurn, move: _Move, why: str) -> None:
    if move.key in turn.state.findings.unmoved:
        return
    turn.state.findings.unmoved = (*turn.state.findings.unmoved, move.key)
    first, what = move.workers[0], "the rank is" if len(move.workers) == 1 else "the ranks are"
    turn.note(f"{move.finding.finding}: {what} not moved yet, since {why}", first.name, first.seat)


def _unwell(state: ControllerState) -> set[str]:
    """Return workers with a finding of severity now or drain; in a run of several nodes also the
    spares of a node with one, since a rank has the same local rank and GPU on each node."""
    found = [one for one in state.findings.warned.values() if one.severity in MOVED_FOR["drain"]]
    hosts = {one.host for one in found} if state.placement.agents else set[str]()
    spares = {name for name in state.members.unseated if state.members.workers[name].agent in hosts}
    return spares | {one.worker for one in found}


def _key(one: Warned) -> FindingKey:
    return FindingKey(one.host, one.check, one.symptom, one.code, one.device)


def _badness(one: Warned) -> int:
    return _WORST_FIRST.index(one.severity) if one.severity in _WORST_FIRST else len(_WORST_FIRST)
