"""The ranks that save together, and how they tell each other bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist

from outlast.checkpoint.meeting import Meeting
from outlast.errors import GroupError


class Ranks:
    """The members of a process group: of torch.distributed's default one, where it is initialized;
    else this process alone.

    All members make theirs together: where the group carries no CPU tensors (NCCL), a group of
    gloo's is made beside it. `timeout_s`: how long to wait for a rank that says nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 1800.0) -> None:
        self.rank, self.world = 0, 1
        self._group = group
        self._meeting: Meeting | None = None
        self._calls = self._turns = 0
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return
        group = group or dist.group.WORLD
        assert group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        backends = dist.get_backend_config(group)
        if "outlast" not in backends:  # else the launcher finds who does not come
            store = group.get_group_store()
            self._meeting = Meeting(store, self.rank, self.world, timeout_s)
        if "cpu:" not in backends:
            self._group = dist.new_group(
                dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """One call that all ranks make, in the same order. Who leaves it early says so, and lets
        nobody wait at an `exchange` in it."""
        self._calls, self._turns, why = self._calls + 1, 0, ""
        try:
            yield
        except BaseException as error:
            why = str(error) or type(error).__name__
            raise
        finally:
            if self._meeting:
                self._meeting.leave(self._calls, why)

    def exchange(self, data: bytes) -> list[bytes]:
        """What all ranks give, in order of rank. All of them call it.

        Raises GroupError when a rank is gone, or does not come; it names those that have left the
        call that this one is in, at once.
        """
        if self.world == 1:
            return [data]
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
            raise GroupError(
                f"rank {self.rank} of {self.world} could not speak with the others about a"
                f" checkpoint: {error}; checkpoints that are committed are untouched"
            ) from error
        return [
            room.numpy()[: int(size)].tobytes() for room, size in zip(rooms, sizes, strict=True)
        ]
