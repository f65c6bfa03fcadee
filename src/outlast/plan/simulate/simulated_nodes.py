"""Simulated nodes: failures, losses, replacements, repairs."""

from __future__ import annotations

import math

import numpy as np

from outlast.plan.simulate.compiled_random import (
    compiled,
    exponential,
    gamma,
    gap,
    inlined,
    uniform,
)
from outlast.plan.simulate.simulated_job import (
    LIVE,
    MEMORY,
    STORAGE,
    Parameters,
    SimulatedFleet,
    State,
    Table,
)


@compiled
def heap_push(times_s: Table, numbers: Table, size: int, time_s: float, number: int) -> None:
    """Add an entry to a heap of `size`."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if times_s[above] <= time_s:
            break
        times_s[at], numbers[at] = times_s[above], numbers[above]
        at = above
    times_s[at], numbers[at] = time_s, number


@compiled
def heap_pop(times_s: Table, numbers: Table, size: int) -> None:
    """Remove and return the earliest entry of a heap of `size`."""
    last = size - 1
    time_s = times_s[last]
    number = numbers[last]
    at = 0
    below = 1
    while below < last:
        below += times_s[below + 1] < times_s[below]  # below + 1 may be `last`, which is no harm
        if times_s[below] >= time_s:
            break
        times_s[at], numbers[at] = times_s[below], numbers[below]
        at = below
        below = 2 * below + 1
    times_s[at], numbers[at] = time_s, number


_SALT = np.uint64(0xD6E8FEB86659FD93)  # streams that are not about failures
_WHOSE = np.uint64(0xA0761D6478BD642F)  # and one about which node they strike
_LEMONS = 1
_AGES = 2
# Slots of a failure.
_KIND = 0
_KEPT = 1
_NEXT = 2
_NODES = 3
_PER_NODE = 512
_MENDED = 400
_NEVER = 1e-300  # a rate of 0 would forget what was drawn


@compiled
def begin_fleet(p: Parameters, f: SimulatedFleet, s: State, key: np.uint64) -> None:
    """Give every seat a node, make all spares available, and reset the state."""
    s.key = key
    s.now_s = 0.0
    s.work_s = 0.0
    s.exposed_s = 0.0
    s.cycle = s.version = s.at_storage = s.flushing = 0
    s.own_s = s.saving_s = s.flushed_s = 0.0
    s.missing = s.replicas_lost = s.repairing = s.ageing = s.recent = s.drawn = 0
    s.failures = s.incidents = s.from_live = s.from_memory = s.from_storage = s.stalls = 0
    s.done_s = s.redo_s = s.save_s = s.detect_s = s.restart_s = s.wait_s = s.slow_s = 0.0
    s.live_part, s.copies_part = p.nodes // p.replicas, p.nodes // max(1, p.copies)
    for replica in range(p.replicas):
        f.down[replica] = 0
    for part in range(s.live_part):
        f.live_lost[part] = 0
    for part in range(s.copies_part):
        f.copies_lost[part] = 0
    for seat in range(p.nodes):
        f.seat[seat] = f.lost[seat] = 0
    s.free = p.spares
    for k in range(p.spares):
        f.spare_lemon[k], f.spare_born_s[k] = 0, -p.age_s
    _choose_lemons(p, f, s)
    s.healthy = p.nodes - s.lemons
    if p.shape != 1.0:
        for seat in range(p.nodes):
            f.born_s[seat] = -p.age_s
            _will_fail(p, f, s, seat)
    s.node_rate = p.node_rate if p.shape == 1.0 else 0.0
    s.other_rate = p.software_rate + p.rack_rate * _racks(p)
    s.rate = _rate(p, s)
    s.next_s = gap(s.key, 0, _NEXT, p.gap_spread) / s.rate


@inlined
def _choose_lemons(p: Parameters, f: SimulatedFleet, s: State) -> None:
    """Choose lemons among nodes in seats and spares."""
    s.lemons = 0
    every = p.nodes + p.spares
    for k in range(round(p.lemons * every)):
        node = int(uniform(s.key ^ _SALT, _LEMONS, k) * every)
        while (f.seat[node] if node < p.nodes else f.spare_lemon[node - p.nodes]) > 0:
            node = (node + 1) % every  # the next one that is none yet
        if node < p.nodes:
            s.lemons += 1
            f.lemon[s.lemons], f.seat[node] = node, s.lemons
        else:
            f.spare_lemon[node - p.nodes] = 1


@compiled
def _rate(p: Parameters, s: State) -> float:
    """Return failures a second of everything that does not age."""
    return max(_NEVER, s.other_rate + s.node_rate * (s.healthy + s.lemons * p.lemon_factor))


@compiled
def _racks(p: Parameters) -> int:
    return math.ceil(p.nodes / p.rack_nodes)


@compiled
def upcoming(p: Parameters, f: SimulatedFleet, s: State) -> float:
    """Return the time of the next failure, if nothing changes before."""
    return s.next_s if p.shape == 1.0 else _upcoming_age(f, s)


@inlined
def _upcoming_age(f: SimulatedFleet, s: State) -> float:
    while s.ageing and f.ageing_s[0] != f.due_s[f.ageing_seat[0]]:
        heap_pop(f.ageing_s, f.ageing_seat, s.ageing)  # that node has left its seat
        s.ageing -= 1
    if not s.ageing:
        return s.next_s
    return min(s.next_s, max(s.now_s, f.ageing_s[0]))  # one that was due while all waited: now


@compiled
def strike(p: Parameters, f: SimulatedFleet, s: State) -> int:
    """Apply a failure at `now_s`; return the best source that it leaves."""
    if s.now_s >= s.exposed_s:
        _protect(p, f, s)
    s.exposed_s = math.inf  # until the job has recovered
    event = s.failures
    s.failures += 1
    if p.shape != 1.0 and s.ageing and f.ageing_s[0] <= s.now_s:
        seat = f.ageing_seat[0]
        heap_pop(f.ageing_s, f.ageing_seat, s.ageing)
        s.ageing -= 1
        return _node_fails(p, f, s, seat, event)
    source = _draw_failure(p, f, s, event)
    s.rate = _rate(p, s)
    s.next_s = s.now_s + gap(s.key, event + 1, _NEXT, p.gap_spread) / s.rate
    return source


@inlined
def _draw_failure(p: Parameters, f: SimulatedFleet, s: State, event: int) -> int:
    """Draw the failing node among those that do not age, in proportion to their rates."""
    rest = uniform(s.key, event, _KIND) * s.rate - s.node_rate * s.healthy
    if rest < 0:
        return _node_fails(p, f, s, _healthy(p, f, s, event), event)
    lemons_rate = s.node_rate * s.lemons * p.lemon_factor
    if rest < lemons_rate:
        which = 1 + int(uniform(s.key ^ _WHOSE, event, 0) * s.lemons)
        return _node_fails(p, f, s, f.lemon[which], event)
    if rest - lemons_rate < p.software_rate:
        return p.software_from
    first = int(uniform(s.key ^ _WHOSE, event, 0) * _racks(p)) * p.rack_nodes
    source = p.node_from
    for seat in range(first, min(first + p.rack_nodes, p.nodes)):
        if f.seat[seat] >= 0:
            source = max(source, _loses(p, f, s, seat))
            _leave(p, f, s, seat, event, seat - first)
    return source


@inlined
def _healthy(p: Parameters, f: SimulatedFleet, s: State, event: int) -> int:
    """Draw the seat of a healthy node, uniformly by rejection: most are healthy."""
    turn = 0
    seat = int(uniform(s.key ^ _WHOSE, event, turn) * p.nodes)
    while f.seat[seat] != 0:
        turn += 1
        seat = int(uniform(s.key ^ _WHOSE, event, turn) * p.nodes)
    return seat


@compiled
def _node_fails(p: Parameters, f: SimulatedFleet, s: State, seat: int, event: int) -> int:
    source = max(p.node_from, _loses(p, f, s, seat))
    if p.kept > 0 and uniform(s.key, event, _KEPT) < p.kept:
        if p.shape != 1.0:
            _will_fail(p, f, s, seat)
    else:
        _leave(p, f, s, seat, event, 0)
    return source


@compiled
def _loses(p: Parameters, f: SimulatedFleet, s: State, seat: int) -> int:
    """Lose the part of a seat; return the best remaining source."""
    if f.lost[seat] == 0:
        _count(p, f, s, seat, 1)
    _remember(f, s, seat)
    if p.node_from == LIVE and f.live_lost[seat % s.live_part] < p.replicas:
        return LIVE
    if p.copies > 0 and f.copies_lost[seat % s.copies_part] < p.copies:
        return MEMORY
    return STORAGE


@inlined
def _protect(p: Parameters, f: SimulatedFleet, s: State) -> None:
    """Restore the part of every seat with a node, and all copies."""
    for k in range(s.recent):
        seat = f.recent[k]
        f.lost[seat] = f.seat[seat] < 0
        if f.lost[seat] == 0:
            _count(p, f, s, seat, -1)
    s.recent = 0


@compiled
def _remember(f: SimulatedFleet, s: State, seat: int) -> None:
    """Note a seat whose part is lost, once, for when all are protected again."""
    if f.lost[seat] < 2:
        f.lost[seat] = 2
        f.recent[s.recent] = seat
        s.recent += 1


@compiled
def _count(p: Parameters, f: SimulatedFleet, s: State, seat: int, change: int) -> None:
    """Return the number of seats with the same part that have lost it."""
    if p.node_from == LIVE:
        f.live_lost[seat % s.live_part] += change
    if p.copies > 0:
        f.copies_lost[seat % s.copies_part] += change


@inlined
def _leave(p: Parameters, f: SimulatedFleet, s: State, seat: int, event: int, number: int) -> None:
    """Send a seat's node to repair, the number-th of this failure."""
    place = f.seat[seat]
    f.seat[seat] = -1
    f.empty[s.missing] = seat
    s.missing += 1
    if p.drop:
        replica = _replica(s, seat)
        s.replicas_lost += f.down[replica] == 0
        f.down[replica] += 1
    if p.shape != 1.0:
        f.due_s[seat] = math.inf
    lemon = 0
    slot = _NODES + number * _PER_NODE
    if place == 0:
        s.healthy -= 1
    else:
        last = f.lemon[s.lemons]
        s.lemons -= 1
        if last != seat:
            f.lemon[place], f.seat[last] = last, place
        lemon = int(uniform(s.key, event, slot + _MENDED) >= p.mended)
    takes = 1.0 if p.repair_shape == 0 else gamma(s.key, event, slot, p.repair_shape)
    heap_push(f.repair_s, f.repair_lemon, s.repairing, s.now_s + p.repair_s * takes, lemon)
    s.repairing += 1


@inlined
def collect(f: SimulatedFleet, s: State) -> None:
    """Make nodes whose repair has ended spares, as good as new."""
    while s.repairing and f.repair_s[0] <= s.now_s:
        f.spare_lemon[s.free], f.spare_born_s[s.free] = f.repair_lemon[0], f.repair_s[0]
        s.free += 1
        heap_pop(f.repair_s, f.repair_lemon, s.repairing)
        s.repairing -= 1


@compiled
def fill(p: Parameters, f: SimulatedFleet, s: State) -> None:
    """Give empty seats to spares, as far as there are any."""
    if not (s.missing and s.free):
        return
    while s.missing and s.free:
        s.missing -= 1
        s.free -= 1
        seat = f.empty[s.missing]
        _remember(f, s, seat)
        if p.drop:
            replica = _replica(s, seat)
            f.down[replica] -= 1
            s.replicas_lost -= f.down[replica] == 0
        if f.spare_lemon[s.free]:
            s.lemons += 1
            f.lemon[s.lemons], f.seat[seat] = seat, s.lemons
        else:
            s.healthy += 1
            f.seat[seat] = 0
        if p.shape != 1.0:
            f.born_s[seat] = f.spare_born_s[s.free]
            _will_fail(p, f, s, seat)
    rate = _rate(p, s)  # what is left until the next failure is stretched: the same, a little later
    s.next_s = s.now_s + (s.next_s - s.now_s) * (s.rate / rate)
    s.rate = rate


@compiled
def _replica(s: State, seat: int) -> int:
    return seat // s.live_part


@compiled
def _will_fail(p: Parameters, f: SimulatedFleet, s: State, seat: int) -> None:
    """Draw the time of the next failure of a seat's node, given its age (Weibull)."""
    scale_s = p.scale_s / (p.lemon_factor if f.seat[seat] > 0 else 1.0)
    age = (s.now_s - f.born_s[seat]) / scale_s
    drawn = exponential(s.key ^ _SALT, _AGES + s.drawn, 0)
    s.drawn += 1
    f.due_s[seat] = s.now_s + scale_s * ((age**p.shape + drawn) ** (1 / p.shape) - age)
    if s.ageing == 2 * p.nodes:  # at least half are of nodes that have left
        s.ageing = 0
        for k in range(2 * p.nodes):
            due_s = f.ageing_s[k]
            other = f.ageing_seat[k]
            if due_s == f.due_s[other]:
                heap_push(f.ageing_s, f.ageing_seat, s.ageing, due_s, other)
                s.ageing += 1
    heap_push(f.ageing_s, f.ageing_seat, s.ageing, f.due_s[seat], seat)
    s.ageing += 1
