"""Copies of checkpoints from a store to the next one, in passes or continuously."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, uncommitted, verify
from outlast.checkpoint.stores.chunk_reader import RateLimiter
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.checkpoint_copy import CopyResult, copy_checkpoint
from outlast.checkpoint.upkeep.durable_targets import SaveInterval, wanted_checkpoints
from outlast.checkpoint.upkeep.retention_policy import Keep, known_checkpoints, prune_store
from outlast.errors import OutlastError


class CheckpointClock:
    """Unix time that ignores a forward step of the clock, so that nothing ages suddenly.

    A clock that is set back is followed, since that keeps more checkpoints.
    """

    def __init__(self) -> None:
        self._ahead_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Return the time in nanoseconds since the epoch."""
        return min(time.time_ns(), time.monotonic_ns() + self._ahead_ns)


_PAUSE_MAX_S = 600.0
_NICE = 10


@dataclass(frozen=True)
class DrainRule:
    """The checkpoints that a target receives, and the rate at which they are sent.

    `keep`: retention policy of the target; what it would prune is not copied. `every`: least
    distance between two copies. `barred`: checkpoints that are never copied.
    """

    keep: Keep | None = None
    every: SaveInterval | None = None
    barred: Callable[[SavePoint], bool] = lambda _: False
    rate_bytes_per_s: float | None = None


_COPY_ALL = DrainRule()


def lacking_checkpoints(source: Store, target: Store) -> list[SavePoint]:
    """Return the places that a target lacks of a source, newest first.

    Raises StorageError when one of them cannot be listed.
    """
    present = set(checkpoint_places(target))
    return [place for place in checkpoint_places(source) if place not in present]


def drain_store(
    source: Store,
    target: Store,
    rule: DrainRule = _COPY_ALL,
    *,
    last: bool = False,
    now_ns: Callable[[], int] = time.time_ns,
    on_error: Callable[[SavePoint, OutlastError], None],
    on_start: Callable[[SavePoint], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Iterator[CopyResult]:
    """Copy and verify all wanted checkpoints; yield each copy once it is committed.

    `last`: the newest checkpoint is copied even if it is not due.
    A copy that fails is reported to `on_error`, unless its source was deleted meanwhile, and the
    pass continues with the next checkpoint of the same span, if there is any. Raises StorageError
    when a store cannot be listed, before or between copies.
    """
    ended = stop or threading.Event()
    present = {known.place: known for known in known_checkpoints(target)}
    offered = {
        known.place: known._replace(linked=())  # the target may not share the same files
        for known in known_checkpoints(source)
        if known.place not in present and not rule.barred(known.place)
    }
    while not ended.is_set():
        here, there = list(offered.values()), list(present.values())
        wanted = wanted_checkpoints(here, there, rule.keep, rule.every, now_ns(), last=last)
        if not wanted:
            return
        place = wanted[0]
        known = offered.pop(place)
        on_start(place)
        try:
            copied = copy_checkpoint(
                source, place, target, limit_bytes_per_s=rule.rate_bytes_per_s, stop=ended
            )
        except OutlastError as error:
            if COMMIT not in source.files(place.directory):
                continue  # pruned since it was listed, which is no error
            if not ended.is_set():
                on_error(place, error)
                target.directories()  # raises, and ends the pass, where the store does not answer
            continue
        present[place] = known
        yield copied


class StoreDrainer:
    """A thread that copies new checkpoints to a target: at once, after `nudge`, every `poll_s`.

    A pass without anything new in the source does not access the target. With a retention policy
    the target is pruned after each pass. Errors are reported to `on_error` and lengthen the pause;
    the thread continues. Callbacks run in the thread, which has a low priority.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        rule: DrainRule = _COPY_ALL,
        *,
        poll_s: float = 30.0,
        on_copied: Callable[[CopyResult], None] = lambda _: None,
        on_error: Callable[[str], None],
    ) -> None:
        self._source = source
        self._target = target
        self._rule = rule
        self._poll_s = poll_s
        self._now_ns = CheckpointClock().now_ns
        self._on_copied = on_copied
        self._on_error = on_error
        self._copying: SavePoint | None = None
        self._drained: list[SavePoint] | None = None  # of the source, at the last complete pass
        self._read_back = set[SavePoint]()
        self._stop = threading.Event()
        self._last = threading.Event()  # one more pass, then the thread ends
        self._newest = False  # that pass copies the newest one even if it is not due
        self._has_succeeded = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drainer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def nudge(self) -> None:
        """Look for a new checkpoint now."""
        self._wake.set()

    def uses(self, place: SavePoint) -> bool:
        """Return whether this place is being copied, so that it must not be pruned."""
        return self._copying == place

    def hurry(self, *, newest: bool = False) -> None:
        """Make one more pass over the source's present checkpoints, then end; returns at once.

        `newest`: the newest one is copied even if it is not due.
        """
        self._newest |= newest
        self._last.set()
        self._wake.set()

    def finish(self, timeout_s: float) -> bool:
        """Call `hurry` and wait; return whether all copies succeeded in time."""
        self.hurry()
        self._thread.join(timeout_s)
        return self.close(0.0) and self._has_succeeded

    def close(self, timeout_s: float = 30.0) -> bool:
        """End after the current chunk; return whether the thread ended in time.

        The next drainer uses the bytes already sent. A thread that hangs in a store does not keep
        the process alive.
        """
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        failures = 0
        while not self._stop.is_set():
            self._wake.clear()
            last = self._last.is_set()
            self._has_succeeded = self._make_pass(last=last and self._newest)
            if last:
                return
            failures = 0 if self._has_succeeded else failures + 1
            pause_s = min(self._poll_s * 2**failures, max(_PAUSE_MAX_S, self._poll_s))
            # Random, so that two drainers that collided do not collide again.
            self._wake.wait(pause_s * random.uniform(0.5, 1.0))

    def _make_pass(self, *, last: bool) -> bool:
        """Make one pass, if there is anything new; return whether all of it succeeded."""
        failed = False

        def report(error: str) -> None:
            nonlocal failed
            failed = True
            self._on_error(error)

        try:
            offered = checkpoint_places(self._source)
            if offered == self._drained and not last:
                return True  # requests to a bucket cost money
            for copied in drain_store(
                self._source,
                self._target,
                self._rule,
                last=last,
                now_ns=self._now_ns,
                on_error=lambda place, error: report(f"{place.directory}: {error}"),
                on_start=self._set_copying,
                stop=self._stop,
            ):
                self._read_back.add(copied.place)
                self._on_copied(copied)
            if self._rule.keep and not self._stop.is_set():
                prune_store(
                    self._target,
                    self._rule.keep,
                    self._now_ns(),
                    verified=self._is_whole,
                    barred=self._rule.barred,
                )
                self._remove_incomplete(offered)
        except Exception as error:  # noqa: BLE001 - any error is reported, and later passes are made
            if not self._stop.is_set():  # else `close` interrupted the pass
                report(str(error) or type(error).__name__)
        else:
            self._drained = None if failed else offered
        finally:
            self._copying = None
        return not failed and not self._stop.is_set()

    def _remove_incomplete(self, offered: list[SavePoint]) -> None:
        """Remove incomplete copies of killed launchers that cannot be completed any more.

        Their source is deleted, and the target has a newer checkpoint.
        """
        newest = checkpoint_places(self._target)[:1]
        for place in uncommitted(self._target):
            if newest and place.position < newest[0].position and place not in offered:
                self._target.remove(place.directory)

    def _set_copying(self, place: SavePoint) -> None:
        self._copying = place

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        """Return whether a copy is undamaged: copies of this drainer were read back before."""
        if checkpoint.place in self._read_back:
            return True
        pace, before_bytes = RateLimiter(self._rule.rate_bytes_per_s, self._stop), 0

        def spend(done_bytes: int, _: int) -> None:
            nonlocal before_bytes
            pace.spend(done_bytes - before_bytes)
            before_bytes = done_bytes

        return not verify(checkpoint, spend)
