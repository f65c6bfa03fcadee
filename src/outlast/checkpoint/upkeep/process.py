"""The process behind a trainer's saves: deletes and carries on, also once the trainer has died."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from outlast.checkpoint.copying import Copied, copy
from outlast.checkpoint.durable import Target
from outlast.checkpoint.folder import Folder
from outlast.checkpoint.keeper.process import step_back
from outlast.checkpoint.record import Place
from outlast.checkpoint.retention import Verdict
from outlast.checkpoint.targets import open_target
from outlast.checkpoint.upkeep.protocol import (
    Committed,
    Failed,
    Finish,
    Mend,
    Order,
    Saving,
    Setup,
)
from outlast.checkpoint.upkeep.threads import Upkeep
from outlast.errors import OutlastError

_LOOK_S = 30.0  # without a word of a new checkpoint
_WORDS_MAX = 2000  # so that a line goes into a pipe whole, or not at all


class Teller:
    """Tells the trainer of failures, each once until it goes well again or fails otherwise."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def deleted(self, verdict: Verdict) -> None:
        """Nobody asks."""

    def not_deleted(self, error: str) -> None:
        _say(f"old checkpoints could not be deleted: {error}")

    def copied(self, copied: Copied, where: str) -> None:  # noqa: ARG002 - that it went well
        self._told.pop(where, None)

    def not_copied(self, error: str, where: str) -> None:
        if self._told.get(where) != error:
            self._told[where] = error
            _say(f"a checkpoint was not carried to {where}: {error}; it is tried again")


def main() -> int:
    """Orders come by the standard input; its end without a Finish is the trainer's."""
    step_back()
    os.set_blocking(sys.stdout.fileno(), False)
    lines = _lines(sys.stdin.fileno())
    setup = msgspec.json.decode(next(lines) or b"", type=Setup)
    root = Folder(Path(setup.root))
    targets = [Target(asked, open_target(asked.address)) for asked in setup.durable]
    upkeep = Upkeep(root, setup.keep, targets, Teller())
    keeper = _Keeper()
    upkeep.committed()  # what an earlier trainer has left
    for line in lines:
        order = msgspec.json.decode(line, type=Order) if line else Committed()
        if isinstance(order, Committed):
            upkeep.committed()
        elif isinstance(order, Saving):
            keeper.is_now(order.keeper_pid)
        elif isinstance(order, Mend):
            threading.Thread(target=_mend, args=(order, root, targets), daemon=True).start()
        else:
            break
    else:
        keeper.wait(setup.save_s)  # it finishes what was ordered: that is to be carried on as well
        order = Finish(setup.save_s)
    upkeep.finish(order.timeout_s, newest=True)
    for where in upkeep.behind:
        _say(
            f"{where} does not have all that it should: the rest is in {root.where}; the next"
            " Checkpointer of this directory, or `outlast ckpt copy`, brings it there"
        )
    return 0


def _lines(fd: int) -> Iterator[bytes]:
    """What is said, line by line; an empty one where nothing is for a while."""
    said = bytearray()
    while True:
        if not select.select([fd], [], [], _LOOK_S)[0]:
            yield b""
            continue
        if not (more := os.read(fd, 1 << 16)):
            return
        said += more
        while (end := said.find(b"\n")) >= 0:
            yield bytes(said[:end])
            del said[: end + 1]


class _Keeper:
    """The keeper of the trainer's newest save, as a process to wait for."""

    def __init__(self) -> None:
        self._pid, self._pidfd = 0, -1

    def is_now(self, pid: int) -> None:
        if pid == self._pid:
            return
        self._pid, before = pid, self._pidfd
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:
            self._pidfd = -1  # it has died: the trainer starts another, and says so
        if before >= 0:
            os.close(before)

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, at most so long."""
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [], timeout_s)


def _mend(order: Mend, root: Folder, targets: list[Target]) -> None:
    place = Place.parse(order.directory)
    errors: list[str] = []
    for target in targets:
        try:
            assert place
            copy(target.store, place, root)
            return
        except OutlastError as error:
            errors.append(str(error))
    _say(f"{order.directory} in {root.where} was not mended: {'; '.join(errors)}")


def _say(error: str) -> None:
    with suppress(OSError):  # nobody reads, or there is so much unread that this is not missed
        os.write(1, msgspec.json.encode(Failed(error[:_WORDS_MAX])) + b"\n")
