"""Own state of ranks that were lost with their hosts, from their partners on other hosts.

Which ranks are partners follows from the hosts of all ranks when a generation connects. The
question goes to all agents, so that it needs no memory of earlier generations: partners of one
generation still hold the state while the next one connects.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.controller.controller_state import S_NS, ControllerState, ControllerTurn
from outlast.controller.replica_placement import PartnerSets, partner_sets
from outlast.transport import messages


def partners_of(state: ControllerState) -> dict[int, tuple[int, ...]]:
    """Return by rank the partners that hold each other's own state; {} on one host."""
    if not state.placement.agents:
        return {}
    return {seat: seats for seats in _sets(state).sets for seat in seats}


def _sets(state: ControllerState) -> PartnerSets:
    """Return the sets of the ranks that are present."""
    placement, workers = state.placement, state.occupants()
    hosts = [worker.agent for worker in workers]
    known = zip(placement.agents, placement.domains, strict=True) if any(placement.domains) else ()
    found = partner_sets(hosts, dict(known))
    sets = tuple(tuple(workers[place].seat for place in places) for places in found.sets)
    return found._replace(sets=sets)


def warn_of_losses(turn: ControllerTurn) -> None:
    """Warn when a generation opens in which one host, or one failure domain, has all copies of
    a rank's own state."""
    state = turn.state
    if not state.placement.agents or state.world == 1:
        return
    sets, note = _sets(state)
    if note:
        turn.note(note)
    if not sets:
        host = state.members.agents[state.occupants()[0].agent].host
        turn.note(
            f"all ranks are on {host}: no other host has their own state (random generators, data"
            " position); if this host is lost, all ranks go back to the newest checkpoint"
        )


def are_awaited(turn: ControllerTurn, seats: Sequence[int], n: int) -> bool:
    """Ask all agents for the own state, before phase n+1, of lost ranks that have left none.

    Return whether the decision waits for answers: at most `limits.status_s`.
    """
    state = turn.state
    query = state.partners
    ranks = tuple(seat for seat in seats if seat in query.lost)
    if not state.placement.agents or not ranks:
        return False
    place = state.generation, n, state.progress.since_of(n)
    if place != query.place or not set(ranks) <= set(query.seats):
        query.begin(place, ranks, turn.now_ns)
        query.wait_for(sorted(state.members.agents))
        for name in query.waiting:
            ask_again(turn, name)
    agents = state.members.agents
    is_late = turn.now_ns >= due_ns(state)
    query.wait_for(name for name in query.waiting if not (is_late or agents[name].lapsed))
    return bool(query.waiting)


def ask_again(turn: ControllerTurn, agent: str) -> None:
    """Send the question to an agent that has yet to answer it."""
    query = turn.state.partners
    if agent in query.waiting and turn.state.mode == "closing":
        _, n, since = query.place
        body = messages.PartnerSlotsRequest(seats=query.seats, n=n, since=since)
        turn.tell(agent, body)


def due_ns(state: ControllerState) -> int:
    """Return the deadline of the answers."""
    return state.partners.asked_ns + int(state.limits.status_s * S_NS)


def on_answer(turn: ControllerTurn, agent: str, body: messages.PartnerSlots) -> None:
    """Keep the slots that an agent's workers hold, the newest of each."""
    state = turn.state
    query = state.partners
    if (state.generation, body.n, body.since) != query.place or state.mode != "closing":
        return
    query.wait_for(name for name in query.waiting if name != agent)
    for seat, slots in body.slots.items():
        newest = {
            key: data
            for key, (generation, data) in slots.items()
            if seat in query.seats
            and body.since <= generation <= state.generation
            and query.take(seat, key, generation)
        }
        if newest:
            state.members.keep_slots(seat, newest)
