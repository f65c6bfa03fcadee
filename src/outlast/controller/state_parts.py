"""Parts of the controller's state: each is written by one module alone.

tests/tidy/test_state_parts.py lists the owners, and finds every other write.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Self, cast

import msgspec

from outlast import events
from outlast.controller.inputs import EndRun, FindingKey
from outlast.controller.save_schedule.save_costs import RunMeasurements
from outlast.controller.save_schedule.save_intervals import Schedule
from outlast.transport import messages


class StatePart(msgspec.Struct, kw_only=True):
    """Base of the parts: tables may change in place, everything inside them is frozen."""

    def copy(self) -> Self:
        """Return a part of its own for one turn: tables and parts copied, frozen entries shared."""
        fresh = copy(self)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, dict):
                setattr(fresh, name, dict(cast("dict[Any, Any]", value)))
            elif isinstance(value, StatePart):
                setattr(fresh, name, value.copy())
        return fresh


class Term(StatePart, kw_only=True):
    """The controller's term, and what it takes over from the one before (run_start)."""

    number: int = 0
    fence_wait: tuple[str, ...] = ()  # agents of the old generation that have to report first
    old_seats: tuple[str, ...] = ()  # worker by seat when the earlier term ended
    joining: tuple[int, ...] = ()  # seats that held no state when the earlier term ended


class Saves(StatePart, kw_only=True):
    """Checkpoints of the run, and saves on request (checkpoint_tracking)."""

    checkpoint: messages.Checkpointed | None = None  # the copy that a restart begins from
    is_searched: bool = False  # copies have been read since a host was last lost
    searches: int = 0  # of the newest restart
    is_requested: bool = False  # the next generation that opens saves first
    requested_n: int = -1  # phases completed where a save was requested: the next one saves


class SaveIntervals(StatePart, kw_only=True):
    """Measured costs of saves, and the intervals that follow (interval_updates)."""

    measured: RunMeasurements = RunMeasurements()
    schedule: Schedule | None = None  # the newest; None: nothing to choose, or not all measured
    scheduled_ns: int = 0
    announced: tuple[str, int, int] = ("", 0, 0)  # seat 0's worker, and the intervals sent to it


class Findings(StatePart, kw_only=True):
    """Findings of node checks, and the moves of ranks for them (planned_migration)."""

    warned: dict[FindingKey, events.Warned] = {}  # found by node checks and not over
    calm: dict[str, int] = {}  # agent -> the generation in which its ranks were last seen to step
    moves: dict[FindingKey, tuple[str, int]] = {}  # of all terms: who was given up, and when
    unmoved: tuple[FindingKey, ...] = ()  # findings for which a note has said that no rank moves


class SharedValueInProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A shared value on its way: who makes it, until when, and who else waits for it."""

    maker: str
    until_ns: int
    askers: tuple[str, ...]


class SharedValues(StatePart, kw_only=True):
    """Values that pass through the controller (shared_values)."""

    stored: dict[str, bytes] = {}  # shared values, by name: the first one stays
    making: dict[str, SharedValueInProgress] = {}
    puts: dict[str, bytes] = {}  # rendezvous values of generation 0
    records: dict[int, bytes] = {}  # seat -> results of its set-up collectives
    schema: tuple[int, messages.StateProtected] | None = None  # of the first seat that reported


class Ending(StatePart, kw_only=True):
    """The requested or decided end of the run (run_ending)."""

    drain_reason: str = ""
    drain_ns: int = 0  # deadline of the drain; 0: none was requested
    result: EndRun | None = None  # set while the run stops, and after
