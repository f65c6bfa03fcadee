"""The upkeep process of a trainer: one thread that deletes, and one for each durable target."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_process import lower_priority
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.checkpoint_copy import CopyResult, copy_checkpoint
from outlast.checkpoint.upkeep.drain_to_target import CheckpointClock, DrainRule, StoreDrainer
from outlast.checkpoint.upkeep.durable_targets import DurableTarget, open_target
from outlast.checkpoint.upkeep.retention_policy import Keep, RetentionVerdict, prune_store
from outlast.checkpoint.upkeep.upkeep_client import (
    Committed,
    Finish,
    Mend,
    Saving,
    UpkeepFailure,
    UpkeepOrder,
    UpkeepSetup,
)
from outlast.errors import OutlastError

_NICE = 10


class UpkeepListener(Protocol):
    """Receiver of the results of upkeep; called from any thread."""

    def deleted(self, verdict: RetentionVerdict) -> None:
        """Report a deleted checkpoint of the local store."""

    def not_deleted(self, error: str) -> None:
        """Report a failure to delete, once until it succeeds or the error changes."""

    def copied(self, copied: CopyResult, where: str) -> None:
        """Report a copy that was committed at `where`."""

    def not_copied(self, error: str, where: str) -> None:
        """Report a failed copy to `where`."""


class UpkeepThreads:
    """Threads that prune the store `local` and copy its checkpoints to targets.

    Errors end nothing: they are reported, and the work is tried again after the next checkpoint.
    `keep`: None to delete nothing. `barred`: checkpoints that are never started from. `behind`: the
    targets that may lack checkpoints that they should have.
    """

    def __init__(
        self,
        local: Store,
        keep: Keep | None,
        targets: Sequence[DurableTarget],
        listener: UpkeepListener,
        barred: Callable[[SavePoint], bool] = lambda _: False,
    ) -> None:
        self._local, self._barred = local, barred
        self._keep = keep
        self._listener = listener
        self._now_ns = CheckpointClock().now_ns
        self._last_error = ""  # the newest failure to delete: reported once
        self._ending = False
        self._wake = threading.Event()
        self._drainers = {target.store.where: self._drainer(target) for target in targets}
        self.behind = list(self._drainers)
        self._pruner = threading.Thread(target=self._run, name="pruner", daemon=True)
        self._pruner.start()

    def committed(self) -> None:
        """Look for a new checkpoint. Returns at once."""
        self._wake.set()
        for drainer in self._drainers.values():
            drainer.nudge()

    def finish(self, timeout_s: float, *, newest: bool) -> None:
        """Make a last pass, then end, after `timeout_s` at the latest; no process may write now.

        `newest`: the newest checkpoint is copied to all targets, even if it is not due there.
        """
        until_s = time.monotonic() + timeout_s
        for drainer in self._drainers.values():
            drainer.hurry(newest=newest)
        for where, drainer in self._drainers.items():
            if drainer.finish(max(0.0, until_s - time.monotonic())):
                self.behind.remove(where)
        self._ending = True  # no drainer uses a checkpoint from here on
        self._wake.set()
        self._pruner.join(max(0.0, until_s - time.monotonic()))

    def _drainer(self, target: DurableTarget) -> StoreDrainer:
        rule, store = target
        return StoreDrainer(
            self._local,
            store,
            DrainRule(rule.keep or self._keep, rule.every, self._barred, rule.rate_bytes_per_s),
            on_copied=lambda copied: self._listener.copied(copied, store.where),
            on_error=lambda error: self._listener.not_copied(error, store.where),
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
            verdicts = prune_store(
                self._local, keep, self._now_ns(), spare=self._in_use, barred=self._barred
            )
        except (OutlastError, OSError) as error:
            if str(error) != self._last_error:
                self._last_error = str(error)
                self._listener.not_deleted(self._last_error)
            return
        self._last_error = ""
        for verdict in verdicts:
            if not verdict.keep:
                self._listener.deleted(verdict)

    def _in_use(self, place: SavePoint) -> bool:
        return any(drainer.uses(place) for drainer in self._drainers.values())


_LOOK_S = 30.0  # without news of a checkpoint
_WORDS_MAX = 2000  # so that a line is written to a pipe atomically


class FailureReporter:
    """Sends failures to the trainer, each once until it succeeds or the error changes."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}

    def deleted(self, verdict: RetentionVerdict) -> None:
        """Do nothing: the trainer does not need it."""

    def not_deleted(self, error: str) -> None:
        """Send the error to the trainer."""
        _report_error(f"old checkpoints could not be deleted: {error}")

    def copied(self, copied: CopyResult, where: str) -> None:  # noqa: ARG002 - that it went well
        """Forget the last error of this target."""
        self._errors.pop(where, None)

    def not_copied(self, error: str, where: str) -> None:
        """Send the error to the trainer, unless it is the last one of this target."""
        if self._errors.get(where) != error:
            self._errors[where] = error
            _report_error(f"a checkpoint was not carried to {where}: {error}; it is tried again")


def main() -> int:
    """Run the upkeep process; return its exit code.

    Orders come by the standard input. Its end without a Finish means that the trainer died.
    """
    lower_priority()
    os.set_blocking(sys.stdout.fileno(), False)
    lines = _lines(sys.stdin.fileno())
    setup = msgspec.json.decode(next(lines) or b"", type=UpkeepSetup)
    root = Folder(Path(setup.root))
    targets = [DurableTarget(rule, open_target(rule.address)) for rule in setup.durable]
    upkeep = UpkeepThreads(root, setup.keep, targets, FailureReporter())
    keeper = _Keeper()
    upkeep.committed()  # for checkpoints of an earlier trainer
    for line in lines:
        order = msgspec.json.decode(line, type=UpkeepOrder) if line else Committed()
        if isinstance(order, Committed):
            upkeep.committed()
        elif isinstance(order, Saving):
            keeper.is_now(order.keeper_pid)
        elif isinstance(order, Mend):
            threading.Thread(target=_repair, args=(order, root, targets), daemon=True).start()
        else:
            break
    else:
        keeper.wait(setup.save_s)  # its pending saves are to be copied as well
        order = Finish(setup.save_s)
    upkeep.finish(order.timeout_s, newest=True)
    for where in upkeep.behind:
        _report_error(
            f"{where} lacks some checkpoints: they are in {root.where}; the next"
            " Checkpointer of this directory, or `outlast ckpt copy`, brings it there"
        )
    return 0


def _lines(fd: int) -> Iterator[bytes]:
    """Yield the lines of a pipe; b"" after _LOOK_S without one."""
    received = bytearray()
    while True:
        if not select.select([fd], [], [], _LOOK_S)[0]:
            yield b""
            continue
        if not (more := os.read(fd, 1 << 16)):
            return
        received += more
        while (end := received.find(b"\n")) >= 0:
            yield bytes(received[:end])
            del received[: end + 1]


class _Keeper:
    """The keeper of the trainer's newest save, as a process to wait for."""

    def __init__(self) -> None:
        self._pid, self._pidfd = 0, -1

    def is_now(self, pid: int) -> None:
        """Watch this keeper instead of the one before."""
        if pid == self._pid:
            return
        self._pid, before = pid, self._pidfd
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            self._pidfd = -1  # it died: the trainer starts another, and announces it
        if before >= 0:
            os.close(before)

    def wait(self, timeout_s: float) -> None:
        """Wait until the keeper has ended, at most `timeout_s`."""
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [], timeout_s)


def _repair(order: Mend, root: Folder, targets: list[DurableTarget]) -> None:
    place = SavePoint.parse(order.directory)
    errors: list[str] = []
    for target in targets:
        try:
            assert place
            copy_checkpoint(target.store, place, root)
            return
        except OutlastError as error:
            errors.append(str(error))
    _report_error(f"{order.directory} in {root.where} was not repaired: {'; '.join(errors)}")


def _report_error(error: str) -> None:
    with suppress(OSError):  # the trainer died, or the pipe is full of errors
        os.write(1, msgspec.json.encode(UpkeepFailure(error[:_WORDS_MAX])) + b"\n")
