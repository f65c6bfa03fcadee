"""How far a job has come: what every seat has. What one rank alone has done is not committed."""

from __future__ import annotations

from typing import NamedTuple

from outlast.events import AnyEvent, Decided, GenerationOpened, PhaseDone, RunStarted


class Place(NamedTuple):
    """Phases completed, steps committed."""

    n: int = 0
    step: int = 0


class Reached:
    """The place that every seat has reached, while events go by (by time)."""

    def __init__(self) -> None:
        self._seats: dict[int, Place] = {}
        self._decided = Place()

    @property
    def place(self) -> Place:
        return min(self._seats.values(), default=Place())

    @property
    def n(self) -> int:
        return self.place.n

    @property
    def step(self) -> int:
        return self.place.step

    def take(self, event: AnyEvent) -> None:
        if isinstance(event, RunStarted):
            self._decided = Place(max(0, event.resumed_n), max(0, event.resumed_step))
            self._seats = dict.fromkeys(range(event.world), self._decided)
        elif isinstance(event, PhaseDone):
            if event.seat in self._seats:
                place = Place(event.n, event.step)
                self._seats[event.seat] = max(self._seats[event.seat], place)
        elif isinstance(event, Decided):
            if event.rung != "stop":  # who stops goes nowhere: with no survivor it would say 0
                self._decided = Place(event.n, event.step)
        elif isinstance(event, GenerationOpened):
            step = self._decided.step if self._decided.n == event.n else self.step
            self._seats = dict.fromkeys(self._seats, Place(event.n, step))
