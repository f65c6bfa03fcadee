"""Actions of a controller that wait until its term is known to be the newest.

The journal is written by a thread: a file system that stands still must not stop the event loop,
which answers renewals of leases.

```
append ─► thread writes ─► read of the store that began later ─► actions behind the append
```
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from outlast import events
from outlast.controller import inputs
from outlast.errors import StorageError
from outlast.transport import messages

EXCUSED_S = 1.0  # a wait for the store that extends the deadlines of who has not been asked
END_S = 600.0  # the longest wait of the end of the run for the store
# What an overtaken controller would tell of nodes that it alone has lost, and all that follows.
_INCIDENT = (events.WorkerLost, events.Noticed, events.Decided)


class HeldActions:
    """Queue of actions behind appends to the journal, losses and decisions, and the run's end.

    `write` makes entries durable, in a thread; `ended` gets its error. `confirm` calls back after a
    read of the store that began later and found no newer term. If the end of the run waits for both
    for END_S, `ended` gets StorageError.
    """

    def __init__(
        self,
        confirm: Callable[[Callable[[], None]], None],
        do: Callable[[inputs.Action], None],
        ended: asyncio.Future[inputs.EndRun],
        write: Callable[[Sequence[inputs.JournalEntry]], None],
    ) -> None:
        self._write = write
        self._thread = ThreadPoolExecutor(1, "journal")
        self._is_writing = False
        # Behind a write, each with the time when it began to wait.
        self._queue: deque[tuple[float, list[inputs.JournalEntry] | inputs.Action]] = deque()
        self._confirm, self._do, self._ended = confirm, do, ended
        self._loop = asyncio.get_running_loop()
        # With the newest append before each, and when it began to wait.
        self._held: deque[tuple[int, float, inputs.Action]] = deque()
        self._excused_s = 0.0
        self._appended = self._confirmed = 0

    def append(self, entries: Sequence[inputs.JournalEntry]) -> None:
        """Make entries durable, and hold all further actions until a read that begins later."""
        self._queue.append((self._loop.time(), list(entries)))
        self._write_next()

    def do(self, action: inputs.Action) -> None:
        """Do an action, or hold it; actions keep their order."""
        if isinstance(action, inputs.EndRun):
            self._loop.call_later(END_S, self._give_up, action.outcome)
        if isinstance(action, inputs.Wake):
            self._do(action)
        elif self._is_writing or self._queue:
            self._queue.append((self._loop.time(), action))
        else:
            self._do_or_hold(self._loop.time(), action)

    def close(self, last: Callable[[], None]) -> None:
        """Do nothing more; call `last` in the thread, behind a write that is under way."""
        self._queue.clear()
        self._thread.submit(last)
        self._thread.shutdown(wait=False)

    def _write_next(self) -> None:
        """Do or hold what is queued, until the next write."""
        while self._queue and not self._is_writing:
            since_s, item = self._queue.popleft()
            if isinstance(item, list):
                self._is_writing = True
                written = self._loop.run_in_executor(self._thread, self._write, item)
                written.add_done_callback(self._on_written)
            else:
                self._do_or_hold(since_s, item)

    def _on_written(self, written: asyncio.Future[None]) -> None:
        self._is_writing = False
        if written.cancelled():
            return
        if error := written.exception():
            if not self._ended.done():
                self._ended.set_exception(error)
            return
        self._hold()
        self._write_next()

    def _hold(self) -> None:
        """Hold all further actions until a read that begins from now on."""
        self._appended += 1
        self._confirm(partial(self._release, self._appended))

    def _do_or_hold(self, since_s: float, action: inputs.Action) -> None:
        is_stop = isinstance(action, inputs.Send) and isinstance(action.body, messages.Stop)
        is_incident = isinstance(action, inputs.Emit) and isinstance(action.event, _INCIDENT)
        if is_stop or is_incident or isinstance(action, inputs.EndRun):
            self._hold()
        if self._appended > self._confirmed:
            self._held.append((self._appended, since_s, action))
        else:
            self._do(action)

    def _release(self, number: int) -> None:
        self._confirmed = number
        while self._held and self._held[0][0] <= number:
            self._do(self._held.popleft()[-1])

    def excuse_s(self) -> float:
        """Return for how long orders have waited since the last call, above EXCUSED_S; else 0."""
        now_s = self._loop.time()
        waiting = [self._held[0][1]] if self._held else [one for one, _ in self._queue]
        since_s = max(waiting[0], self._excused_s) if waiting else now_s
        if now_s - since_s < EXCUSED_S:
            return 0.0
        self._excused_s = now_s
        return now_s - since_s

    def _give_up(self, outcome: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(
                StorageError(
                    f"the run has come to its end ({outcome}), but its store of terms has not"
                    f" answered for {END_S:g} s, so that another node may have taken over; all"
                    " checkpoints are kept; make the store reachable (has the run directory"
                    " room?), and resume on all nodes with: outlast run --resume RUN_DIR"
                )
            )
