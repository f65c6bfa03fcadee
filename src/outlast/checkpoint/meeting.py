"""How ranks come together before they speak, so that none waits for one that will not come.

A rank that waits inside a collective knows neither for whom nor why. So all of them first meet in
the store that their process group was made with: a few small keys, which only who waits looks at.
"""

from __future__ import annotations

import time
from contextlib import suppress

from torch._C._distributed_c10d import Store

from outlast.errors import GroupError

_PAUSE_S = 0.001
_PAUSE_MAX_S = 0.05
_GRACE_S = 10.0  # for whoever has decided to say what
_NAMED_MAX = 8
_CALLS_APART = 16  # that ranks may be, and be told of each other at once


class Meeting:
    """The calls of one rank's that all ranks make, in the same order, numbered from 1 on."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        """All ranks make theirs together, and as many each. `timeout_s`: how long to wait for a
        rank that says nothing."""
        self._store, self._rank, self._world = store, rank, world
        self._timeout_s = timeout_s
        made = store.add(f"outlast/checkpoints/{rank}", 1)
        self._root = f"outlast/checkpoints/made-{made}"

    def leave(self, call: int, why: str = "") -> None:
        """Say that this rank is through with `call`, or failed, and comes to no meeting of it any
        more. A few microseconds: nothing is waited for."""
        with suppress(RuntimeError):  # a store that is gone: nobody can be waiting there either
            self._store.set(self._left_key(call), f"{call} {self._rank} {why}")

    def come(self, call: int, turn: int) -> None:
        """Wait until all ranks have come to this turn of this call.

        Raises GroupError on all that have come or still come once one of them has left the call,
        which is known at once, or says nothing for `timeout_s`.
        """
        at = f"{self._root}/{call}/{turn}"
        self._store.set(f"{at}/{self._rank}", "")
        if self._store.add(f"{at}/here", 1) == self._world:
            self._decide(at, "")
        due, pause_s = time.monotonic() + self._timeout_s, _PAUSE_S
        while not self._store.check([f"{at}/end"]):
            if why := self._left(call, at):
                self._decide(at, why)
            elif time.monotonic() > due:
                self._decide(at, self._silent(at))
                if time.monotonic() > due + _GRACE_S:
                    raise GroupError(f"{self._who} waited {self._timeout_s:g} s for an answer")
            time.sleep(pause_s)  # a store cannot be waited on without noise in the script's log
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        if why := self._store.get(f"{at}/end").decode():
            raise GroupError(f"{self._who} cannot speak with the others: {why}")

    def look(self, call: int) -> None:
        """Raise GroupError where a rank has left `call`, which none may leave before this one."""
        try:
            key = self._left_key(call)
            left = self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError as error:
            raise GroupError(
                f"{self._who} cannot speak with the others: the store of their process group is"
                f" gone: {error}"
            ) from error
        if left:
            number, rank, why = left.split(" ", 2)
            if int(number) == call:
                raise GroupError(f"{self._who} cannot speak with the others: rank {rank} failed:"
                                 f" {why}")  # fmt: skip

    @property
    def _who(self) -> str:
        return f"rank {self._rank} of {self._world}"

    def _decide(self, at: str, end: str) -> None:
        """How this meeting ends: for all ranks as the first one says."""
        if self._store.add(f"{at}/decided", 1) == 1:
            self._store.set(f"{at}/end", end)

    def _left(self, call: int, at: str) -> str:
        """Who will not come, and why, in words; empty where nobody has said so."""
        key = self._left_key(call)
        if not self._store.check([key]):
            return ""
        left, rank, why = self._store.get(key).decode().split(" ", 2)
        if int(left) < call or self._store.check([f"{at}/{rank}"]):
            return ""
        return (
            f"rank {rank} failed: {why}" if why else f"rank {rank} saw no need to, and has gone on"
        )

    def _left_key(self, call: int) -> str:
        """Not one key for all calls: who leaves an earlier one late would hide it."""
        return f"{self._root}/left/{call % _CALLS_APART}"

    def _silent(self, at: str) -> str:
        missing = [r for r in range(self._world) if not self._store.check([f"{at}/{r}"])]
        named = ", ".join(map(str, missing[:_NAMED_MAX])) + ("..." if missing[_NAMED_MAX:] else "")
        return f"rank {named} did not come within {self._timeout_s:g} s"
