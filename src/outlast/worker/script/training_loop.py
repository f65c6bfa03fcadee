"""The frames that hold the training loop: what its body touches, and what outlives a round."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from outlast.worker.script.bytecode import CodeFlow, iterated_names, names_of, reads_gradients
from outlast.worker.script.reachable_values import ReachableValues, ValueSpot
from outlast.worker.script.value_paths import Path, is_own_file, names_in, own_frames, root_of

_COUNTERS = {"enumerate", "zip", "islice", "count"}


class TrainingLoop:
    """The frame that holds the training loop: what its body touches."""

    def __init__(self, frame: types.FrameType) -> None:
        self._code, self.root = frame.f_code, root_of(frame)
        # Between two rounds, when phases run, a generator's frame is not on the stack.
        self.is_generator = bool(self._code.co_flags & inspect.CO_GENERATOR)
        flow = CodeFlow(self._code)
        self._offsets = flow.reachable(frame.f_lasti)
        self.counts = next(iter(iterated_names(self._code, frame.f_lasti) & _COUNTERS), "")
        stored = flow.stored(self._offsets)
        inner = ReachableValues(set())
        inner.add_code(self._code, frame.f_globals, self._offsets)
        self._add_locals(inner, frame, names_of(self._code, self._offsets).read)
        inner.walk()
        called = frozenset[str]().union(*(each.names.outer for each in inner.codes[1:]))
        self._live = flow.live_after(frame.f_lasti, called)
        self._rebound = stored & self._live
        self._without = frozenset((self.root, ("name", name)) for name in stored - self._live)
        self._before: dict[Path, ValueSpot] = {}
        self._counts: dict[Path, int] = {}
        self.looks = 0

    def reach(self, protected: set[int]) -> ReachableValues:
        """Everything that the loop's body can touch."""
        self.looks += 1
        reach = ReachableValues(protected, self._without)
        frame = next(f for f in own_frames() if f.f_code is self._code)
        reach.add_code(self._code, frame.f_globals, self._offsets)
        self._add_locals(reach, frame, self._live)
        reach.walk()
        return reach

    def reads_gradients(self, phases: AbstractSet[types.CodeType]) -> str:
        """Return the function that reads gradients between phases, "the loop" for its own body, ""
        where none does. `phases`: the code of what phases run."""
        if reads_gradients(self._code, self._offsets):
            return "the loop"
        frame = next(f for f in own_frames() if f.f_code is self._code)
        visited = set(phases)
        todo: list[tuple[types.CodeType, frozenset[int] | None]] = [(self._code, self._offsets)]
        while todo:
            code, offsets = todo.pop()
            for name in sorted(names_of(code, offsets).outer):
                found = frame.f_globals.get(name)
                if not isinstance(found, types.FunctionType) or found.__code__ in visited:
                    continue
                visited.add(found.__code__)
                if is_own_file(found.__code__.co_filename):
                    if reads_gradients(found.__code__):
                        return name
                    todo.append((found.__code__, None))
        return ""

    def _add_locals(
        self, reach: ReachableValues, frame: types.FrameType, names: AbstractSet[str]
    ) -> None:
        if self.root[0] == "frame":
            for name in sorted(names & names_in(frame)):
                reach.add((self.root, ("name", name)), frame.f_locals[name])

    def rebound(self, reach: ReachableValues) -> Iterator[tuple[Path, bool]]:
        """Names that the body binds anew and reads before that, in its next round."""
        for name in sorted(self._rebound):
            path = (self.root, ("name", name))
            if path in reach.spots and reach.spots[path].is_plain:
                yield path, False

    def changes(self, spots: dict[Path, ValueSpot]) -> list[tuple[Path, ValueSpot, ValueSpot]]:
        """Return what differs since the last call."""
        found = [
            (path, old, spots[path])
            for path, old in self._before.items()
            if path in spots and spots[path].look != old.look
        ]
        for path, _, _ in found:
            self._counts[path] = self._counts.get(path, 0) + 1
        self._before = spots
        return found

    def count(self, path: Path) -> int:
        """Return how often it has differed."""
        return self._counts[path]
