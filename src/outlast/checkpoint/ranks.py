"""The ranks that save together, and how they tell each other bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from outlast.checkpoint.meeting import Meeting
from outlast.errors import GroupError, UsageError

_TAG = 0x0C000000  # of chunks, far from a script's own
_CALL_BYTES = 8  # of a call's name, before each message
_CALLS_APART, _NUMBERS_APART = 16, 1 << 20


class Ranks:
    """The members of a process group: of torch.distributed's default one, where it is initialized;
    else this process alone.

    All members make theirs together: where the group carries no CPU tensors (NCCL), a group of
    gloo's is made beside it. `timeout_s`: how long to wait for a rank that says nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 1800.0) -> None:
        self.rank, self.world = 0, 1
        self._group = group
        self._wire: dist.ProcessGroup | None = None  # carries chunks
        self._meeting: Meeting | None = None
        self._calls = self._turns = 0
        self._call = ""
        self._timeout = timedelta(seconds=timeout_s)
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return
        self._group = group = group or dist.group.WORLD
        assert group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        backends = dist.get_backend_config(group)
        if "outlast" not in backends:  # else the launcher finds who does not come
            store = group.get_group_store()
            self._meeting = Meeting(store, self.rank, self.world, timeout_s)
        if "cpu:" not in backends:
            self._group = _gloo_beside(group)
        # There each rank's transfers count as collectives, of which all must have made as many.
        counted = self.can_relay and get_debug_level() == DebugLevel.DETAIL
        self._wire = _gloo_beside(group) if counted else self._group

    @property
    def can_relay(self) -> bool:
        """Return whether ranks can hand each other chunks; the same on all. Not through groups of
        `outlast run`, which answer a joiner out of what they have recorded."""
        return self.world > 1 and self._meeting is not None

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """One call that all ranks make, in the same order. Who leaves it early says so, and lets
        nobody wait at an `exchange` in it."""
        self._calls, self._turns, self._call = self._calls + 1, 0, call
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise
        if self._meeting:
            self._meeting.leave(self._calls)

    def leave(self, why: BaseException) -> None:
        """Say at once that this rank fails in the call that it is in."""
        if self._meeting:
            self._meeting.leave(self._calls, str(why) or type(why).__name__)

    def exchange(self, data: bytes) -> list[bytes]:
        """What all ranks give, in order of rank. All of them call it.

        Raises GroupError when a rank is gone, or does not come; it names those that have left the
        call that this one is in, at once. UsageError on all ranks when they are in different calls.
        """
        if self.world == 1:
            return [data]
        answers = self._gathered(self._call.encode().ljust(_CALL_BYTES) + data)
        calls = [answer[:_CALL_BYTES].decode().strip() for answer in answers]
        if len(set(calls)) > 1:
            said = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
            raise UsageError(
                f"ranks call different methods ({said}); nothing was saved or loaded; let all call"
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
            raise _lost(self, "speak with the others about a checkpoint", error) from error
        return [
            room.numpy()[: int(size)].tobytes() for room, size in zip(rooms, sizes, strict=True)
        ]

    def look(self) -> None:
        """Raise GroupError where another rank has failed in the call that this one is in."""
        if self._meeting:
            self._meeting.look(self._calls)

    def send(self, data: memoryview, to: int, number: int) -> Transfer:
        """Begin to send bytes, which stay as they are until that has ended. `number`: of what is
        sent; two ranks send each other those of one number in the same order."""
        return self._begin(data, to, number, sends=True)

    def receive(self, into: memoryview, source: int, number: int) -> Transfer:
        """Begin to receive as many bytes as there is room for: they must be as many."""
        return self._begin(into, source, number, sends=False)

    def _begin(self, data: memoryview, peer: int, number: int, *, sends: bool) -> Transfer:
        assert self._wire
        tag = _TAG + self._calls % _CALLS_APART * _NUMBERS_APART + number % _NUMBERS_APART
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        begin = self._wire.send if sends else self._wire.recv
        what = f"{'hand a chunk to' if sends else 'get a chunk from'} rank {peer}"
        try:
            return Transfer(self, begin([tensor], peer, tag), tensor, what, self._timeout)
        except RuntimeError as error:
            raise _lost(self, what, error) from error


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group of the same ranks."""
    made = dist.new_group(
        dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


class Transfer(NamedTuple):
    """Bytes on their way to another rank, or from it."""

    ranks: Ranks
    work: dist.Work
    tensor: torch.Tensor  # whose memory must live until then
    what: str
    timeout: timedelta

    def wait(self) -> None:
        """Wait until the bytes have left, or are there. Raises GroupError."""
        try:
            self.work.wait(self.timeout)
        except RuntimeError as error:
            raise _lost(self.ranks, self.what, error) from error


def _lost(ranks: Ranks, what: str, error: Exception) -> GroupError:
    return GroupError(
        f"rank {ranks.rank} of {ranks.world} could not {what}: {error}; checkpoints that are"
        " committed are untouched"
    )
