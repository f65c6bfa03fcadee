"""Incidents: cause, detection, decision, reason and cost.

An incident begins when a failure is noticed and ends when every seat has committed the phase that
was interrupted. Failures that come before the next generation opens belong to the same incident.
"""

from __future__ import annotations

from outlast.events import (
    AnyEvent,
    Noticed,
    RunEnded,
    RunStarted,
)
from outlast.telemetry.history.incident_course import Incident, IncidentCourse, StateBefore


class Tracker:
    """Incremental reader of incidents, from events in the order of `read_events` or nearly so."""

    def __init__(self) -> None:
        self._courses: list[IncidentCourse] = []
        self.current: IncidentCourse | None = None
        self.before = StateBefore()

    def take(self, event: AnyEvent) -> None:
        """Update the incidents with the next event of the run."""
        current = self.current
        if isinstance(event, RunStarted):
            if current is not None and current.state == "open":
                current.state = "died"
            current = None
        elif isinstance(event, Noticed) and (current is None or current.opened is not None):
            if current is not None and current.state == "open":
                current.break_off(event)
            current = IncidentCourse(len(self._courses) + 1, event, self.before)
            self._courses.append(current)
        elif isinstance(event, RunEnded) and current is not None:
            if current.state == "open":
                current.stop(event)
            current = None
        if current is not None and current.state == "open":
            current.take(event)
        self.current = current
        self.before.take(event)

    def found(self, newest: int | None = None) -> list[Incident]:
        """Return the incidents so far, or the `newest` few of them."""
        chosen = self._courses if newest is None else self._courses[-newest:]
        return [course.result() for course in chosen]

    @property
    def count(self) -> int:
        """Number of incidents so far."""
        return len(self._courses)
