"""Hosts that do not reach each other, although both reach the controller.

A worker names the addresses of hosts that have not answered it (`Status.unreachable`): gloo's own
connections end without an acknowledgement, and so does a search for peers that connect late.

| generations in a row that found a cut | decision |
|---|---|
| 1 | retry: a network that heals costs no rank |
| 2 or more, spares or room elsewhere | the ranks of one host of each pair move there |
| 2 or more, none | retry, for at most `HEAL_S` since the first; then the run ends |

The ranks that move are alive: their agents have their own state. Until a cut has healed, no rank
moves to a host that does not reach a host with ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from outlast.controller.controller_state import (
    S_NS,
    ControllerState,
    ControllerTurn,
    WorkerRecord,
)
from outlast.events import Fault
from outlast.transport import messages
from outlast.transport.connection_errors import host_of

HEAL_S = 60.0
Pair = tuple[str, str]


def learn(turn: ControllerTurn, worker: WorkerRecord, body: messages.Status) -> Fault | None:
    """Record the hosts that have not answered a worker. Return its fault, which names them."""
    state = turn.state
    if not body.unreachable or not state.placement.agents:
        return body.fault
    silent, names = set(body.unreachable), dict[str, None]()
    for peer in state.generation_members():
        known = peer.hello is not None and peer.agent != worker.agent
        if known and peer.hello and host_of(peer.hello.address) in silent:
            pair = min(peer.agent, worker.agent), max(peer.agent, worker.agent)
            state.cuts.report(pair, state.generation, turn.now_ns)
            names[state.members.agents[peer.agent].host] = None
    if body.fault is None or body.fault.kind != "transport" or not names:
        return body.fault
    host = state.members.agents[worker.agent].host
    detail = f"rank {worker.seat} on {host} had no answer from {', '.join(names)}"
    return replace(body.fault, detail=f"{detail}: {body.fault.detail}")


def describe(state: ControllerState) -> str:
    """Return text for the cuts that this generation has found, "" if there are none."""
    generation, found = state.cuts.confirmed
    if generation != state.generation:
        return ""
    agents = state.members.agents
    pairs = "; ".join(f"{agents[one].host} and {agents[other].host}" for one, other in found)
    return f"{pairs} do not reach each other, although both reach the controller"


def ranks_to_move(turn: ControllerTurn, *, is_complete: bool) -> dict[str, Fault]:
    """Return the workers of a host of each cut, and why they leave it: they have places elsewhere,
    and the generation before has found a cut, too. `is_complete`: this generation has completed
    a phase."""
    state = turn.state
    if is_complete:
        state.cuts.end(state.generation, _reached(state))
    found = _found(state)
    if not found:
        return {}
    state.cuts.confirm(state.generation, found)
    if state.cuts.tries == 1:
        turn.note(
            f"{describe(state)}: the phase is retried; if that fails, ranks move to other hosts"
            f" where there are spares or room, else the run waits {HEAL_S:g} s for the network"
        )
        return {}
    hosts, text = _to_leave(state, found), describe(state)
    return {
        each.name: turn.blame(each, "transport", f"rank {each.seat} leaves its host: {text}")
        for each in state.generation_members()
        if each.agent in hosts
    }


def is_final(state: ControllerState) -> bool:
    """Return whether the run has waited long enough for a cut network to heal."""
    waited_ns = state.clock.now_ns - state.cuts.since_ns
    return bool(_found(state)) and waited_ns >= HEAL_S * S_NS


def _found(state: ControllerState) -> list[Pair]:
    """Return the pairs that this generation has found, both of which have ranks of it: all of them
    have answered its Close."""
    if not state.cuts.pairs:
        return []
    agents = {worker.agent for worker in state.generation_members()}
    return sorted(
        pair
        for pair, (generation, _) in state.cuts.pairs.items()
        if generation == state.generation and agents.issuperset(pair)
    )


def _reached(state: ControllerState) -> list[Pair]:
    """Return the known pairs whose hosts had ranks in this generation."""
    agents = {worker.agent for worker in state.generation_members()}
    return [pair for pair in state.cuts.pairs if agents.issuperset(pair)]


def _to_leave(state: ControllerState, found: Iterable[Pair]) -> set[str]:
    """Return the agents that all ranks leave, so that no cut is between two hosts with ranks; none
    if the ranks have no places elsewhere. A host in most pairs leaves first, then one with fewer
    ranks, then the later node."""
    ranks = Counter(worker.agent for worker in state.generation_members())
    order = {agent: index for index, agent in enumerate(state.placement.agents)}
    leaving: set[str] = set()
    rest = list(found)
    while rest:
        counts = Counter(agent for pair in rest for agent in pair)
        choices = sorted(counts, key=lambda one: (-counts[one], ranks[one], -order.get(one, 0)))
        chosen = next((one for one in choices if _has_places(state, {*leaving, one}, ranks)), None)
        if chosen is None:
            return set()
        leaving.add(chosen)
        rest = [pair for pair in rest if chosen not in pair]
    return leaving


def _has_places(state: ControllerState, leaving: set[str], ranks: Mapping[str, int]) -> bool:
    """Return whether spares and room of other hosts suffice for the ranks of these hosts."""
    members, now_ns = state.members, state.clock.now_ns
    staying = {agent for agent in ranks if agent not in leaving}
    places = 0
    for agent in members.agents.values():
        if agent.name in leaving or state.cuts.others(agent.name, now_ns) & staying:
            continue
        spares = [each for each in members.usable_spares() if each.agent == agent.name]
        places += len(spares) + max(0, members.room(agent))
    return places >= sum(ranks[agent] for agent in leaving)
