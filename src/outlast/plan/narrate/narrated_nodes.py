"""Nodes of the narrated job: the kernel's failures and repairs, one by one."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

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
    found = 1.0
    for at in range(slot, slot + 192, 3):  # each succeeds with more than 95 %
        radius = math.sqrt(-2 * math.log(uniform(key, event, at)))
        normal = radius * math.cos(2 * math.pi * uniform(key, event, at + 1))
        v = (1 + c * normal) ** 3
        log_u = math.log(uniform(key, event, at + 2))
        if v > 0 and log_u < 0.5 * normal * normal + d * (1 - v + math.log(v)):
            found = d * v
            break
    if shape < 1:
        found *= uniform(key, event, slot + 200) ** (1 / shape)
    return found / shape


# Where the kernel draws what.
_SALT = 0xD6E8FEB86659FD93
_WHOSE = 0xA0761D6478BD642F
_LEMONS = 1
_AGES = 2
_KIND = 0
_KEPT = 1
_NEXT = 2
_NODES = 3
_PER_NODE = 512
_MENDED = 400
_NEVER = 1e-300  # a rate of 0 would forget what was drawn


class NodeStrike(NamedTuple):
    """One failure.

    `source`: best state that survives for a restart. `lost_nodes`: seats whose node goes to repair,
    and that node. `crashed`: seats whose node continues. Neither: software.
    """

    source: int
    lost_nodes: tuple[tuple[int, int], ...] = ()
    crashed: tuple[int, ...] = ()


class NarratedNodes:
    """Nodes of one replication. `missing`: seats without a node. The simulator sets `now_s`."""

    def __init__(self, job: SimulatedJob, seed: int, replication: int) -> None:
        every = job.nodes + job.spares
        self._job, self._key = job, key_of(seed, replication)
        self.now_s = 0.0
        self.failures = 0
        self.missing: list[int] = []
        self._nodes = list(range(job.nodes))  # by seat; -1: nobody
        self._spares = list(range(job.nodes, every))
        self._repairs: list[tuple[float, int]] = []
        self._born_s = [-job.age_s] * every
        self._due_s: dict[int, float] = {}  # by seat: when its node fails, if nodes age
        self._drawn = 0
        self._lost: list[int] = []  # seats whose part was lost since all was protected
        self._protected_s = 0.0  # and when that is
        self._lemons: set[int] = set()
        self._sour: list[int] = []  # seats with a lemon
        for k in range(round(job.lemons * every)):
            self._choose_lemon(int(uniform(self._key ^ _SALT, _LEMONS, k) * every), every)
        if job.shape != 1:
            for seat in range(job.nodes):
                self._will_fail(seat)
        self._rate = self._rate_now()
        self._next_s = self._drawn_next_s()

    def _choose_lemon(self, node: int, every: int) -> None:
        while node in self._lemons:
            node = (node + 1) % every  # the next one that is none yet
        self._lemons.add(node)
        if node < self._job.nodes:
            self._sour.append(node)

    # --- when ---

    def failure_s(self) -> float:
        """Return the time of the next failure."""
        aged_s = min(self._due_s.values(), default=math.inf)
        return min(self._next_s, max(self.now_s, aged_s))

    def back_s(self) -> float:
        """Return the time of the next repair; infinity where no node is in repair."""
        return self._repairs[0][0] if self._repairs else math.inf

    def wait(self, waited_s: float) -> None:
        """Pass waiting time, in which failures come no nearer."""
        self._next_s += waited_s

    def recovered(self) -> None:
        """Note that the job runs: everything has copies again a window later."""
        self._protected_s = self.now_s + self._job.window_s

    def _node_rate(self) -> float:
        return self._job.node_rate if self._job.shape == 1 else 0.0

    def _rate_now(self) -> float:
        """Return failures a second of everything that does not age."""
        job = self._job
        healthy = job.nodes - len(self.missing) - len(self._sour)
        others = job.software_rate + job.rack_rate * math.ceil(job.nodes / job.rack_nodes)
        nodes_rate = self._node_rate() * (healthy + len(self._sour) * job.lemon_factor)
        return max(_NEVER, others + nodes_rate)

    def _drawn_next_s(self) -> float:
        drawn = gap(self._key, self.failures, _NEXT, self._job.gap_spread)
        return self.now_s + drawn / self._rate

    # --- failures ---

    def strike(self) -> NodeStrike:
        """Apply the next failure, and return it."""
        if self.now_s >= self._protected_s:
            self._lost = list(self.missing)
        self._protected_s = math.inf  # until the job has recovered
        event = self.failures
        self.failures += 1
        seat = min(self._due_s, key=lambda one: self._due_s[one], default=-1)
        if seat >= 0 and self._due_s[seat] <= self.now_s:
            return self._node_fails(seat, event)
        blow = self._any_fails(event)
        self._rate = self._rate_now()
        self._next_s = self._drawn_next_s()
        return blow

    def _any_fails(self, event: int) -> NodeStrike:
        """Draw the failing node among those that do not age, in proportion to their rates."""
        job = self._job
        sour = self._sour
        rest = uniform(self._key, event, _KIND) * self._rate
        rest -= self._node_rate() * (job.nodes - len(self.missing) - len(sour))
        if rest < 0:
            return self._node_fails(self._healthy(event), event)
        whose = uniform(self._key ^ _WHOSE, event, 0)
        rest -= self._node_rate() * len(sour) * job.lemon_factor
        if rest < 0:
            return self._node_fails(sour[int(whose * len(sour))], event)
        if rest < job.software_rate:
            return NodeStrike(job.software_from)
        first = int(whose * math.ceil(job.nodes / job.rack_nodes)) * job.rack_nodes
        seats = range(first, min(first + job.rack_nodes, job.nodes))
        source = job.node_from
        taken = []
        for seat in seats:
            if self._nodes[seat] >= 0:
                source = max(source, self._loses(seat))
                taken.append((seat, self._leave(seat, event, seat - first)))
        return NodeStrike(source, tuple(taken))

    def _healthy(self, event: int) -> int:
        """Draw the seat of a node that is no lemon, uniformly."""
        turn = 0
        while True:
            seat = int(uniform(self._key ^ _WHOSE, event, turn) * self._job.nodes)
            if self._nodes[seat] >= 0 and self._nodes[seat] not in self._lemons:
                return seat
            turn += 1

    def _node_fails(self, seat: int, event: int) -> NodeStrike:
        source = max(self._job.node_from, self._loses(seat))
        if uniform(self._key, event, _KEPT) >= self._job.kept:
            return NodeStrike(source, ((seat, self._leave(seat, event, 0)),))
        if self._job.shape != 1:
            self._will_fail(seat)
        return NodeStrike(source, crashed=(seat,))

    def _loses(self, seat: int) -> int:
        """Lose the part of a seat; return the best remaining source."""
        self._lost.append(seat)
        job = self._job
        if job.node_from == LIVE and self._alike(seat, job.nodes // job.replicas) < job.replicas:
            return LIVE
        if job.copies and self._alike(seat, job.nodes // job.copies) < job.copies:
            return MEMORY
        return STORAGE

    def _alike(self, seat: int, part: int) -> int:
        """Return the number of lost seats with the same part as `seat` since all was protected."""
        return len({other for other in self._lost if (other - seat) % part == 0})

    def _leave(self, seat: int, event: int, number: int) -> int:
        """Send a seat's node to repair, the number-th of this failure."""
        job = self._job
        node = self._nodes[seat]
        self._nodes[seat] = -1
        self.missing.append(seat)
        self._due_s.pop(seat, None)
        slot = _NODES + number * _PER_NODE
        if node in self._lemons:
            place = self._sour.index(seat)
            last = self._sour.pop()
            if last != seat:
                self._sour[place] = last
            if uniform(self._key, event, slot + _MENDED) < job.mended:
                self._lemons.discard(node)
        shape = job.repair_shape
        takes = gamma(self._key, event, slot, shape) if shape else 1.0
        heapq.heappush(self._repairs, (self.now_s + job.repair_s * takes, node))
        return node

    def _will_fail(self, seat: int) -> None:
        """Draw the time of the next failure of a seat's node, given its age (Weibull)."""
        job = self._job
        node = self._nodes[seat]
        scale_s = job.scale_s / (job.lemon_factor if node in self._lemons else 1)
        age = (self.now_s - self._born_s[node]) / scale_s
        drawn = exponential(self._key ^ _SALT, _AGES + self._drawn, 0)
        self._drawn += 1
        left_s = scale_s * ((age**job.shape + drawn) ** (1 / job.shape) - age)
        self._due_s[seat] = self.now_s + left_s

    # --- repairs ---

    def collect(self) -> list[int]:
        """Return repaired nodes; they and other spares take the empty seats."""
        back: list[int] = []
        while self._repairs and self._repairs[0][0] <= self.now_s:
            time_s, node = heapq.heappop(self._repairs)
            self._born_s[node] = time_s
            self._spares.append(node)
            back.append(node)
        if self.missing and self._spares:
            self._fill()
        return back

    def _fill(self) -> None:
        while self.missing and self._spares:
            seat = self.missing.pop()
            node = self._spares.pop()
            self._nodes[seat] = node
            if node in self._lemons:
                self._sour.append(seat)
            if self._job.shape != 1:
                self._will_fail(seat)
        rate = self._rate_now()  # what is left until the next failure is stretched
        self._next_s = self.now_s + (self._next_s - self.now_s) * (self._rate / rate)
        self._rate = rate
