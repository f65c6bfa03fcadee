"""How often nodes fail: by node (lemons), by cause, and in the course of time."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate, pairwise

import numpy as np

from outlast.fleet.synth.shapes import Shape

DAY_S = 86400.0
AWAY_DAYS = 0.38  # the mean time that a node is away after a failure (outages.py)


class Pace:
    """Nodes fail at `rates` (per second of running jobs), times what the day has.

    `rates[node]` is the same all the time; causes ebb and flow in episodes, whose factors average
    to 1 over the window, days of which are numbered from its begin; before it day 0 goes on.
    """

    def __init__(self, shape: Shape, days: float, lemons: dict[int, float]) -> None:
        self.rates = _rates(shape, lemons)
        factors = _factors(shape, max(1, int(np.ceil(days))))
        shares = np.array([cause.share for cause in shape.causes])
        by_day = factors @ shares
        self._weights = (factors * shares / by_day[:, None]).tolist()
        self._plain = not shape.episodes
        speeds = [1.0 if self._plain else float(speed) for speed in by_day]
        self._speeds = speeds
        self._ages = [0.0, *accumulate(DAY_S * speed for speed in speeds)]

    def age(self, t_s: float) -> float:
        """Seconds at the mean pace that have passed at `t_s`: what exposure is counted in."""
        if self._plain:
            return t_s
        day = min(max(int(t_s // DAY_S), 0), len(self._speeds) - 1)
        return self._ages[day] + (t_s - day * DAY_S) * self._speeds[day]

    def when(self, age: float) -> float:
        """The time at which it is `age`."""
        if self._plain:
            return age
        day = min(max(bisect_right(self._ages, age) - 1, 0), len(self._speeds) - 1)
        return day * DAY_S + (age - self._ages[day]) / self._speeds[day]

    def cause(self, t_s: float, rng: random.Random) -> int:
        """Which of the shape's causes strikes at `t_s`."""
        day = min(max(int(t_s // DAY_S), 0), len(self._weights) - 1)
        weights = self._weights[day]
        return rng.choices(range(len(weights)), weights)[0]


def lemons(shape: Shape, rng: np.random.Generator) -> dict[int, float]:
    """Which nodes are lemons, and how many times the fleet's rate they fail. So many that they do
    not fail more often than all nodes should together."""
    low, high = shape.lemon_factors
    many = min(round(shape.lemon_share * shape.nodes), int(0.95 * shape.nodes / high))
    chosen = np.sort(rng.choice(shape.nodes, many, replace=False)).tolist()
    return dict(zip(chosen, rng.uniform(low, high, many).tolist(), strict=True))


def _rates(shape: Shape, lemons: dict[int, float]) -> np.ndarray:
    """Such that nodes at work fail at r_f in the mean, lemons being away more than others."""
    present = {node: 1 / (1 + factor * shape.r_f * AWAY_DAYS) for node, factor in lemons.items()}
    at_work = shape.nodes - len(lemons) + sum(present.values())
    taken = sum(factor * present[node] for node, factor in lemons.items())
    plain = shape.r_f * max(0.0, at_work - taken) / (shape.nodes - len(lemons))
    rates = np.full(shape.nodes, plain)
    for node, factor in lemons.items():
        rates[node] = factor * shape.r_f
    return rates / DAY_S


def _factors(shape: Shape, days: int) -> np.ndarray:
    """By day and cause; the mean over the days is 1 for each cause."""
    edges = np.arange(days + 1) / days
    factors = np.ones((days, len(shape.causes)))
    for column, cause in enumerate(shape.causes):
        for episode in shape.episodes:
            if episode.symptom == cause.symptom:
                inside = [
                    high > episode.since and low < episode.until for low, high in pairwise(edges)
                ]
                factors[inside, column] *= episode.factor
        factors[:, column] /= factors[:, column].mean()
    return factors
