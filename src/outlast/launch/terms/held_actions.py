"""Actions of a controller that wait until its term is known to be the newest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from outlast.controller import inputs
from outlast.transport import messages


class HeldActions:
    """Queue of actions behind appends to the journal, and behind the end of the run.

    `confirm` calls back after a read of the store that began later and found no newer term.
    """

    def __init__(
        self, confirm: Callable[[Callable[[], None]], None], do: Callable[[inputs.Action], None]
    ) -> None:
        self._confirm, self._do = confirm, do
        self._held: deque[tuple[int, inputs.Action]] = deque()  # with the newest append before it
        self._appended = self._confirmed = 0

    def appended(self) -> None:
        """Hold all further actions until a read that begins from now on."""
        self._appended += 1
        self._confirm(partial(self._release, self._appended))

    def do(self, action: inputs.Action) -> None:
        """Do an action, or hold it; actions keep their order."""
        is_stop = isinstance(action, inputs.Send) and isinstance(action.body, messages.Stop)
        if is_stop or isinstance(action, inputs.EndRun):
            self.appended()
        if self._appended > self._confirmed and not isinstance(action, inputs.Wake):
            self._held.append((self._appended, action))
        else:
            self._do(action)

    def _release(self, number: int) -> None:
        self._confirmed = number
        while self._held and self._held[0][0] <= number:
            self._do(self._held.popleft()[1])
