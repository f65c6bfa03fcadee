"""Notices whose ranks cannot move: saves, and the end of the run, before their deadlines.

| at | what is done |
|---|---|
| the notice, as soon as no spare is known to fit | a save, if it fits or none was timed |
| the same, and it does not fit | a note says so at once; nothing is saved |
| `needed_s` before the deadline | the run drains: a save, and an end that can be resumed |
| the same, and there is less time than a save takes | a note says so; training goes on |

A move to a spare that comes meanwhile ends this. So does a notice that is taken back.
"""

from __future__ import annotations

from outlast.controller import checkpoint_tracking, planned_migration, shared_values
from outlast.controller.controller_state import S_NS, ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.inputs import FindingKey
from outlast.controller.lifecycle import run_ending
from outlast.events import Warned

SAVE_FACTOR = 1.5  # times the longest of the last saves
REGROUP_S = 5.0  # until all ranks stand at one place, and until they have ended
UNTIMED_S = 10.0  # for a save where none was timed
MOVE_S = 2.0  # for a move to begin, where the deadline is near
_RESTING = ("unborn", "awaiting", "stopping", "ended")


def meet(turn: ControllerTurn) -> None:
    """Answer notices with a deadline whose ranks cannot move."""
    state = turn.state
    answers = state.notices.answers
    if not (state.findings.warned or answers) or state.mode in _RESTING or state.ending.drain_ns:
        return
    for key in answers.keys() - state.findings.warned.keys():
        del answers[key]  # taken back
    for key, one in tuple(state.findings.warned.items()):
        staying = _staying(state, key, one)
        if not staying or state.ending.drain_ns or _has_place(state, one, staying):
            continue
        answer, since_ns = answers.setdefault(key, ("", turn.now_ns))
        if not answer and _is_stuck(state, key, one, staying):
            _answer(turn, key, one, staying)
        elif answer != "late" and turn.now_ns >= _end_ns(state, one, since_ns):
            can_wait = not answer and _has_spares(state, staying)  # until the ranks make steps
            if not can_wait:
                _end(turn, key, one, staying)


def due_ns(state: ControllerState) -> int:
    """Return the time of the next end of the run for a notice; 0: none."""
    if not state.notices.answers or state.ending.drain_ns or state.mode in _RESTING:
        return 0
    found = [
        _end_ns(state, state.findings.warned[key], since_ns)
        for key, (answer, since_ns) in state.notices.answers.items()
        if answer != "late" and key in state.findings.warned
    ]
    return min((t_ns for t_ns in found if t_ns > state.clock.now_ns), default=0)


def needed_s(state: ControllerState) -> float:
    """Return the time that a save and the end of the run take, by the saves so far."""
    longest_s = max(state.saves.durations_s, default=UNTIMED_S)
    return SAVE_FACTOR * longest_s + REGROUP_S


def _answer(
    turn: ControllerTurn, key: FindingKey, one: Warned, staying: list[WorkerRecord]
) -> None:
    """Save now, or note that no save fits."""
    state = turn.state
    needs_s, since_ns = needed_s(state), state.notices.answers[key][1]
    if state.saves.durations_s and _rest_s(state, one) < needs_s:
        _note_late(turn, key, one, staying)
        return
    state.notices.answers[key] = "saves", since_ns
    then = f"it ends behind another save {needs_s:.1f} s before the deadline"
    text = f"{_situation(state, one)}: the run saves now; {then}, unless a spare comes before"
    turn.note(text, staying[0].name, staying[0].seat)
    checkpoint_tracking.request_save(turn, _reason(one))


def _end(turn: ControllerTurn, key: FindingKey, one: Warned, staying: list[WorkerRecord]) -> None:
    """End the run behind a save, if there is still time for it."""
    state, rest_s = turn.state, _rest_s(turn.state, one)
    if rest_s <= max(state.saves.durations_s, default=0.0):
        _note_late(turn, key, one, staying)
    elif not any(each.name in state.findings.departing for each in staying):
        run_ending.on_stop_requested(turn, _reason(one), limit_s=rest_s)


def _note_late(
    turn: ControllerTurn, key: FindingKey, one: Warned, staying: list[WorkerRecord]
) -> None:
    state = turn.state
    copy, since_ns = state.saves.checkpoint, state.notices.answers[key][1]
    state.notices.answers[key] = "late", since_ns
    newest = f"that of step {copy.step}" if copy else "none"
    turn.note(
        f"{_situation(state, one)}: no save is known to fit ({needed_s(state):.1f} s), so none is"
        f" made; the newest checkpoint is {newest}; training goes on until the ranks are lost",
        staying[0].name,
        staying[0].seat,
    )


def _situation(state: ControllerState, one: Warned) -> str:
    durations = state.saves.durations_s
    timed = f"a save takes {max(durations):.1f} s" if durations else "no save was timed yet"
    rest_s = max(0.0, _rest_s(state, one))
    return f"{one.finding}: the ranks cannot move, {timed}, and {rest_s:.1f} s remain"


def _staying(state: ControllerState, key: FindingKey, one: Warned) -> list[WorkerRecord]:
    """Return the ranks of a notice with a deadline that have not moved, by rank."""
    is_notice = one.within_s and one.check in planned_migration.SOURCES
    if not is_notice or key in state.findings.moves:
        return []
    members = state.members
    if one.worker:
        found = [members.workers[one.worker]] if one.worker in members.workers else []
    else:
        hosts = [agent.name for agent in members.agents.values() if agent.host == one.host]
        found = [each for host in hosts for each in members.crew(host)]
    return sorted((each for each in found if each.seat >= 0), key=lambda each: each.seat)


def _is_stuck(
    state: ControllerState, key: FindingKey, one: Warned, staying: list[WorkerRecord]
) -> bool:
    """Return whether the ranks make steps, and no spare is known to fit."""
    if any(each.name in state.findings.departing for each in staying):
        return False
    if state.mode != "open" or not planned_migration.is_calm(state):
        return False
    is_of_all = not one.worker and not state.placement.agents  # no other host has a place
    return key in state.findings.unmoved or is_of_all


def _has_spares(state: ControllerState, staying: list[WorkerRecord]) -> bool:
    """Return whether there are warm spares for these ranks on hosts that are not to be left."""
    known = state.findings.warned.values()
    hosts = {one.host for one in known if not one.worker and one.check in planned_migration.SOURCES}
    agents = state.members.agents
    spares = [each for each in state.warm_spares() if agents[each.agent].host not in hosts]
    return len(spares) >= len(staying)


def _has_place(state: ControllerState, one: Warned, staying: list[WorkerRecord]) -> bool:
    """Return whether the loss of these ranks would lose nothing: other hosts have room for them,
    and other ranks their state."""
    members = state.members
    hosts = {found.host for found in state.findings.warned.values() if found.severity != "warn"}
    rooms = [
        members.room(agent)
        for agent in members.agents.values()
        if agent.host not in hosts | {one.host} and not agent.lapsed
    ]
    leaving = {each.seat for each in staying}
    others = [each.seat for each in state.generation_members() if each.seat not in leaving]
    has_donors = all(shared_values.donors_of(state, seat, others) for seat in leaving)
    return sum(max(0, room) for room in rooms) >= len(staying) and has_donors


def _end_ns(state: ControllerState, one: Warned, since_ns: int) -> int:
    end_ns = planned_migration.deadline_ns(one) - int(needed_s(state) * S_NS)
    return max(end_ns, since_ns + int(MOVE_S * S_NS))


def _rest_s(state: ControllerState, one: Warned) -> float:
    return (planned_migration.deadline_ns(one) - state.clock.now_ns) / S_NS


def _reason(one: Warned) -> str:
    return f"{one.finding}: {one.detail}"
