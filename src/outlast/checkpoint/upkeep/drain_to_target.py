"""Copies of checkpoints from a store to the next one, in passes or continuously."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, uncommitted, verify
from outlast.checkpoint.stores.io_limits import RateLimiter
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


def lacking_checkpoints(source: Store, target: Store) -> list[SavePoint]:
    """Return the places that a target lacks of a source, newest first.

    Raises StorageError when one of them cannot be listed.
    """
    present = set(checkpoint_places(target))
    return [place for place in checkpoint_places(source) if place not in present]


def drain_store(
    source: Store,
    target: Store,
    *,
    keep: Keep | None = None,
    barred: Callable[[SavePoint], bool] = lambda _: False,
    every: SaveInterval | None = None,
    last: bool = False,
    now_ns: Callable[[], int] = time.time_ns,
    on_error: Callable[[SavePoint, OutlastError], None],
    on_start: Callable[[SavePoint], None] = lambda _: None,
    limit_bytes_per_s: float | None = None,
    stop: threading.Event | None = None,
) -> Iterator[CopyResult]:
    """Copy, verified, all wanted checkpoints; yield each copy once it is committed.

    A copy that fails is reported to `on_error`, unless its source was deleted meanwhile, and the
    pass continues with the next checkpoint of the same span, if there is any. Raises StorageError
    when a store cannot be listed, before or between copies.
    """
    ended = stop or threading.Event()
    present = {known.place: known for known in known_checkpoints(target)}
    offered = {
        known.place: known._replace(linked=())  # the target may not share the same files
        for known in known_checkpoints(source)
        if known.place not in present and not barred(known.place)
    }
    while not ended.is_set():
        known_there = list(present.values())
        wanted = wanted_checkpoints(
            list(offered.values()), known_there, keep, every, now_ns(), last=last
        )
        if not wanted:
            return
        place = wanted[0]
        known = offered.pop(place)
        on_start(place)
        try:
            copied = copy_checkpoint(
                source, place, target, limit_bytes_per_s=limit_bytes_per_s, stop=ended
            )
        except OutlastError as error:
            if COMMIT not in source.files(place.directory):
                continue  # pruned since it was listed: no error
            if not ended.is_set():
                on_error(place, error)
                target.directories()  # a dead store ends the pass; it need not fail for each copy
            continue
        present[place] = known
        yield copied


class StoreDrainer:
    """Drains in a thread of its own until it is closed: at once, after `nudge`, every `poll_s`.

    A pass without anything new in the source does not access the target. With `every`, only due
    checkpoints are copied; with `keep`, the target is pruned after each pass. Errors are reported
    to `on_error` and lengthen the pause; they end nothing. Callbacks run in the thread, which has a
    low priority.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        keep: Keep | None = None,
        barred: Callable[[SavePoint], bool] = lambda _: False,
        every: SaveInterval | None = None,
        poll_s: float = 30.0,
        limit_bytes_per_s: float | None = None,
        on_copied: Callable[[CopyResult], None] = lambda _: None,
        on_error: Callable[[str], None],
    ) -> None:
        self._source = source
        self._target = target
        self._keep, self._barred = keep, barred
        self._every = every
        self._poll_s = poll_s
        self._now_ns = CheckpointClock().now_ns
        self._limit = limit_bytes_per_s
        self._on_copied = on_copied
        self._on_error = on_error
        self._copying: SavePoint | None = None
        self._drained: list[SavePoint] | None = None
        self._read_back = set[SavePoint]()
        self._stop = threading.Event()
        self._last = threading.Event()  # one more pass, and no other
        self._newest = False  # that pass brings the newest, whether it is due or not
        self._went_well = False
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
        return self.close(0.0) and self._went_well

    def close(self, timeout_s: float = 30.0) -> bool:
        """End after the current chunk; return whether the thread ended in time.

        The next drainer uses the bytes already sent. A thread that hangs in a store keeps no
        process alive.
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
            self._went_well = self._passed(last=last and self._newest)
            if last:
                return
            failures = 0 if self._went_well else failures + 1
            pause_s = min(self._poll_s * 2**failures, max(_PAUSE_MAX_S, self._poll_s))
            # Two drainers that got into each other's way must not meet again at the same time.
            self._wake.wait(pause_s * random.uniform(0.5, 1.0))

    def _passed(self, *, last: bool) -> bool:
        """Make one pass, if there is anything new; return whether all of it succeeded."""
        failed = False

        def tell(error: str) -> None:
            nonlocal failed
            failed = True
            self._on_error(error)

        try:
            offered = checkpoint_places(self._source)
            if offered == self._drained and not last:
                return True  # to look at a bucket costs money
            for copied in drain_store(
                self._source,
                self._target,
                keep=self._keep,
                barred=self._barred,
                every=self._every,
                last=last,
                now_ns=self._now_ns,
                on_error=lambda place, error: tell(f"{place.directory}: {error}"),
                on_start=self._starts,
                limit_bytes_per_s=self._limit,
                stop=self._stop,
            ):
                self._read_back.add(copied.place)
                self._on_copied(copied)
            if self._keep and not self._stop.is_set():
                prune_store(
                    self._target,
                    self._keep,
                    self._now_ns(),
                    verified=self._is_whole,
                    barred=self._barred,
                )
                self._clear(offered)
        except Exception as error:  # noqa: BLE001 - it must be heard, and must not end all draining
            if not self._stop.is_set():  # else we have broken it off ourselves
                tell(str(error) or type(error).__name__)
        else:
            self._drained = None if failed else offered
        finally:
            self._copying = None
        return not failed and not self._stop.is_set()

    def _clear(self, offered: list[SavePoint]) -> None:
        """Remove incomplete copies of killed launchers that cannot be completed any more.

        Their source is deleted, and the target has a newer checkpoint.
        """
        newest = checkpoint_places(self._target)[:1]
        for place in uncommitted(self._target):
            if newest and place.position < newest[0].position and place not in offered:
                self._target.remove(place.directory)

    def _starts(self, place: SavePoint) -> None:
        self._copying = place

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        """Return whether a copy is undamaged: copies of this drainer were read back before."""
        if checkpoint.place in self._read_back:
            return True
        pace, before_bytes = RateLimiter(self._limit, self._stop), 0

        def spend(done_bytes: int, _: int) -> None:
            nonlocal before_bytes
            pace.spend(done_bytes - before_bytes)
            before_bytes = done_bytes

        return not verify(checkpoint, spend)
