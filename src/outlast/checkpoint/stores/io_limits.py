"""Limits of I/O: timeouts of calls that may never return, and byte rates of copies."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import TypeVar, cast

from outlast.errors import StalledError, StorageError

T = TypeVar("T")
ANSWER_S = 120.0  # a restarted NFSv4 server does not answer for 90 s
_LOOK_S = 1.0


class IoThread(threading.Thread):
    """A thread for calls that may hang; a daemon, so that no process waits for it."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__(name="storage", daemon=True)
        self.given_up = False
        self.where = ""  # the path or directory of the call
        self.error: BaseException | None = None
        self.ended: Callable[[IoThread], None] = lambda _: None
        self._do = do
        self._lock = threading.Lock()
        self._answer_s = self._due = math.inf

    def run(self) -> None:
        """Run the call and keep its error for the thread that waits."""
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - raised by `attend`, in the thread that waits
            self.error = error
        self.ended(self)

    @contextmanager
    def asking(self, where: str, answer_s: float) -> Iterator[None]:
        """Within, an answer about `where` is due after `answer_s`; then the old deadline restarts.

        Raises StalledError where this thread was given up.
        """
        before = self.where, self._answer_s
        self._ask(where, answer_s)
        try:
            yield
        finally:
            self._ask(*before)

    def give_up(self) -> StalledError | None:
        """Abandon the thread if its answer is overdue; return the error, else None."""
        with self._lock:
            if time.monotonic() < self._due:
                return None
            self.given_up = True
        return StalledError(
            f"{self.where}: the file system has not answered for {self._answer_s:g} s; see to its"
            " server or its mount, then try again"
        )

    def _ask(self, where: str, answer_s: float) -> None:
        with self._lock:
            if self.given_up:
                raise StalledError(f"{self.where}: answered after its caller had given up")
            self.where, self._answer_s = where, answer_s
            self._due = time.monotonic() + answer_s


def await_thread(hands: Sequence[IoThread], hurry: Callable[[], None] = lambda: None) -> None:
    """Start threads, and wait until each has ended, or was given up because it hangs.

    Raises the first error of any, StalledError for one that was given up. `hurry` is called after
    the first error; it should make the others end.
    """
    ended: SimpleQueue[IoThread] = SimpleQueue()
    running = set(hands)
    for hand in hands:
        hand.ended = ended.put
        hand.start()
    errors: list[BaseException] = []
    while running:
        try:
            hand = ended.get(timeout=_LOOK_S)
            found = {hand: hand.error}
        except Empty:
            found = {hand: error for hand in running if (error := hand.give_up())}
        except BaseException as error:  # noqa: BLE001 - Ctrl-C: raised once the others have ended
            found = {None: error}
        running -= found.keys()
        errors += filter(None, found.values())
        if errors:
            hurry()
    if errors:
        raise errors[0]


class IoTimeout:
    """Timeout of calls to one file system: `answer_s` for each.

    A call that is given up stays behind in its thread. Until it returns, all other calls are
    refused at once: they would only pile up.
    """

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._asking: set[IoThread] = set()

    def call(self, where: str, do: Callable[[], T]) -> T:
        """Return the result of `do`, or raise its error.

        Raises StalledError, which names `where`, when the call is given up or was not begun.
        Arguments of an abandoned call may be modified at any later time.
        """
        hand = threading.current_thread()
        if isinstance(hand, IoThread):
            return self._ask(hand, where, do)
        answers: list[T] = []
        await_thread([IoThread(lambda: answers.append(self.call(where, do)))])
        return answers[0]

    def _ask(self, hand: IoThread, where: str, do: Callable[[], T]) -> T:
        with self._lock:
            owed = [hand.where for hand in self._asking if hand.given_up]
            if not owed:
                self._asking.add(hand)
        if owed:
            raise StalledError(
                f"{where}: was not tried: the file system still owes an answer about {owed[0]};"
                " see to its server or its mount, then try again"
            )
        try:
            with hand.asking(where, self._answer_s):
                return do()
        finally:
            with self._lock:
                self._asking.discard(hand)


def call_in_thread(each: Iterator[T]) -> Iterator[T]:
    """Yield the items of `each`, whose production does not count against the timeout."""
    hand = threading.current_thread()
    assert isinstance(hand, IoThread)
    end = object()
    while True:
        with hand.asking(hand.where, math.inf):
            one = next(each, end)
        if one is end:
            return
        yield cast(T, one)


_BURST_S = 0.25
_RATE_CHECK_S = 0.1


class RateLimiter:
    """A limit in bytes a second (None: none), and an end that may come at any time.

    `stop` is set by the caller to end the copy; `end` is called when another thread has failed.
    """

    def __init__(self, limit_bytes_per_s: float | None, stop: Event) -> None:
        self._limit = limit_bytes_per_s
        self._stop = stop
        self._ended = Event()
        self._free_at = time.monotonic()
        self._lock = Lock()

    def spend(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may move. Raises StorageError once the copy is to end."""
        until = self._booked(size_bytes)
        while not (self._stop.is_set() or self._ended.is_set()):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            self._ended.wait(min(left_s, _RATE_CHECK_S))
        raise StorageError("the copy was stopped; what it has sent is used by the next one")

    def end(self) -> None:
        """Make every thread that calls `spend` end."""
        self._ended.set()

    def _booked(self, size_bytes: int) -> float:
        """Return the monotonic time from which they may move; unused rate is kept for _BURST_S."""
        if not self._limit:
            return 0.0
        with self._lock:
            earliest = time.monotonic() - _BURST_S
            self._free_at = max(self._free_at, earliest) + size_bytes / self._limit
            return self._free_at
