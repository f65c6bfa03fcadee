"""What is done behind saves, in threads that are nice to others: one that deletes, one a target."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from outlast.checkpoint.ages import Calendar
from outlast.checkpoint.copying import Copied
from outlast.checkpoint.draining import Drainer
from outlast.checkpoint.durable import Target
from outlast.checkpoint.pruning import prune
from outlast.checkpoint.record import Place
from outlast.checkpoint.retention import Keep, Verdict
from outlast.checkpoint.storage import Store
from outlast.errors import OutlastError

_NICE = 10


class Heard(Protocol):
    """Who is told, from any thread."""

    def deleted(self, verdict: Verdict) -> None: ...

    def not_deleted(self, error: str) -> None:
        """Said once, until it goes well again or fails otherwise."""
        ...

    def copied(self, copied: Copied, where: str) -> None: ...

    def not_copied(self, error: str, where: str) -> None: ...


class Upkeep:
    """Of the checkpoints in `local`. Nothing here ends anything: what fails is told, and tried
    again after the next checkpoint. `keep`: None to delete nothing. `barred`: what is never started
    from.

    `behind`: the targets of which it is not known that they have all that they should.
    """

    def __init__(
        self, local: Store, keep: Keep | None, targets: Sequence[Target], heard: Heard,
        barred: Callable[[Place], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self._local, self._barred = local, barred
        self._keep = keep
        self._heard = heard
        self._now_ns = Calendar().now_ns
        self._told = ""  # the newest failure to delete: said once
        self._ending = False
        self._wake = threading.Event()
        self._drainers = {target.store.where: self._drainer(target) for target in targets}
        self.behind = list(self._drainers)
        self._pruner = threading.Thread(target=self._run, name="pruner", daemon=True)
        self._pruner.start()

    def committed(self) -> None:
        """There is a new checkpoint. Returns at once."""
        self._wake.set()
        for drainer in self._drainers.values():
            drainer.nudge()

    def finish(self, timeout_s: float, *, newest: bool) -> None:
        """Once nobody writes any more: a last look, then the end, at most so long. `newest`: the
        newest checkpoint goes to all targets, whether it is due there or not."""
        until_s = time.monotonic() + timeout_s
        for drainer in self._drainers.values():
            drainer.hurry(newest=newest)
        for where, drainer in self._drainers.items():
            if drainer.finish(max(0.0, until_s - time.monotonic())):
                self.behind.remove(where)
        self._ending = True  # only now is nothing in use any more
        self._wake.set()
        self._pruner.join(max(0.0, until_s - time.monotonic()))

    def _drainer(self, target: Target) -> Drainer:
        asked, store = target
        return Drainer(
            self._local,
            store,
            keep=asked.keep or self._keep,
            every=asked.every,
            limit_bytes_per_s=asked.rate_bytes_per_s,
            barred=self._barred,
            on_copied=lambda copied: self._heard.copied(copied, store.where),
            on_error=lambda error: self._heard.not_copied(error, store.where),
        )

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._keep:
            self._wake.wait()
            self._wake.clear()
            ending = self._ending
            self._prune(self._keep)
            if ending:
                return

    def _prune(self, keep: Keep) -> None:
        try:
            verdicts = prune(
                self._local, keep, self._now_ns(), spare=self._in_use, barred=self._barred
            )
        except (OutlastError, OSError) as error:
            if str(error) != self._told:
                self._told = str(error)
                self._heard.not_deleted(self._told)
            return
        self._told = ""
        for verdict in verdicts:
            if not verdict.keep:
                self._heard.deleted(verdict)

    def _in_use(self, place: Place) -> bool:
        return any(drainer.uses(place) for drainer in self._drainers.values())
