"""Hosts that leave a run for maintenance (`outlast roll`), once their ranks have moved.

| the host | what is done |
|---|---|
| has ranks | they move as for any notice (planned_migration) |
| has none, and all ranks have completed a phase | it is closed: its spares end, no rank comes |
| is closed, and a generation ends | it is opened again, since ranks may need its place |
| is closed, and has no worker | it is released: its launcher ends, and its lease is over |

Another node takes over where the host is the controller's own: its launcher ends as others do.
"""

from __future__ import annotations

from msgspec.structs import replace

from outlast import events
from outlast.controller import planned_migration
from outlast.controller.controller_state import ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.inputs import FindingKey
from outlast.controller.member_tables import AgentRecord
from outlast.errors import EXIT_DONE
from outlast.transport import messages

RELEASED = messages.RELEASED


def release_hosts(turn: ControllerTurn) -> None:
    """Close and release the hosts that are to leave and have no ranks."""
    state = turn.state
    releases = state.releases
    leaving = _leaving(state) if state.findings.warned else {}
    if not leaving or state.mode != "open" or state.ending.drain_ns:
        if releases.closed:
            releases.closed = ()
            state.members.refill_later()
        return
    for name in releases.closed:
        if name not in leaving:  # taken back
            releases.closed = tuple(each for each in releases.closed if each != name)
            state.members.refill_later()
    for name, key in leaving.items():
        _release(turn, key, state.members.agents[name])


def _leaving(state: ControllerState) -> dict[str, FindingKey]:
    """Return the agents whose hosts are to leave, and have not been released for that before."""
    agents, found = state.members.agents, dict[str, FindingKey]()
    for key, one in state.findings.warned.items():
        if one.check != planned_migration.ROLL or not state.placement.agents:
            continue
        for agent in agents.values():
            known = state.releases.released.get(key, ("", 0))
            is_back = known[0] == agent.name and known[1] < agent.incarnation
            if agent.host == one.host and agent.connected and not agent.lapsed and not is_back:
                found.setdefault(agent.name, key)
    return found


def _release(turn: ControllerTurn, key: FindingKey, agent: AgentRecord) -> None:
    """Take the next step of a host's way out of the run."""
    state = turn.state
    members, releases = state.members, state.releases
    crew = members.crew(agent.name)
    stay = [
        each
        for each in members.agents.values()
        if each.connected and not each.lapsed and each.name not in (*releases.closed, agent.name)
    ]
    if _has_ranks(crew) or not stay:
        return
    if agent.name not in releases.closed:
        if not planned_migration.is_calm(state):
            return
        releases.closed = (*releases.closed, agent.name)
    if crew:
        for worker in crew:
            fault = turn.blame(worker, "requested", f"{agent.host} leaves the run")
            turn.kill(worker.name, fault)
        return
    releases.closed = tuple(each for each in releases.closed if each != agent.name)
    releases.released[key] = agent.name, agent.incarnation
    members.set_agent(replace(agent, connected=False, lapsed=True))
    turn.emit(events.NodeReleased(t_ns=turn.now_ns, host=agent.host))
    detail = state.findings.warned[key].detail
    turn.tell(agent.name, messages.RunOutcome(outcome=RELEASED, exit_code=EXIT_DONE, cause=detail))


def _has_ranks(crew: list[WorkerRecord]) -> bool:
    return any(worker.seat >= 0 for worker in crew)
