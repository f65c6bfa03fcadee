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
    AGE_EVENT,
    CURE_SLOT,
    GAP_SLOT,
    KIND_SLOT,
    LEMON_EVENT,
    LIVE,
    MEMORY,
    NODE_SLOT,
    RATE_MIN,
    SLOTS_PER_NODE,
    STAY_SLOT,
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
    """Remove the earliest entry of a heap of `size`."""
    last = size - 1
    time_s = times_s[last]
    number = numbers[last]
    at = 0
    below = 1
    while below < last:
        below += times_s[below + 1] < times_s[below]  # below + 1 may be `last`: harmless
        if times_s[below] >= time_s:
            break
        times_s[at], numbers[at] = times_s[below], numbers[below]
        at = below
        below = 2 * below + 1
    times_s[at], numbers[at] = time_s, number


_SALT = np.uint64(0xD6E8FEB86659FD93)  # of the stream of lemons and ages
_VICTIM_SALT = np.uint64(0xA0761D6478BD642F)  # of the stream that chooses the failing node


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
            _schedule_failure(p, f, s, seat)
    s.node_rate = p.node_rate if p.shape == 1.0 else 0.0
    s.other_rate = p.software_rate + p.rack_rate * _rack_count(p)
    s.rate = _failure_rate(p, s)
    s.next_s = gap(s.key, 0, GAP_SLOT, p.gap_spread) / s.rate


@inlined
def _choose_lemons(p: Parameters, f: SimulatedFleet, s: State) -> None:
    """Choose lemons among nodes in seats and spares."""
    s.lemons = 0
    node_count = p.nodes + p.spares
    for k in range(round(p.lemons * node_count)):
        node = int(uniform(s.key ^ _SALT, LEMON_EVENT, k) * node_count)
        while (f.seat[node] if node < p.nodes else f.spare_lemon[node - p.nodes]) > 0:
            node = (node + 1) % node_count  # next node that is not a lemon yet
        if node < p.nodes:
            s.lemons += 1
            f.lemon[s.lemons], f.seat[node] = node, s.lemons
        else:
            f.spare_lemon[node - p.nodes] = 1


@compiled
def _failure_rate(p: Parameters, s: State) -> float:
    """Return failures a second of everything that does not age."""
    return max(RATE_MIN, s.other_rate + s.node_rate * (s.healthy + s.lemons * p.lemon_factor))


@compiled
def _rack_count(p: Parameters) -> int:
    return math.ceil(p.nodes / p.rack_nodes)


@compiled
def next_failure_s(p: Parameters, f: SimulatedFleet, s: State) -> float:
    """Return the time of the next failure if no node is replaced before."""
    return s.next_s if p.shape == 1.0 else _next_aged_failure_s(f, s)


@inlined
def _next_aged_failure_s(f: SimulatedFleet, s: State) -> float:
    while s.ageing and f.ageing_s[0] != f.due_s[f.ageing_seat[0]]:
        heap_pop(f.ageing_s, f.ageing_seat, s.ageing)  # its node has left the seat
        s.ageing -= 1
    if not s.ageing:
        return s.next_s
    return min(s.next_s, max(s.now_s, f.ageing_s[0]))  # due during a wait: fails now


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
        return _fail_node(p, f, s, seat, event)
    source = _draw_failure(p, f, s, event)
    s.rate = _failure_rate(p, s)
    s.next_s = s.now_s + gap(s.key, event + 1, GAP_SLOT, p.gap_spread) / s.rate
    return source


@inlined
def _draw_failure(p: Parameters, f: SimulatedFleet, s: State, event: int) -> int:
    """Draw the failing node among those that do not age, in proportion to their rates."""
    excess = uniform(s.key, event, KIND_SLOT) * s.rate - s.node_rate * s.healthy
    if excess < 0:
        return _fail_node(p, f, s, _draw_healthy_seat(p, f, s, event), event)
    lemons_rate = s.node_rate * s.lemons * p.lemon_factor
    if excess < lemons_rate:
        which = 1 + int(uniform(s.key ^ _VICTIM_SALT, event, 0) * s.lemons)
        return _fail_node(p, f, s, f.lemon[which], event)
    if excess - lemons_rate < p.software_rate:
        return p.software_from
    first = int(uniform(s.key ^ _VICTIM_SALT, event, 0) * _rack_count(p)) * p.rack_nodes
    source = p.node_from
    for seat in range(first, min(first + p.rack_nodes, p.nodes)):
        if f.seat[seat] >= 0:
            source = max(source, _lose_part(p, f, s, seat))
            _send_to_repair(p, f, s, seat, event, seat - first)
    return source


@inlined
def _draw_healthy_seat(p: Parameters, f: SimulatedFleet, s: State, event: int) -> int:
    """Draw the seat of a healthy node, uniformly by rejection: most are healthy."""
    attempt = 0
    seat = int(uniform(s.key ^ _VICTIM_SALT, event, attempt) * p.nodes)
    while f.seat[seat] != 0:
        attempt += 1
        seat = int(uniform(s.key ^ _VICTIM_SALT, event, attempt) * p.nodes)
    return seat


@compiled
def _fail_node(p: Parameters, f: SimulatedFleet, s: State, seat: int, event: int) -> int:
    source = max(p.node_from, _lose_part(p, f, s, seat))
    if p.stay_share > 0 and uniform(s.key, event, STAY_SLOT) < p.stay_share:
        if p.shape != 1.0:
            _schedule_failure(p, f, s, seat)
    else:
        _send_to_repair(p, f, s, seat, event, 0)
    return source


@compiled
def _lose_part(p: Parameters, f: SimulatedFleet, s: State, seat: int) -> int:
    """Lose the part of a seat; return the best remaining source."""
    if f.lost[seat] == 0:
        _count_lost(p, f, s, seat, 1)
    _mark_recent(f, s, seat)
    if p.node_from == LIVE and f.live_lost[seat % s.live_part] < p.replicas:
        return LIVE
    if p.copies > 0 and f.copies_lost[seat % s.copies_part] < p.copies:
        return MEMORY
    return STORAGE


@inlined
def _protect(p: Parameters, f: SimulatedFleet, s: State) -> None:
    """End the window after a recovery: every seat with a node has its part and copies again."""
    for k in range(s.recent):
        seat = f.recent[k]
        f.lost[seat] = f.seat[seat] < 0
        if f.lost[seat] == 0:
            _count_lost(p, f, s, seat, -1)
    s.recent = 0


@compiled
def _mark_recent(f: SimulatedFleet, s: State, seat: int) -> None:
    """Add a seat whose part is lost to `recent`, once, for `_protect`."""
    if f.lost[seat] < 2:
        f.lost[seat] = 2
        f.recent[s.recent] = seat
        s.recent += 1


@compiled
def _count_lost(p: Parameters, f: SimulatedFleet, s: State, seat: int, change: int) -> None:
    """Add `change` to the counts of seats that have lost the part of `seat`."""
    if p.node_from == LIVE:
        f.live_lost[seat % s.live_part] += change
    if p.copies > 0:
        f.copies_lost[seat % s.copies_part] += change


@inlined
def _send_to_repair(
    p: Parameters, f: SimulatedFleet, s: State, seat: int, event: int, number: int
) -> None:
    """Send a seat's node to repair; `number` counts the nodes of this failure."""
    place = f.seat[seat]
    f.seat[seat] = -1
    f.empty[s.missing] = seat
    s.missing += 1
    if p.drop:
        replica = _replica_of(s, seat)
        s.replicas_lost += f.down[replica] == 0
        f.down[replica] += 1
    if p.shape != 1.0:
        f.due_s[seat] = math.inf
    lemon = 0
    slot = NODE_SLOT + number * SLOTS_PER_NODE
    if place == 0:
        s.healthy -= 1
    else:
        last = f.lemon[s.lemons]
        s.lemons -= 1
        if last != seat:
            f.lemon[place], f.seat[last] = last, place
        lemon = int(uniform(s.key, event, slot + CURE_SLOT) >= p.cure_share)
    repair_length = 1.0 if p.repair_shape == 0 else gamma(s.key, event, slot, p.repair_shape)
    heap_push(f.repair_s, f.repair_lemon, s.repairing, s.now_s + p.repair_s * repair_length, lemon)
    s.repairing += 1


@inlined
def collect_repaired(f: SimulatedFleet, s: State) -> None:
    """Make repaired nodes spares, whose age is 0."""
    while s.repairing and f.repair_s[0] <= s.now_s:
        f.spare_lemon[s.free], f.spare_born_s[s.free] = f.repair_lemon[0], f.repair_s[0]
        s.free += 1
        heap_pop(f.repair_s, f.repair_lemon, s.repairing)
        s.repairing -= 1


@compiled
def fill_seats(p: Parameters, f: SimulatedFleet, s: State) -> None:
    """Give empty seats to available spares."""
    if not (s.missing and s.free):
        return
    while s.missing and s.free:
        s.missing -= 1
        s.free -= 1
        seat = f.empty[s.missing]
        _mark_recent(f, s, seat)
        if p.drop:
            replica = _replica_of(s, seat)
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
            _schedule_failure(p, f, s, seat)
    rate = _failure_rate(p, s)  # scale the time until the next failure to the new rate
    s.next_s = s.now_s + (s.next_s - s.now_s) * (s.rate / rate)
    s.rate = rate


@compiled
def _replica_of(s: State, seat: int) -> int:
    return seat // s.live_part


@compiled
def _schedule_failure(p: Parameters, f: SimulatedFleet, s: State, seat: int) -> None:
    """Draw the time of the next failure of a seat's node, given its age (Weibull)."""
    scale_s = p.scale_s / (p.lemon_factor if f.seat[seat] > 0 else 1.0)
    age = (s.now_s - f.born_s[seat]) / scale_s
    drawn = exponential(s.key ^ _SALT, AGE_EVENT + s.drawn, 0)
    s.drawn += 1
    f.due_s[seat] = s.now_s + scale_s * ((age**p.shape + drawn) ** (1 / p.shape) - age)
    if s.ageing == 2 * p.nodes:  # full: at least half belong to nodes that have left
        s.ageing = 0
        for k in range(2 * p.nodes):
            due_s = f.ageing_s[k]
            other = f.ageing_seat[k]
            if due_s == f.due_s[other]:
                heap_push(f.ageing_s, f.ageing_seat, s.ageing, due_s, other)
                s.ageing += 1
    heap_push(f.ageing_s, f.ageing_seat, s.ageing, f.due_s[seat], seat)
    s.ageing += 1
