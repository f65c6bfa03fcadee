"""Messages and chunk transfers among the ranks that save together.

Ranks meet before they exchange messages, so that no rank waits for one that will not come: a rank
inside a collective knows neither which rank is missing nor why. The rendezvous uses the store of
their process group: a few small keys, read only by ranks that wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import DebugLevel, Store, get_debug_level

from outlast.errors import GroupError, UsageError

_PAUSE_S = 0.001
_PAUSE_MAX_S = 0.05
_GRACE_S = 10.0  # for the deciding rank to publish the outcome
_NAMED_MAX = 8
_OPEN_CALLS_MAX = 16  # calls with a departure key of their own


class RankRendezvous:
    """Numbered rendezvous of all ranks for the collective calls of a Checkpointer."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        """Create the rendezvous; all ranks do so together, and equally often.

        `timeout_s`: how long to wait for a rank that does not answer.
        """
        self._store, self._rank, self._world = store, rank, world
        self._timeout_s = timeout_s
        number = store.add(f"outlast/checkpoints/{rank}", 1)
        self._root = f"outlast/checkpoints/made-{number}"

    def leave(self, call: int, why: str = "") -> None:
        """Record that this rank has left `call`, with `why` where it failed.

        The rank comes to no later rendezvous of the call. Takes a few microseconds and never waits.
        """
        with suppress(RuntimeError):  # the store died: no rank can be waiting there
            self._store.set(self._departure_key(call), f"{call} {self._rank} {why}")

    def come(self, call: int, turn: int) -> None:
        """Wait until all ranks have come to this turn of this call.

        Raises GroupError on all ranks once one of them has left the call, which is detected at
        once, or does not come for `timeout_s`.
        """
        at = f"{self._root}/{call}/{turn}"
        self._store.set(f"{at}/{self._rank}", "")
        if self._store.add(f"{at}/here", 1) == self._world:
            self._decide(at, "")
        due, pause_s = time.monotonic() + self._timeout_s, _PAUSE_S
        while not self._store.check([f"{at}/end"]):
            if why := self._departure(call, at):
                self._decide(at, why)
            elif time.monotonic() > due:
                self._decide(at, self._silent(at))
                if time.monotonic() > due + _GRACE_S:
                    raise GroupError(f"{self._who} waited {self._timeout_s:g} s for an answer")
            time.sleep(pause_s)  # a store cannot be waited on without noise in the script's log
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        if why := self._store.get(f"{at}/end").decode():
            raise GroupError(f"{self._who} cannot reach the other ranks: {why}")

    def look(self, call: int) -> None:
        """Raise GroupError where a rank has left `call`, which none may leave before this one."""
        try:
            key = self._departure_key(call)
            departure = self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError as error:
            raise GroupError(
                f"{self._who} cannot reach the other ranks: the store of their process group is"
                f" gone: {error}"
            ) from error
        if departure:
            number, rank, why = departure.split(" ", 2)
            if int(number) == call:
                raise GroupError(
                    f"{self._who} cannot reach the other ranks: rank {rank} failed: {why}"
                )

    def post(self, slot: int, data: bytes) -> None:
        """Replace this rank's note in `slot`, which any rank may read. Never waits."""
        with suppress(RuntimeError):  # the store died: no rank can read it there
            self._store.set(f"{self._root}/note/{slot}/{self._rank}", data.decode())

    def posted(self, slot: int, rank: int) -> bytes:
        """Return a rank's note in `slot`, b"" if there is none. Never waits."""
        key = f"{self._root}/note/{slot}/{rank}"
        with suppress(RuntimeError):
            return self._store.get(key) if self._store.check([key]) else b""
        return b""

    @property
    def _who(self) -> str:
        return f"rank {self._rank} of {self._world}"

    def _decide(self, at: str, end: str) -> None:
        """Set the outcome of this rendezvous; the first rank decides for all."""
        if self._store.add(f"{at}/decided", 1) == 1:
            self._store.set(f"{at}/end", end)

    def _departure(self, call: int, at: str) -> str:
        """Return the reason why a rank will not come; "" if no rank has left."""
        key = self._departure_key(call)
        if not self._store.check([key]):
            return ""
        number, rank, why = self._store.get(key).decode().split(" ", 2)
        if int(number) < call or self._store.check([f"{at}/{rank}"]):
            return ""
        return f"rank {rank} failed: {why}" if why else f"rank {rank} did not take part"

    def _departure_key(self, call: int) -> str:
        """Return the key of departures; several keys, so that a late one hides no newer one."""
        return f"{self._root}/left/{call % _OPEN_CALLS_MAX}"

    def _silent(self, at: str) -> str:
        missing = [r for r in range(self._world) if not self._store.check([f"{at}/{r}"])]
        named = ", ".join(map(str, missing[:_NAMED_MAX])) + ("..." if missing[_NAMED_MAX:] else "")
        return f"rank {named} did not come within {self._timeout_s:g} s"


class RankNotes(Protocol):
    """Short notes of the ranks of a group, in numbered slots."""

    def post(self, slot: int, data: bytes) -> None:
        """Replace this rank's note in `slot`. Never waits."""

    def posted(self, slot: int, rank: int) -> bytes:
        """Return a rank's note in `slot`, b"" if there is none. Never waits."""
        ...


@runtime_checkable
class NotingGroup(Protocol):
    """A process group of `outlast run`, whose store cannot be used."""

    def rank_notes(self) -> RankNotes:
        """Return new notes; all ranks call it together, and equally often."""
        ...


_TAG = 0x0C000000  # of chunks, far from a script's own
_CALL_BYTES = 8  # of a call's name, before each message
_CALLS_APART, _NUMBERS_APART = 16, 1 << 20


class RankGroup:
    """Members of a process group, or this process alone without torch.distributed.

    `group` defaults to the default group. All members construct it together: where the group
    carries no CPU tensors (NCCL), a gloo group of the same ranks is created. `timeout_s`: how long
    to wait for a rank that does not answer.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 1800.0) -> None:
        self.rank, self.world = 0, 1
        self._pid = os.getpid()
        self._in_call = threading.Lock()
        self._group = group
        self._wire: dist.ProcessGroup | None = None  # carries chunks
        self._meeting: RankRendezvous | None = None
        self.notes: RankNotes | None = None
        self._calls = self._turns = 0
        self._call = ""
        self._timeout = timedelta(seconds=timeout_s)
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return
        self._group = group = group or dist.group.WORLD
        assert group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        backends = dist.get_backend_config(group)
        if "outlast" not in backends:  # else the launcher detects missing ranks
            store = group.get_group_store()
            self.notes = self._meeting = RankRendezvous(store, self.rank, self.world, timeout_s)
        elif isinstance(group, NotingGroup):
            self.notes = group.rank_notes()
        if "cpu:" not in backends:
            self._group = _gloo_beside(group)
        # There each rank's transfers count as collectives, of which all must have made as many.
        counted = self.can_relay and get_debug_level() == DebugLevel.DETAIL
        self._wire = _gloo_beside(group) if counted else self._group

    @property
    def can_relay(self) -> bool:
        """Return whether ranks can send each other chunks; the same on all ranks.

        False for groups of `outlast run`, which replay recorded results to a joiner.
        """
        return self.world > 1 and self._meeting is not None

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that constructed the group."""
        return os.getpid() != self._pid

    def refuse_fork(self) -> None:
        """Raise UsageError in a fork: it has none of the threads, and shares all connections."""
        if self.is_forked:
            raise UsageError(
                f"this Checkpointer was constructed by process {self._pid}, of which process"
                f" {os.getpid()} is a fork; nothing was saved or loaded; let that process call it,"
                " or construct another one here, for another directory"
            )

    @property
    def is_replaceable(self) -> bool:
        """Return whether the ranks are those of `outlast run`: redone and replaced."""
        return self.world > 1 and self._meeting is None

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Delimit one call that all ranks make, in the same order.

        A rank that leaves it early reports it, so that no other rank waits for it in `exchange`.
        Raises UsageError in a forked process, and while another call is in progress.
        """
        self.refuse_fork()
        if not self._in_call.acquire(blocking=False):
            raise UsageError(
                f"rank {self.rank} calls {call}() while another thread is in {self._call}() of this"
                " Checkpointer; this call did nothing; make one call at a time, in the same order"
                " on all ranks"
            )
        self._calls, self._turns, self._call = self._calls + 1, 0, call
        try:
            yield
            if self._meeting:
                self._meeting.leave(self._calls)
        except BaseException as error:  # Ctrl-C as well: the other ranks must not wait
            self.leave(error)
            raise
        finally:
            self._in_call.release()

    def leave(self, why: BaseException) -> None:
        """Announce at once that this rank fails in its current call."""
        if self._meeting:
            self._meeting.leave(self._calls, str(why) or type(why).__name__)

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks, in order of rank; all ranks call it.

        Raises GroupError when a rank died or does not come, at once with the names of ranks that
        have left the current call; UsageError on all ranks when they are in different calls.
        """
        if self.world == 1:
            return [data]
        answers = self._gathered(self._call.encode().ljust(_CALL_BYTES) + data)
        calls = [answer[:_CALL_BYTES].decode().strip() for answer in answers]
        if len(set(calls)) > 1:
            names = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
            raise UsageError(
                f"ranks call different methods ({names}); nothing was saved or loaded; let all call"
                " the same, in the same order"
            )
        return [answer[_CALL_BYTES:] for answer in answers]

    def _gathered(self, data: bytes) -> list[bytes]:
        try:
            if self._meeting:
                self._turns += 1
                self._meeting.come(self._calls, self._turns)
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world)]
            dist.all_gather(sizes, torch.tensor([len(data)], device="cpu"), self._group)
            most = max(int(size) for size in sizes)
            mine = torch.zeros(most, dtype=torch.uint8, device="cpu")
            mine.numpy()[: len(data)] = memoryview(data)
            rooms = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(rooms, mine, self._group)
        except RuntimeError as error:
            raise _lost(self, "agree with the other ranks on a checkpoint", error) from error
        return [
            room.numpy()[: int(size)].tobytes() for room, size in zip(rooms, sizes, strict=True)
        ]

    def look(self) -> None:
        """Raise GroupError where another rank has failed in the current call."""
        if self._meeting:
            self._meeting.look(self._calls)

    def send(self, data: memoryview, to: int, number: int) -> ChunkTransfer:
        """Begin to send bytes, which must not change until the transfer has ended.

        `number`: of the chunk; two ranks transfer those of one number in the same order.
        """
        return self._begin(data, to, number, sends=True)

    def receive(self, into: memoryview, source: int, number: int) -> ChunkTransfer:
        """Begin to receive exactly `len(into)` bytes."""
        return self._begin(into, source, number, sends=False)

    def _begin(self, data: memoryview, peer: int, number: int, *, sends: bool) -> ChunkTransfer:
        assert self._wire
        tag = _TAG + self._calls % _CALLS_APART * _NUMBERS_APART + number % _NUMBERS_APART
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        begin = self._wire.send if sends else self._wire.recv
        what = f"{'hand a chunk to' if sends else 'get a chunk from'} rank {peer}"
        try:
            return ChunkTransfer(self, begin([tensor], peer, tag), tensor, what, self._timeout)
        except RuntimeError as error:
            raise _lost(self, what, error) from error


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks."""
    gloo = dist.new_group(
        dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
    )
    assert isinstance(gloo, dist.ProcessGroup)
    return gloo


class ChunkTransfer(NamedTuple):
    """A transfer of bytes to or from another rank."""

    ranks: RankGroup
    work: dist.Work
    tensor: torch.Tensor  # whose memory must live until then
    what: str
    timeout: timedelta

    def wait(self) -> None:
        """Wait until the bytes are sent or received. Raises GroupError."""
        try:
            self.work.wait(self.timeout)
        except RuntimeError as error:
            raise _lost(self.ranks, self.what, error) from error


def _lost(ranks: RankGroup, what: str, error: Exception) -> GroupError:
    return GroupError(
        f"rank {ranks.rank} of {ranks.world} could not {what}: {error}; checkpoints that are"
        " committed are untouched"
    )
