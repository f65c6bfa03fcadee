"""Placement of ranks on the nodes of a run, and the nodes that it waits for."""

from __future__ import annotations

from outlast.controller.controller_state import ControllerState

RETURN_S = 60.0  # a node that lost its lease may return within this time


def neighbours(state: ControllerState, seat: int) -> set[str]:
    """Return the agent of the rank's own node, if it has fewer ranks than its share; else agents
    below their share whose hosts hold an adjacent rank."""
    members, placement = state.members, state.placement
    home = members.agents.get(placement.home(seat))
    if home and home.connected and members.ranks_of(home.name) < placement.ranks_per_node:
        return {home.name}
    return members.neighbours(seat, placement.ranks_per_node)


def lost_nodes(state: ControllerState) -> list[str]:
    """Return the hosts whose agents have not come, or do not answer."""
    agents = state.members.agents
    silent = [agent.host for agent in agents.values() if agent.lapsed or not agent.connected]
    return sorted({*state.placement.absent(agents), *silent})


def room_limit_s(state: ControllerState) -> float:
    """Return how long empty seats wait for room: for a start, or for a lost node to return."""
    limit_s = state.limits.hello_s
    is_start = bool(state.placement.absent(state.members.agents))
    return min(limit_s, RETURN_S) if state.placement.agents and not is_start else limit_s
