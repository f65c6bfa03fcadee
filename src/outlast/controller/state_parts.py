"""Parts of the controller's state: each is written by one module alone.

tests/tidy/test_state_parts.py lists the owners, and finds every other write.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Self, cast

import msgspec

from outlast import events
from outlast.controller.inputs import FindingKey


class StatePart(msgspec.Struct, kw_only=True):
    """Base of the parts: tables may change in place, everything inside them is frozen."""

    def copy(self) -> Self:
        """Return a part of its own for one turn: tables copied, their entries shared."""
        fresh = copy(self)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, dict):
                setattr(fresh, name, dict(cast("dict[Any, Any]", value)))
        return fresh


class Findings(StatePart, kw_only=True):
    """Findings of node checks, and the moves of ranks for them (planned_migration)."""

    warned: dict[FindingKey, events.Warned] = {}  # found by node checks and not over
    calm: dict[str, int] = {}  # agent -> the generation in which its ranks were last seen to step
    moves: dict[FindingKey, tuple[str, int]] = {}  # of all terms: who was given up, and when
    unmoved: tuple[FindingKey, ...] = ()  # findings for which a note has said that no rank moves
