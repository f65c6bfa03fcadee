"""The trainer's handle on its keeper: orders, outcomes, replacement of a dead keeper.

Only `wait`, `contents` and `close` block. A thread receives the keeper's frames and supervises it.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper import keeper_frames, keeper_launch
from outlast.checkpoint.keeper.arena import Arena, Unmapped
from outlast.checkpoint.keeper.keeper_frames import HeldVersion, Outcome, ReceivedFrame, SaveOrder
from outlast.checkpoint.keeper.keeper_launch import TrainerEnd
from outlast.checkpoint.keeper.order_ledger import OrderLedger
from outlast.errors import StorageError, UsageError, WireError

ANSWER_S = 10.0
_REAP_S = 0.5  # at a time: a process in uninterruptible sleep takes as long as its disk
_RETRY_S = 0.1


@dataclass
class _LentArena:
    arena: Arena
    sent: bool


class KeeperClient:
    """A keeper for one trainer, from `start` or `connect`."""

    def __init__(self, name: str, open_end: Callable[[], TrainerEnd]) -> None:
        self.name = name
        self._open_end = open_end
        self._ledger = OrderLedger(f"the keeper of {name}")
        self._change = threading.Condition(threading.RLock())
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lent: dict[int, _LentArena] = {}
        self._offered: dict[int, Unmapped] = {}  # of earlier trainers, not taken yet
        self._welcome: keeper_frames.Welcome | None = None
        self._contents: keeper_frames.KeeperContents | None = None
        self._next_arena = 0
        self._older: dict[int, keeper_frames.OlderVersion] = {}
        self._close_due = math.inf
        self._end_due = math.inf  # deadline of an idle keeper to end
        self._ended = False
        self._end: TrainerEnd | None = open_end()
        self._dying: TrainerEnd | None = None
        self._thread = threading.Thread(target=self._supervise, name="keeper", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, name: str, pass_fds: tuple[int, ...] = ()) -> KeeperClient:
        """Start a keeper process of this trainer; `name` identifies it in messages and `ps`.

        When the trainer dies, the keeper finishes pending orders, and ends. It keeps `pass_fds`
        open until then. Raises StorageError.
        """
        return cls(name, lambda: keeper_launch.start_keeper(name, pass_fds))

    @classmethod
    def connect(
        cls, address: str, token: str, name: str = "a trainer", timeout_s: float = ANSWER_S
    ) -> KeeperClient:
        """Connect to the launcher's keeper at its socket's path (or abstract name, with @).

        Raises StorageError when it does not answer, or refuses the token.
        """
        keeper = cls(name, lambda: keeper_launch.reach_keeper(address, token, name, timeout_s))
        with keeper._change:
            keeper._change.wait_for(lambda: keeper._welcome or not keeper._end, timeout_s)
            if keeper._welcome:
                keeper._older = {each.arena: each for each in keeper._welcome.older}
                keeper._next_arena = max(keeper._older, default=-1) + 1
                return keeper
        keeper.close(0)
        raise StorageError(
            f"the keeper of {name} at {address} did not answer within {timeout_s:g} s: it serves"
            " another trainer, or refuses this token"
        )

    @property
    def pid(self) -> int:
        """Return the pid of this trainer's own keeper while it is alive; else 0."""
        with self._change:
            return self._end.process.pid if self._end and self._end.process else 0

    def lend(self, arena: Arena) -> int:
        """Lend an arena until `drop`; return its number. StorageError without free descriptors."""
        with self._change:
            number = self._next_arena
            self._next_arena += 1
            self._lent[number] = _LentArena(arena, sent=False)
            try:
                self._send_unsent()
            except StorageError:
                del self._lent[number]
                raise
        return number

    def reuse(self, arena: int) -> None:
        """Invalidate the version in the arena before a copy into it begins.

        This holds even if this process is killed during the copy. Raises UsageError while it is
        busy.
        """
        with self._change:
            self._check_idle(arena)
            self._lent[arena].arena.stamp = 0

    def order(self, order: SaveOrder) -> None:
        """Order the write of a save whose copy in its arena is complete.

        Returns at once. Unless the keeper has just died, it has received the order, and the save
        survives the death of this process. Raises UsageError where the arena is busy or not lent,
        or the save's number was used before; StorageError when too many saves are pending.
        """
        with self._change:
            self._check_idle(order.arena)
            stamp = secrets.randbits(62) + 1
            self._ledger.add(order, stamp, time.monotonic())
            self._lent[order.arena].arena.stamp = stamp
            self._send_unsent()

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call, in order; never waits."""
        with self._change:
            return self._ledger.take_unread()

    def wait_news(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for outcomes; return whether there are any."""
        with self._change:
            return bool(self._change.wait_for(lambda: self._ledger.unread, timeout_s))

    def wait(self, save: int, timeout_s: float) -> Outcome:
        """Wait for a save's last outcome and return it.

        Committed or failed where it was ordered with a commit record, else written or failed.
        Raises StorageError after `timeout_s`: the save continues.
        """
        with self._change:
            order = self._ledger.pending_order(save)
            outcomes = self._ledger.final_outcomes
            if save not in outcomes and not order:
                raise UsageError(f"save {save} was not ordered, or its outcome was discarded")
            if not self._change.wait_for(lambda: save in outcomes, timeout_s):
                assert order
                raise StorageError(
                    f"the save of step {order.manifest.place.step} has not ended within"
                    f" {timeout_s:g} s; it continues, for at most {order.deadline_s:g} s in all"
                )
            return outcomes[save]

    def progress(self, save: int) -> tuple[Outcome | None, bool]:
        """Return a save's last outcome, if it has ended, and whether only others' parts lack."""
        with self._change:
            return self._ledger.final_outcomes.get(save), self._ledger.is_written(save)

    def busy(self, arena: int) -> bool:
        """Return whether a write may still read the arena, so that it must not change."""
        with self._change:
            return self._ledger.is_busy(arena)

    @property
    def copying(self) -> bool:
        """Return whether a version is being sent. Peers keep the last one if it is overwritten."""
        with self._change:
            return self._ledger.is_copying(time.monotonic())

    def held_versions(self, timeout_s: float = ANSWER_S) -> list[HeldVersion]:
        """Return the versions in the keeper's memory, of this trainer and of earlier ones.

        `take` gives the arena of one. Raises StorageError when the keeper does not answer.
        """
        return self.contents(timeout_s).versions

    def contents(self, timeout_s: float = ANSWER_S) -> keeper_frames.KeeperContents:
        """Return the keeper's versions and parity. Raises as `held_versions` does."""
        with self._change:
            self._contents = None
            if self._end:
                self._end.stream.send(keeper_frames.ContentsRequest())
                self._wake()
            if not self._change.wait_for(lambda: self._contents, timeout_s) or not self._contents:
                raise StorageError(
                    f"the keeper of {self.name} did not list its contents within {timeout_s:g} s"
                )
            return self._contents

    def take(self, arena: int) -> Unmapped:
        """Return the memory of an arena in `contents`, for the caller to read and close."""
        with self._change:
            if arena not in self._offered:
                raise UsageError(f"the keeper of {self.name} has not listed an arena {arena}")
            return self._offered.pop(arena)

    def drop(self, arena: int) -> None:
        """Release an arena, lent or in `contents`, and its version. UsageError while busy."""
        with self._change:
            self._older.pop(arena, None)
            if offered := self._offered.pop(arena, None):
                offered.close()
            else:
                self._check_idle(arena)
                del self._lent[arena]
            if self._end:
                self._end.stream.send(keeper_frames.Drop(arena=arena))
                self._wake()

    @property
    def older(self) -> tuple[keeper_frames.OlderVersion, ...]:
        """Return the arenas of earlier trainers that the keeper still has."""
        with self._change:
            return tuple(self._older.values())

    def forget(self, stays: Callable[[SavePoint | None], bool]) -> None:
        """Make the keeper release arenas of earlier trainers.

        It keeps arenas for which `stays(version)` is true (None: no version).
        """
        with self._change:
            for number in [n for n, each in self._older.items() if not stays(each.place)]:
                del self._older[number]
                if offered := self._offered.pop(number, None):
                    offered.close()
                if self._end:
                    self._end.stream.send(keeper_frames.Drop(arena=number))
            self._wake()

    def close(self, timeout_s: float) -> None:
        """Wait for saves to end, then end the process.

        Raises StorageError naming saves that have not ended after `timeout_s`: the keeper continues
        with them alone, until their deadline.
        """
        with self._change:
            self._close_due = min(self._close_due, time.monotonic() + timeout_s)
            self._wake()
            pending = self._ledger.open
            if self._change.wait_for(lambda: self._ended, timeout_s + (0 if pending else ANSWER_S)):
                return
            pending = self._ledger.open
        if pending:
            raise StorageError(
                f"saves {pending} had not ended after {timeout_s:g} s; the keeper of {self.name}"
                " continues with them, until their deadline"
            )

    # --- under the lock ----------------------------------------------------------------------

    def _check_idle(self, arena: int) -> None:
        if self._close_due < math.inf:
            raise UsageError(f"the keeper of {self.name} is closed")
        if arena not in self._lent:
            raise UsageError(f"arena {arena} was not lent to the keeper of {self.name}")
        if self._ledger.is_busy(arena):
            raise UsageError(
                f"arena {arena} is still being read by a save: wait for it, or use another arena"
            )

    def _send_unsent(self) -> None:
        """Send new arenas and orders; what the socket does not accept now is sent later."""
        if self._end and not self._end.stream.broken:
            for number, lent in self._lent.items():
                if not lent.sent:
                    frame = keeper_frames.Lend(arena=number, size_bytes=lent.arena.size_bytes)
                    self._end.stream.send(frame, [lent.arena.fd])
                    lent.sent = True
            for frame in self._ledger.take_unsent(time.monotonic()):
                try:
                    self._end.stream.send(frame)
                except WireError as error:
                    self._ledger.refuse(frame.order.save, str(error))
                    self._change.notify_all()
        self._wake()

    def _wake(self) -> None:
        if not self._ended:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake_fd, 1)

    def _handle_frame(self, received: ReceivedFrame) -> None:
        frame = received.frame
        if isinstance(frame, keeper_frames.Outcome):
            self._ledger.record(frame)
        elif isinstance(frame, keeper_frames.Welcome):
            self._welcome = frame
            self._ledger.copies = frame.peers > 0
        elif isinstance(frame, keeper_frames.KeeperContents):
            for (number, size_bytes), fd in zip(frame.arenas, received.fds, strict=True):
                if number in self._lent or number in self._offered:
                    os.close(fd)
                else:
                    self._offered[number] = Unmapped(fd, size_bytes)
            self._contents = frame
        self._change.notify_all()

    # --- the supervisor's thread -------------------------------------------------------------

    def _supervise(self) -> None:
        while True:
            with self._change:
                closing = self._close_due < math.inf
                if closing and not self._end and not self._dying and not self._ledger.open:
                    self._finish()
                    return
            if self._dying:
                self._reap_lost(self._dying)
            elif self._end:
                self._listen(self._end, closing)
            elif self._ledger.open:
                self._replace()
            else:
                self._sleep([], None)

    def _listen(self, end: TrainerEnd, closing: bool) -> None:
        """Run one round with a keeper that has not failed."""
        with self._change:
            if closing and not end.stream.pending:
                with contextlib.suppress(OSError):
                    end.stream.sock.shutdown(socket.SHUT_WR)
            waited = [(end.stream.sock.fileno(), end.stream.pending)]
            due = self._ledger.next_deadline()
            if closing and due is None:
                end_due = min(self._close_due, time.monotonic() + ANSWER_S)
                due = self._end_due = min(self._end_due, end_due)
        self._sleep(waited, due)
        with self._change:
            now = time.monotonic()
            end.stream.flush()
            try:
                received = end.stream.receive()
                for frame in received or ():
                    self._handle_frame(frame)
            except (WireError, StorageError):
                received = None
            stuck = self._ledger.fail_overdue(now)
            lost = received is None or now > self._end_due
            if lost or (stuck and end.process):
                self._end, self._dying = None, end
            if lost or stuck:
                self._change.notify_all()

    def _sleep(self, waited: list[tuple[int, bool]], due: float | None) -> None:
        """Wait for a frame, for space to send, or for a wake-up, at most until `due`."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for fd, writing in waited:
            poll.register(fd, select.POLLIN | (select.POLLOUT if writing else 0))
        poll.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _reap_lost(self, end: TrainerEnd) -> None:
        """Reap a lost keeper. Its arenas are free once no process can read them."""
        how = end.close_and_reap(_REAP_S)
        with self._change:
            self._ledger.fail_overdue(time.monotonic())
            if how is not None:
                self._ledger.keeper_died(how)
                self._dying = None
            self._change.notify_all()

    def _replace(self) -> None:
        """Start a successor for the pending saves of a dead keeper."""
        try:
            end = self._open_end()
        except StorageError as error:
            with self._change:
                self._ledger.keeper_died(f"could not be started: {error}")
                self._change.notify_all()
            time.sleep(_RETRY_S)  # memory may become free; the number of attempts is limited
            return
        with self._change:
            self._end = end
            for lent in self._lent.values():
                lent.sent = False
            try:
                self._send_unsent()
            except StorageError:  # no descriptor is free; retried with another keeper
                self._end, self._dying = None, end

    def _finish(self) -> None:
        self._ended = True
        os.close(self._wake_fd)
        for arena in self._offered.values():
            arena.close()
        self._offered.clear()
        self._change.notify_all()
