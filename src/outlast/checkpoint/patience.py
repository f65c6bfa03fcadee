"""Calls that a file system may never answer: made by threads that can be left behind."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from outlast.errors import StalledError

T = TypeVar("T")
ANSWER_S = 120.0  # a server of NFSv4 that was started anew answers nobody for 90 s
_LOOK_S = 1.0


class Hand(threading.Thread):
    """Does something that may hang. A daemon: no process waits for it at its end."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__(name="storage", daemon=True)
        self.given_up = False
        self.where = ""  # what it asks for
        self.error: BaseException | None = None
        self.ended: Callable[[Hand], None] = lambda _: None
        self._do = do
        self._lock = threading.Lock()
        self._answer_s = self._due = math.inf

    def run(self) -> None:
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - raised by `attend`, in the thread that waits
            self.error = error
        self.ended(self)

    @contextmanager
    def asking(self, where: str, answer_s: float) -> Iterator[None]:
        """Within, an answer about `where` is due after `answer_s`; behind it, what was due before
        is due as long again. StalledError where nobody waits for this thread any more."""
        before = self.where, self._answer_s
        self._ask(where, answer_s)
        try:
            yield
        finally:
            self._ask(*before)

    def give_up(self) -> StalledError | None:
        """Leave it behind, if its answer is overdue."""
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
                raise StalledError(f"{self.where}: was answered when nobody waited any more")
            self.where, self._answer_s = where, answer_s
            self._due = time.monotonic() + answer_s


def attend(hands: Sequence[Hand], hurry: Callable[[], None] = lambda: None) -> None:
    """Start them, and wait until each has ended, or was given up because it hangs.

    Raises the first error of any, StalledError for one that was given up: `hurry` is called when
    that is known, and is to let the others end.
    """
    ended: SimpleQueue[Hand] = SimpleQueue()
    left = set(hands)
    for hand in hands:
        hand.ended = ended.put
        hand.start()
    errors: list[BaseException] = []
    while left:
        try:
            hand = ended.get(timeout=_LOOK_S)
            found = {hand: hand.error}
        except Empty:
            found = {hand: error for hand in left if (error := hand.give_up())}
        except BaseException as error:  # noqa: BLE001 - Ctrl-C: raised once the others have ended
            found = {None: error}
        left -= found.keys()
        errors += filter(None, found.values())
        if errors:
            hurry()
    if errors:
        raise errors[0]


class Patience:
    """Makes calls to one file system, which has `answer_s` for each.

    One that is given up stays behind in its thread. Until that comes back, all others are refused
    at once: they would only pile up.
    """

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._asking: set[Hand] = set()

    def call(self, where: str, do: Callable[[], T]) -> T:
        """What `do` returns or raises. StalledError, which names `where`, when it is given up, or
        not even begun: what `do` was given may then be touched at any later time."""
        hand = threading.current_thread()
        if isinstance(hand, Hand):
            return self._ask(hand, where, do)
        answers: list[T] = []
        attend([Hand(lambda: answers.append(self.call(where, do)))])
        return answers[0]

    def _ask(self, hand: Hand, where: str, do: Callable[[], T]) -> T:
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


def elsewhere(each: Iterator[T]) -> Iterator[T]:
    """The same, from within a call: what making one takes is not the file system's."""
    hand = threading.current_thread()
    assert isinstance(hand, Hand)
    end = object()
    while True:
        with hand.asking(hand.where, math.inf):
            one = next(each, end)
        if one is end:
            return
        yield cast(T, one)
