"""Nodes of the narrated job: the kernel's failures and repairs, one by one.

The random numbers are those of `compiled_random` without Numba, whose import takes seconds; tests
compare both.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from outlast.events import FaultKind
from outlast.plan.simulate import simulated_job as kernel
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob

SLOTS = 1 << 16
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def key_of(seed: int, replication: int) -> int:
    """Return the random stream of one replication."""
    return _mixed((_mixed((seed + _GOLDEN) & _MASK) + replication * _GOLDEN) & _MASK)


def uniform(key: int, event: int, slot: int) -> float:
    """Return a number between 0 and 1, both excluded."""
    counter = event * SLOTS + slot + 1
    return ((_mixed((key + counter * _GOLDEN) & _MASK) >> 11) + 0.5) * 2.0**-53


def exponential(key: int, event: int, slot: int) -> float:
    """Return an exponential number with mean 1."""
    return -math.log(uniform(key, event, slot))


def gap(key: int, event: int, slot: int, spread: float) -> float:
    """Return a gap between two failures, with mean 1.

    Uniform within `spread` of the mean, or exponential if `spread` is negative.
    """
    if spread < 0:
        return exponential(key, event, slot)
    return 1 + spread * (2 * uniform(key, event, slot) - 1)


def gamma(key: int, event: int, slot: int, shape: float) -> float:
    """Return a gamma number with mean 1 and the given shape (1: exponential).

    By Marsaglia and Tsang 2000.
    """
    if shape == 1:
        return exponential(key, event, slot)
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    result = 1.0
    for slot_at in range(slot, slot + 192, 3):  # each succeeds with more than 95 %
        radius = math.sqrt(-2 * math.log(uniform(key, event, slot_at)))
        normal = radius * math.cos(2 * math.pi * uniform(key, event, slot_at + 1))
        v = (1 + c * normal) ** 3
        log_u = math.log(uniform(key, event, slot_at + 2))
        if v > 0 and log_u < 0.5 * normal * normal + d * (1 - v + math.log(v)):
            result = d * v
            break
    if shape < 1:
        result *= uniform(key, event, slot + 200) ** (1 / shape)
    return result / shape


# Salts of the kernel's random streams.
_SALT = 0xD6E8FEB86659FD93
_VICTIM_SALT = 0xA0761D6478BD642F


class NodeStrike(NamedTuple):
    """One failure.

    `source`: best state that survives for a restart. `lost_nodes`: seats whose node goes to repair,
    and that node. `crashed`: seats whose node continues. Neither: software.
    """

    source: int
    lost_nodes: tuple[tuple[int, int], ...] = ()
    crashed: tuple[int, ...] = ()
    kind: FaultKind | None = None  # None: by what is lost
    detect_s: float | None = None  # None: that of the job


class NarratedNodes:
    """Nodes of one replication. `missing`: seats without a node. The simulator sets `now_s`."""

    def __init__(self, job: SimulatedJob, seed: int, replication: int) -> None:
        node_count = job.nodes + job.spares
        self._job, self._key = job, key_of(seed, replication)
        self.now_s = 0.0
        self.failures = 0
        self.missing: list[int] = []
        self._nodes = list(range(job.nodes))  # by seat; -1: none
        self._spares = list(range(job.nodes, node_count))
        self._repairs: list[tuple[float, int]] = []
        self._born_s = [-job.age_s] * node_count
        self._due_s: dict[int, float] = {}  # by seat: time of its node's failure, if nodes age
        self._drawn = 0
        self._lost: list[int] = []  # seats whose part was lost in this window
        self._protected_s = 0.0  # end of the window: all parts have copies again
        self._lemons: set[int] = set()
        self._lemon_seats: list[int] = []  # of seats
        for k in range(round(job.lemons * node_count)):
            self._choose_lemon(
                int(uniform(self._key ^ _SALT, kernel.LEMON_EVENT, k) * node_count), node_count
            )
        if job.shape != 1:
            for seat in range(job.nodes):
                self._schedule_failure(seat)
        self._rate = self._failure_rate()
        self._next_s = self._draw_next_s()

    def _choose_lemon(self, node: int, node_count: int) -> None:
        while node in self._lemons:
            node = (node + 1) % node_count  # next node that is not a lemon yet
        self._lemons.add(node)
        if node < self._job.nodes:
            self._lemon_seats.append(node)

    # --- time ---

    def failure_s(self) -> float:
        """Return the time of the next failure."""
        aged_s = min(self._due_s.values(), default=math.inf)
        return min(self._next_s, max(self.now_s, aged_s))

    def next_repair_s(self) -> float:
        """Return the time of the next repair; infinity where no node is in repair."""
        return self._repairs[0][0] if self._repairs else math.inf

    def pass_waiting_time(self, waited_s: float) -> None:
        """Postpone failures by waiting time, in which nothing fails."""
        self._next_s += waited_s

    def begin_window(self) -> None:
        """Begin the window after a recovery, at whose end all parts have copies again."""
        self._protected_s = self.now_s + self._job.window_s

    def _node_rate(self) -> float:
        return self._job.node_rate if self._job.shape == 1 else 0.0

    def _failure_rate(self) -> float:
        """Return failures a second of everything that does not age."""
        job = self._job
        healthy = job.nodes - len(self.missing) - len(self._lemon_seats)
        other_rate = job.software_rate + job.rack_rate * math.ceil(job.nodes / job.rack_nodes)
        nodes_rate = self._node_rate() * (healthy + len(self._lemon_seats) * job.lemon_factor)
        return max(kernel.RATE_MIN, other_rate + nodes_rate)

    def _draw_next_s(self) -> float:
        drawn = gap(self._key, self.failures, kernel.GAP_SLOT, self._job.gap_spread)
        return self.now_s + drawn / self._rate

    # --- failures ---

    def strike(self) -> NodeStrike:
        """Apply the next failure, and return it."""
        if self.now_s >= self._protected_s:
            self._lost = list(self.missing)
        self._protected_s = math.inf  # until the job has recovered
        event = self.failures
        self.failures += 1
        seat = min(self._due_s, key=lambda each_seat: self._due_s[each_seat], default=-1)
        if seat >= 0 and self._due_s[seat] <= self.now_s:
            return self._fail_node(seat, event)
        failure = self._draw_failure(event)
        self._rate = self._failure_rate()
        self._next_s = self._draw_next_s()
        return failure

    def _draw_failure(self, event: int) -> NodeStrike:
        """Draw the failing node among those that do not age, in proportion to their rates."""
        job = self._job
        lemon_seats = self._lemon_seats
        excess = uniform(self._key, event, kernel.KIND_SLOT) * self._rate
        excess -= self._node_rate() * (job.nodes - len(self.missing) - len(lemon_seats))
        if excess < 0:
            return self._fail_node(self._draw_healthy_seat(event), event)
        draw = uniform(self._key ^ _VICTIM_SALT, event, 0)
        excess -= self._node_rate() * len(lemon_seats) * job.lemon_factor
        if excess < 0:
            return self._fail_node(lemon_seats[int(draw * len(lemon_seats))], event)
        if excess < job.software_rate:
            return NodeStrike(job.software_from)
        first = int(draw * math.ceil(job.nodes / job.rack_nodes)) * job.rack_nodes
        seats = range(first, min(first + job.rack_nodes, job.nodes))
        source = job.node_from
        taken = []
        for seat in seats:
            if self._nodes[seat] >= 0:
                source = max(source, self._lose_part(seat))
                taken.append((seat, self._send_to_repair(seat, event, seat - first)))
        return NodeStrike(source, tuple(taken))

    def _draw_healthy_seat(self, event: int) -> int:
        """Draw the seat of a node that is no lemon, uniformly."""
        attempt = 0
        while True:
            seat = int(uniform(self._key ^ _VICTIM_SALT, event, attempt) * self._job.nodes)
            if self._nodes[seat] >= 0 and self._nodes[seat] not in self._lemons:
                return seat
            attempt += 1

    def _fail_node(self, seat: int, event: int) -> NodeStrike:
        source = max(self._job.node_from, self._lose_part(seat))
        if uniform(self._key, event, kernel.STAY_SLOT) >= self._job.stay_share:
            return NodeStrike(source, ((seat, self._send_to_repair(seat, event, 0)),))
        if self._job.shape != 1:
            self._schedule_failure(seat)
        return NodeStrike(source, crashed=(seat,))

    def _lose_part(self, seat: int) -> int:
        """Lose the part of a seat; return the best remaining source."""
        self._lost.append(seat)
        job = self._job
        if (
            job.node_from == LIVE
            and self._count_lost(seat, job.nodes // job.replicas) < job.replicas
        ):
            return LIVE
        if job.copies and self._count_lost(seat, job.nodes // job.copies) < job.copies:
            return MEMORY
        return STORAGE

    def _count_lost(self, seat: int, stride: int) -> int:
        """Return the number of lost seats in this window with the same part as `seat`."""
        return len({other for other in self._lost if (other - seat) % stride == 0})

    def _send_to_repair(self, seat: int, event: int, number: int) -> int:
        """Send a seat's node to repair; `number` counts the nodes of this failure."""
        job = self._job
        node = self._nodes[seat]
        self._nodes[seat] = -1
        self.missing.append(seat)
        self._due_s.pop(seat, None)
        slot = kernel.NODE_SLOT + number * kernel.SLOTS_PER_NODE
        if node in self._lemons:
            place = self._lemon_seats.index(seat)
            moved = self._lemon_seats.pop()
            if moved != seat:
                self._lemon_seats[place] = moved
            if uniform(self._key, event, slot + kernel.CURE_SLOT) < job.cure_share:
                self._lemons.discard(node)
        shape = job.repair_shape
        repair_length = gamma(self._key, event, slot, shape) if shape else 1.0
        heapq.heappush(self._repairs, (self.now_s + job.repair_s * repair_length, node))
        return node

    def _schedule_failure(self, seat: int) -> None:
        """Draw the time of the next failure of a seat's node, given its age (Weibull)."""
        job = self._job
        node = self._nodes[seat]
        scale_s = job.scale_s / (job.lemon_factor if node in self._lemons else 1)
        age = (self.now_s - self._born_s[node]) / scale_s
        drawn = exponential(self._key ^ _SALT, kernel.AGE_EVENT + self._drawn, 0)
        self._drawn += 1
        left_s = scale_s * ((age**job.shape + drawn) ** (1 / job.shape) - age)
        self._due_s[seat] = self.now_s + left_s

    # --- repairs ---

    def collect_repaired(self) -> list[int]:
        """Return repaired nodes; they and other spares take the empty seats."""
        repaired: list[int] = []
        while self._repairs and self._repairs[0][0] <= self.now_s:
            time_s, node = heapq.heappop(self._repairs)
            self._born_s[node] = time_s
            self._spares.append(node)
            repaired.append(node)
        if self.missing and self._spares:
            self._fill()
        return repaired

    def _fill(self) -> None:
        while self.missing and self._spares:
            seat = self.missing.pop()
            node = self._spares.pop()
            self._nodes[seat] = node
            if node in self._lemons:
                self._lemon_seats.append(seat)
            if self._job.shape != 1:
                self._schedule_failure(seat)
        rate = self._failure_rate()  # scale the time until the next failure to the new rate
        self._next_s = self.now_s + (self._next_s - self.now_s) * (self._rate / rate)
        self._rate = rate
