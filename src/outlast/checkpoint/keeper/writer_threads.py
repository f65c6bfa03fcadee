"""The keeper's two threads: one writes parts in order, one waits to commit.

    keeper's loop --add--> PartWriter --written, failed--> trainer
                               | rank 0's orders
                               '--add--> CommitThread --committed, failed--> trainer

Each thread has one lock (`_change`), around its queue alone. No thread holds both, and none holds
one while it uses the disk or reports an outcome.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from outlast.checkpoint.format.manifests import Manifest
from outlast.checkpoint.keeper.commit_gathering import CommitGathering, join_ranks
from outlast.checkpoint.keeper.frozen_files import FrozenFiles
from outlast.checkpoint.keeper.keeper_disk import disk_of
from outlast.checkpoint.keeper.keeper_frames import Outcome, SaveOrder
from outlast.checkpoint.keeper.part_files import PartFiles
from outlast.checkpoint.stores import directory_ownership
from outlast.errors import OutlastError, StorageError

_ADVICE = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EROFS: "mount it for writing, or choose another directory",
    errno.EACCES: "give this user the right to write, or choose another directory",
    errno.ENOENT: "it was removed meanwhile, or rank 0 gave the save up",
    errno.EIO: "the disk is failing: read the kernel's log",
}
PAUSE_S, PAUSE_MAX_S = 0.002, 0.1


class SaveWork(msgspec.Struct, eq=False):
    """One order in progress. `shard`: the memory to write; `report`: receives its outcomes."""

    order: SaveOrder
    shard: memoryview
    attempt: int
    written: bool
    due: float
    report: Callable[[Outcome], None]
    on_written: Callable[[Manifest], None]
    begun: float = msgspec.field(default_factory=time.monotonic)

    def end(
        self, kind: Literal["written", "committed", "failed"], size_bytes: int = 0, error: str = ""
    ) -> None:
        """Report an outcome."""
        order = self.order
        self.report(
            Outcome(
                save=order.save,
                place=order.manifest.place,
                kind=kind,
                error=error,
                size_bytes=size_bytes,
                seconds=time.monotonic() - self.begun,
            )
        )

    def fail(self, error: BaseException) -> str:
        """Report that the save has failed; return the description of the error."""
        order = self.order
        description = _describe_error(error)
        where = f"rank {order.manifest.rank} on {socket.gethostname()}"
        why = (
            f"the save of step {order.manifest.place.step} failed on {where} in {order.root}:"
            f" {description}; its files are removed where the disk allows it; the"
            " training and older checkpoints are untouched"
        )
        self.end("failed", error=why)
        return description


class PartWriter:
    """A thread that writes the parts of orders one after the other."""

    def __init__(self, committer: CommitThread) -> None:
        self._committer = committer
        self._frozen = FrozenFiles()
        self._queue: deque[SaveWork] = deque()
        self._change = threading.Condition()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def add(self, work: SaveWork) -> None:
        """Queue an order."""
        with self._change:
            self._queue.append(work)
            self._change.notify_all()

    @property
    def idle(self) -> bool:
        """Return whether there is no order, queued or in progress."""
        with self._change:
            return not self._queue and not self._busy

    def _run(self) -> None:
        while True:
            with self._change:
                self._busy = False
                self._change.wait_for(lambda: self._queue)
                work = self._queue.popleft()
                self._busy = True
            self._execute(work)

    def _execute(self, work: SaveWork) -> None:
        order, manifest = work.order, work.order.manifest
        disk = disk_of(order.faults, work.attempt)
        part = PartFiles(disk, Path(order.root), manifest, work.due, self._frozen)
        failed = ""
        if not work.written:
            try:
                directory_ownership.check(Path(order.root), order.owner)
                if order.read_back:
                    self._frozen.require_read_back()
                full = part.write(work.shard, is_retry=work.attempt > 0)
            except Exception as error:  # noqa: BLE001 - any error is reported to the trainer, and other saves continue
                failed = work.fail(error)
                part.announce_failure(failed)
            else:
                work.on_written(full)
                work.end("written", manifest.size_bytes, self._frozen.take_damages())
        work.shard = memoryview(b"")  # release it: a commit may take long and does not read it
        if order.commit and not part.is_taken:
            gathering = CommitGathering(disk, Path(order.root), order.commit)
            if failed:
                gathering.record_failure(manifest.rank, failed)
            self._committer.add(work, gathering, bool(failed))


class _Pending(msgspec.Struct, eq=False):
    number: int  # as they were ordered
    work: SaveWork
    gathering: CommitGathering
    failed: bool


class CommitThread:
    """A thread that waits for the other ranks' parts of checkpoints, and commits them.

    It checks all pending checkpoints in turn: an incomplete checkpoint delays no other. The
    directory of a failed checkpoint is removed once all ranks have finished, or at its deadline.
    """

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._change = threading.Condition()
        self._give_up_failed = False
        self._count = 0
        self._complete = (0, 0)  # number and step of the newest complete save
        self._newest = (-1, -1, -1)
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def add(self, work: SaveWork, gathering: CommitGathering, failed: bool) -> None:
        """Add a checkpoint to wait for; `failed`: only its removal is pending."""
        with self._change:
            self._count += 1
            self._pending.append(_Pending(self._count, work, gathering, failed))
            self._change.notify_all()

    def hurry(self) -> None:
        """Remove failed checkpoints without further waiting."""
        with self._change:
            self._give_up_failed = True
            self._change.notify_all()

    @property
    def idle(self) -> bool:
        """Return whether no checkpoint is pending."""
        with self._change:
            return not self._pending

    def _run(self) -> None:
        pause_s = PAUSE_S
        while True:
            with self._change:
                if not self._pending:
                    self._change.wait_for(lambda: self._pending)
                    pause_s = PAUSE_S
                checked = list(self._pending)
            begun = time.monotonic()
            done = [pending for pending in checked if self._advance(pending)]
            took_s = time.monotonic() - begun
            with self._change:
                self._pending = [pending for pending in self._pending if pending not in done]
                # With many ranks a check is expensive: at most a tenth of the time is spent on it.
                if self._pending and not done:
                    self._change.wait(max(pause_s, 10 * took_s))
                    pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _advance(self, pending: _Pending) -> bool:
        """Check one checkpoint; return whether it is done."""
        work, gathering = pending.work, pending.gathering
        if not pending.failed:
            try:
                if not gathering.read_new_parts():
                    self._check_overtaken(pending)
                    self._check_deadline(work, gathering)
                    return False
                if time.monotonic() > work.due:
                    raise StorageError("the deadline passed before the commit")
                directory_ownership.check(Path(work.order.root), work.order.owner)
                gathering.commit()
            except Exception as error:  # noqa: BLE001 - any error is reported to the trainer, and other saves continue
                work.fail(error)
                pending.failed = True
            else:
                step = work.order.manifest.place.step
                self._complete = max(self._complete, (pending.number, step))
                work.end("committed", gathering.size_bytes, self._move_latest(work, gathering))
                return True
        if gathering.missing and not self._give_up_failed and time.monotonic() <= work.due:
            self._read_finished(gathering)
            if gathering.missing:
                return False
        gathering.clear()
        return True

    def _check_overtaken(self, pending: _Pending) -> None:
        """Raise StorageError where a later save is complete and this one lacks parts.

        Ranks write in the order of their saves, so that these parts will never be written (a rank
        died before its copy, and all ranks tried again). The later save may be of a lower step: a
        run that went back saves steps again.
        """
        number, step = self._complete
        if pending.number < number:
            raise StorageError(
                f"a later save, of step {step}, is complete, and this one lacks the parts of"
                f" {join_ranks(pending.gathering.missing)}"
            )

    def _check_deadline(self, work: SaveWork, gathering: CommitGathering) -> None:
        if time.monotonic() > work.due:
            raise StorageError(
                f"the deadline of {work.order.deadline_s:g} s passed without the parts of"
                f" {join_ranks(gathering.missing)}"
            )

    def _move_latest(self, work: SaveWork, gathering: CommitGathering) -> str:
        """Move `latest`, never backwards; return the error, which does not fail the save."""
        place = work.order.manifest.place
        if place.position < self._newest:
            return ""
        self._newest = place.position
        try:
            gathering.move_latest()
        except OSError as error:
            return f"`latest` could not be moved: {_describe_error(error)}"
        return ""

    def _read_finished(self, gathering: CommitGathering) -> None:
        """Check which other ranks have finished with a failed checkpoint."""
        try:
            gathering.read_new_parts()
        except (OSError, OutlastError):
            return  # the save has failed already


def _describe_error(error: BaseException) -> str:
    if isinstance(error, OSError):
        at = f"{error.filename}: " if error.filename else ""
        advice = _ADVICE.get(error.errno or 0, "")
        return f"{at}{error.strerror or error}{advice and f' ({advice})'}"
    return str(error) if isinstance(error, OutlastError) else repr(error)
