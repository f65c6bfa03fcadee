"""The trainer's handle on its upkeep process, and the JSON messages between them."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from outlast.checkpoint.keeper.keeper_launch import ChildProcess
from outlast.checkpoint.upkeep.durable_targets import DurableRule
from outlast.checkpoint.upkeep.retention_policy import Keep


class UpkeepSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message. `keep`: None to delete nothing. `save_s`: deadline of a save."""

    root: str
    keep: Keep | None
    durable: tuple[DurableRule, ...]
    save_s: float


class Saving(msgspec.Struct, frozen=True, tag=True):
    """Announcement of a save by this keeper, for which the process waits if the trainer dies."""

    keeper_pid: int


class Committed(msgspec.Struct, frozen=True, tag=True):
    """A new checkpoint was committed."""


class Mend(msgspec.Struct, frozen=True, tag=True):
    """Repair this damaged checkpoint of the root from a target."""

    directory: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """No more saves come: make a last pass and end, after `timeout_s` at the latest."""

    timeout_s: float


class UpkeepFailure(msgspec.Struct, frozen=True):
    """An error message for the trainer."""

    error: str


UpkeepOrder = Saving | Committed | Mend | Finish


_PROGRAM = Path(__file__).with_name("__main__.py")
_STARTS_MAX = 3
_GRACE_S = 10.0  # beyond the time that it was given: then it hangs


class UpkeepClient:
    """Starts and restarts the upkeep process. Only `close` ever waits.

    When the trainer dies, or calls `let_go`, the process waits for keepers, copies the remaining
    checkpoints to the targets, and ends.
    """

    def __init__(self, setup: UpkeepSetup, name: str) -> None:
        """Start the process; `name` identifies it in messages and in `ps`. Raises StorageError."""
        self._setup, self._name = setup, name
        self._starts = 0
        self._received = bytearray()
        self._start()

    def saving(self, keeper_pid: int) -> None:
        """Announce a save of this keeper: the process waits for it if the trainer dies."""
        self._send(Saving(keeper_pid))

    def committed(self) -> None:
        """Announce a new checkpoint, so that it is handled now and not at the next poll."""
        self._send(Committed())

    def mend(self, directory: str) -> None:
        """Have a damaged checkpoint repaired from a target."""
        self._send(Mend(directory))

    def failures(self) -> list[str]:
        """Return the error messages since the last call.

        If the process has died, that is one of them, and it is restarted up to _STARTS_MAX times.
        """
        errors = self._read()
        if self._news_fd < 0 and self._process:
            how = self._reap(_GRACE_S)
            errors.append(f"the process that prunes and copies checkpoints {how}")
            if self._starts < _STARTS_MAX:
                self._start()
            else:
                errors.append(
                    f"it was started {self._starts} times and is not restarted: checkpoints"
                    f" are in {self._setup.root} only"
                )
        return errors

    def close(self, timeout_s: float) -> list[str]:
        """Wait until all copies are made, at most `timeout_s`; return the error messages."""
        self._send(Finish(timeout_s))
        errors: list[str] = []
        due = time.monotonic() + timeout_s + _GRACE_S
        while self._news_fd >= 0 and (left_s := due - time.monotonic()) > 0:
            select.select([self._news_fd], [], [], left_s)
            errors += self._read()
        if self._process and self._news_fd >= 0:
            self._process.kill()
            errors.append(
                f"the process that copies checkpoints hung, and was killed; those"
                f" that it has not copied are in {self._setup.root}"
            )
        self._reap(_GRACE_S)
        self.let_go()
        return errors

    def let_go(self) -> None:
        """Close the pipes; the process finishes its work alone, and its errors are lost."""
        for fd in (self._order_fd, self._news_fd):
            if fd >= 0:
                os.close(fd)
        self._order_fd = self._news_fd = -1

    def _start(self) -> None:
        self._starts += 1
        theirs, self._order_fd = os.pipe2(os.O_CLOEXEC)
        self._news_fd, stdout = os.pipe2(os.O_CLOEXEC)
        try:
            self._process: ChildProcess | None = ChildProcess(
                [], self._name, stdin=theirs, stdout=stdout, program=_PROGRAM
            )
        finally:
            os.close(theirs)
            os.close(stdout)
        os.set_blocking(self._order_fd, False)
        os.set_blocking(self._news_fd, False)
        self._send(self._setup)

    def _send(self, order: UpkeepSetup | UpkeepOrder) -> None:
        with suppress(OSError):  # `failures` detects its death; unread orders do not matter
            os.write(self._order_fd, msgspec.json.encode(order) + b"\n")

    def _read(self) -> list[str]:
        while self._news_fd >= 0:
            try:
                more = os.read(self._news_fd, 1 << 16)
            except BlockingIOError:
                break
            if not more:  # it has ended
                self.let_go()
            self._received += more
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        return [msgspec.json.decode(line, type=UpkeepFailure).error for line in lines]

    def _reap(self, timeout_s: float) -> str:
        """Return the exit of the process in words."""
        process, self._process = self._process, None
        how = process.reap(timeout_s) if process else None
        if process and how is not None:
            process.close()
        return how or "has not ended"
