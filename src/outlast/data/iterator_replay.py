"""Replay of an iterator with the random draws that it made before.

Under torchrun a loader draws from the same generators as the model, between the model's draws.
Outlast's loader does the same. A replay records the generator states that the iterator found
wherever other code had moved a generator since the iterator's last draw, and only there: a
generator that no other code moves costs one state, whatever the iterator's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from outlast import random_state
from outlast.errors import UsageError

_STATES_MAX = 1000
_PROCESS = "process/"
_NAMED = "the process's "


class IteratorReplay:
    """The generator states that an iterator found at its draws, by the number of the draw.

    `owned`: generators besides those of the process, which count unless `process` is False.
    """

    def __init__(
        self, owned: Mapping[str, random_state.Generator], *, process: bool = True
    ) -> None:
        self._owned, self._process = owned, process
        self.draws = 0
        self._recorded: list[tuple[int, dict[str, Any]]] = []
        self._reached: dict[str, Any] = random_state.states(owned)  # the states after a replay
        self._states = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Record the draws of the iterator, which runs inside."""
        before = self._all()
        try:
            yield
        finally:
            self._note(before, self._all())
            self.draws += 1

    def _all(self) -> dict[str, Any]:
        states = random_state.states(self._owned)
        return states | {_PROCESS + name: s for name, s in random_state.snapshot().items()}

    def _note(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        moved = {}
        for name, state in before.items():
            if random_state.same(state, after.get(name)):
                continue
            if not random_state.same(state, self._reached.get(name)):
                moved[name] = state
            self._reached[name] = after[name]
        if moved:
            self._recorded.append((self.draws, moved))
            self._states += len(moved)
        if self._states > _STATES_MAX:
            names = ", ".join(sorted(moved)).replace(_PROCESS, _NAMED)
            raise UsageError(
                f"the loader and the rest of the script draw from the same generators in turn, more"
                f" than {_STATES_MAX} times: more than can be kept for a worker that takes this"
                f" seat ({names}); draw in the loader from a generator of its"
                " own (self.rng = random.Random(seed), or torch.Generator), or set num_workers > 0"
            )

    def leads_to(self, name: str, state: Any) -> bool:
        """Return whether a replay leaves an owned generator in this state."""
        return name in self._reached and random_state.same(self._reached[name], state)

    def saved(self) -> dict[str, Any]:
        """Return the recorded states as plain data."""
        return {"draws": self.draws, "found": list(self._recorded)}

    def follow(self, saved: Mapping[str, Any], draw: Callable[[], None]) -> None:
        """Call `draw` as often as recorded, each time from the recorded states.

        The process's generators are restored afterwards.
        """
        found = dict(saved["found"])
        with random_state.preserved():
            for number in range(saved["draws"]):
                self._place(found.get(number, {}))
                with self.drawing():
                    draw()

    def _place(self, states: Mapping[str, Any]) -> None:
        process = len(_PROCESS)
        random_state.restore({n[process:]: s for n, s in states.items() if n.startswith(_PROCESS)})
        random_state.restore_state(self._owned, states)
