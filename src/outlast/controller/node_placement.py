"""Placement of ranks on the nodes of a run, and the nodes that it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from outlast.controller.controller_state import ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.inputs import NodeJoined
from outlast.controller.member_tables import AgentRecord

RETURN_S = 60.0  # a node that lost its lease may return within this time


def admit(turn: ControllerTurn, agent: str, domain: str) -> None:
    """Take a node into the placement, if it is not there, and make that durable: a later term must
    wait for its workers."""
    placement = turn.state.placement.with_node(agent, domain)
    if placement != turn.state.placement:
        turn.state.placement = placement
        turn.journal(NodeJoined(agent=agent, domain=domain))


def restore(turn: ControllerTurn, entry: NodeJoined) -> None:
    """Take a node into the placement that has joined under an earlier term."""
    turn.state.placement = turn.state.placement.with_node(entry.agent, entry.domain)


def neighbours(state: ControllerState, seat: int) -> set[str]:
    """Return the agent of the rank's own node, if it has fewer ranks than its share; else agents
    below their share whose hosts hold an adjacent rank."""
    members, placement = state.members, state.placement
    home = members.agents.get(placement.home(seat))
    if home and home.connected and members.ranks_of(home.name) < placement.ranks_per_node:
        return {home.name}
    return members.neighbours(seat, placement.ranks_per_node)


def empty_seats(state: ControllerState) -> list[int]:
    """Return the empty seats in the order in which they are filled: by rank, and first those whose
    own node is lost, since spares on other nodes are for them."""
    members, placement = state.members, state.placement
    if "" not in members.seats:
        return []
    absent = state.progress.absent
    seats = [seat for seat, name in enumerate(members.seats) if not name and seat not in absent]
    if not placement.agents:
        return seats
    up = {agent.name for agent in members.agents.values() if agent.connected}
    return sorted(seats, key=lambda seat: placement.home(seat) in up)


def shared_levels(domain: str, other: str) -> int:
    """Return how many levels two failure domains share, from the largest part on."""
    same = [one == two != "" for one, two in zip(domain.split("/"), other.split("/"), strict=False)]
    return (*same, False).index(False)


def nearness(state: ControllerState, seat: int) -> dict[str, int]:
    """Return by agent how many levels of failure domains its node shares with a rank's own node; {}
    if no domains are known."""
    placement = state.placement
    if seat < 0 or not any(placement.domains):
        return {}
    home = placement.domains[seat // placement.ranks_per_node]
    domains = zip(placement.agents, placement.domains, strict=True)
    return {agent: shared_levels(home, domain) for agent, domain in domains}


def agent_with_room(turn: ControllerTurn, seat: int) -> AgentRecord | None:
    """Return the agent that starts a worker for a rank; None without room. It is a neighbour below
    its share of ranks, so that ranks are contiguous by host as with torchrun, else one whose node
    shares most levels of failure domains with the rank's own node, else the one with most room."""
    state = turn.state
    if agent := _roomiest(state, seat, neighbours(state, seat)):
        return agent
    near = nearness(state, seat)
    is_partial = near or state.cuts.pairs or state.releases.closed
    agent = None if is_partial else turn.roomiest_agent()
    if agent is not None and has_gpu_for(state, agent.name, seat):
        return agent
    return _roomiest(state, seat, state.members.agents, near)


def _roomiest(
    state: ControllerState, seat: int, names: Iterable[str], near: Mapping[str, int] | None = None
) -> AgentRecord | None:
    members, near = state.members, near or {}
    room = [
        agent
        for agent in map(members.agents.__getitem__, names)
        if members.room(agent) > 0
        and has_gpu_for(state, agent.name, seat)
        and takes_ranks(state, agent.name)
    ]
    return min(
        room,
        key=lambda one: (-near.get(one.name, 0), -members.room(one), one.name),
        default=None,
    )


def takes_ranks(state: ControllerState, agent: str) -> bool:
    """Return whether ranks may move to an agent's host: it reaches the hosts that have some, and
    does not leave the run."""
    return agent not in state.releases.closed and not is_cut_off(state, agent)


def is_cut_off(state: ControllerState, agent: str) -> bool:
    """Return whether an agent's host does not reach a host that has ranks: none may move to it."""
    others = state.cuts.others(agent, state.clock.now_ns) if state.cuts.pairs else ()
    return any(state.members.ranks_of(other) for other in others)


def spares_missing(state: ControllerState) -> int:
    """Return how many spares are to be started: up to the configured number, and up to it on nodes
    with fewer ranks than their share, as far as these have places: a node that has come back is a
    better place for a rank than one that has its ranks."""
    members, share = state.members, state.placement.ranks_per_node
    spares = Counter(
        one.agent for one in map(members.workers.get, members.unseated) if one and not one.killed_ns
    )
    missing = state.spares + len(state.progress.absent) - spares.total()
    if not state.placement.agents:
        return missing
    places = {
        agent.name: share - members.ranks_of(agent.name)
        for agent in members.agents.values()
        if agent.connected and not agent.lapsed and agent.name not in state.releases.closed
    }
    placed = sum(min(spares[name], max(0, free)) for name, free in places.items())
    empty = sum(max(0, free - spares[name]) for name, free in places.items())
    wanted = state.spares + len(state.progress.absent)
    return max(missing, min(wanted - placed, empty))


def is_short(state: ControllerState) -> bool:
    """Return whether spares are missing that some host has room for."""
    return spares_missing(state) > 0 and rooms(state) > 0


def rooms(state: ControllerState) -> int:
    """Return how many workers the agents may start."""
    agents = state.members.agents.values()
    return sum(max(0, state.members.room(each)) for each in agents if not each.lapsed)


def is_full(state: ControllerState, agent: str) -> bool:
    """Return whether a node has its share of ranks: another rank there would lose its own host."""
    share = state.placement.ranks_per_node
    return bool(state.placement.agents) and state.members.ranks_of(agent) >= share


def has_gpu_for(state: ControllerState, agent: str, seat: int, instead_of: str = "") -> bool:
    """Return whether the GPU of a rank is free on an agent's node: no worker there has a rank with
    the same local rank, except `instead_of`. A rank without a GPU fits everywhere, and so does
    every rank of a run that takes any agent, where agents choose the GPU."""
    members, placement = state.members, state.placement
    if not placement.agents or seat < 0 or "gpu" not in (members.fingerprint or {}):
        return True
    local_rank = seat % placement.ranks_per_node
    return not any(
        worker.seat >= 0
        and worker.seat % placement.ranks_per_node == local_rank
        and worker.name != instead_of
        for worker in members.crew(agent)
    )


def cold_spares(state: ControllerState, seat: int) -> list[WorkerRecord]:
    """Return the spares for a rank that are still starting: those of nodes below their share first,
    then near ones, then old ones."""
    levels = nearness(state, seat)
    fit = [
        each
        for each in state.cold_spares()
        if has_gpu_for(state, each.agent, seat) and takes_ranks(state, each.agent)
    ]
    return sorted(fit, key=lambda each: (is_full(state, each.agent), -levels.get(each.agent, 0)))


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
