"""Own times of simulated ranks, one of which may be slow."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from outlast.transport.worker_page import OwnTimeRecord

_ATTEMPT_S = (0.1, 0.25)
_RECORDS_MAX = 64


PaceKind = Literal[
    "even",
    "lasting",  # ranks differ by a few percent, always
    "uneven",  # their work differs from step to step
    "turns",  # each is the slowest one in turn
    "pauses",  # garbage collections
    "saves",  # rank 0 is slow behind some steps
    "epochs",  # the last step of an epoch is short, the first one long
    "warm-up",  # one rank is slow in its first steps
    "trend",  # all ranks slow down
]


class OddPace(NamedTuple):
    """Lengths of attempts in a run in which no rank is slow; `noise`: of each, as a share."""

    kind: PaceKind
    noise: float
    world: int

    def attempt_s(self, dice: random.Random, seat: int, n: int) -> float:
        """Draw the length of an attempt at phase n."""
        factor = 1.0
        match self.kind:
            case "lasting":
                factor = 0.97 + 0.06 * seat / self.world
            case "uneven":
                factor = 1 + dice.gauss(0, 0.3)
            case "turns":
                factor = 1.5 if n % self.world == seat else 1.0
            case "pauses":
                factor += dice.uniform(0.1, 2.0) if dice.random() < 0.01 else 0.0
            case "saves":
                factor = 1.6 if seat == 0 and n % 40 < 3 else 1.0
            case "epochs":
                factor = {0: 0.4, 1: 1.5}.get(n % 50, 1.0)
            case "warm-up":
                factor = 10 / n if seat == self.world - 1 and n <= 6 else 1.0
            case "trend":
                factor = 1 + n / 100
            case "even":
                pass
        factor *= 1 + dice.gauss(0, self.noise)
        return sum(_ATTEMPT_S) / 2 * max(0.3, factor)


class SlowRank(NamedTuple):
    """A rank that is slow from a phase on: in the worker that has it then, or, if it has more
    work, in every one."""

    seat: int
    since_n: int
    factor: float
    has_more_work: bool = False


class SimPace:
    """Own times of one simulated worker, as its page has them."""

    def __init__(self) -> None:
        self.records: list[OwnTimeRecord] = []
        self._sums = OwnTimeRecord()
        self._begun_s = self._voted_s = 0.0
        self._completed_s = -1.0  # when the newest phase was complete, in this generation
        self._generation = 0
        self._slow: bool | None = None  # None: the phase from which on a worker is slow is to come

    def begin(
        self, now_s: float, seat: int, n: int, slow: SlowRank | None, names: set[str], name: str
    ) -> tuple[float, float]:
        """Begin an attempt; return the bounds of its length. `names`: the worker that is slow."""
        self._begun_s = now_s
        low_s, high_s = _ATTEMPT_S
        if slow is None or seat != slow.seat or n < slow.since_n:
            return low_s, high_s
        if not (names or slow.has_more_work):
            names.add(name)
        factor = slow.factor if slow.has_more_work or name in names else 1.0
        return factor * low_s, factor * high_s

    def vote(self, now_s: float) -> None:
        """Record the vote."""
        self._voted_s = now_s

    def complete(self, now_s: float, generation: int, n: int) -> None:
        """Record that phase n is complete."""
        if generation == self._generation and self._completed_s >= 0:
            sums = self._sums
            self._sums = OwnTimeRecord(
                generation=generation,
                step=n,
                steps=sums.steps + 1,
                step_us=sums.step_us + int(1e6 * (now_s - self._completed_s)),
                own_us=sums.own_us + int(1e6 * (self._voted_s - self._begun_s)),
            )
            self.records = [*self.records, self._sums][-_RECORDS_MAX:]
        self._generation, self._completed_s = generation, now_s

    def take(self) -> tuple[OwnTimeRecord, ...]:
        """Return the records since the last call."""
        taken, self.records = tuple(self.records), []
        return taken
