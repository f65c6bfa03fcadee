"""The control group: votes, state copies and small gathers among the ranks, unseen by scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from outlast.errors import GroupError
from outlast.worker.groups.inner import InnerGroup
from outlast.worker.groups.trouble import is_transport_error

GATHER_BYTES_MAX = 16 << 20


class Control:
    """Blocking operations on one generation's control group. All raise GroupError when the
    generation is severed, a peer is gone, or the operation's deadline has passed."""

    def __init__(self, inner: InnerGroup, generation: int, world: int) -> None:
        self._inner = inner
        self._generation = generation
        self._world = world
        self._busy = 0

    @property
    def busy(self) -> bool:
        """Whether an operation is under way in some thread."""
        return self._busy > 0

    @contextmanager
    def _doing(self, what: str) -> Iterator[dist.ProcessGroup]:
        self._busy += 1
        try:
            yield self._inner.group
        except RuntimeError as error:
            if not is_transport_error(error):
                raise
            raise GroupError(
                f"{what} of generation {self._generation} did not end: {error}"
            ) from error
        finally:
            self._busy -= 1

    def vote(self, values: Sequence[int]) -> list[int]:
        ballot = torch.tensor(list(values), dtype=torch.int64)
        with self._doing("the vote") as group:
            group.allreduce([ballot], AllreduceOptions()).wait()
        return ballot.tolist()

    def send(self, tensor: torch.Tensor, seat: int, tag: int) -> None:
        with self._doing(f"the copy to seat {seat}") as group:
            group.send([tensor], seat, tag).wait()

    def recv(self, tensor: torch.Tensor, seat: int, tag: int) -> None:
        with self._doing(f"the copy from seat {seat}") as group:
            group.recv([tensor], seat, tag).wait()

    def gather_bytes(self, value: bytes) -> list[bytes]:
        if len(value) > GATHER_BYTES_MAX:
            raise GroupError(
                f"{len(value)} bytes are too many to gather from every rank (at most"
                f" {GATHER_BYTES_MAX}); nothing was sent"
            )
        size = torch.tensor([len(value)], dtype=torch.int64)
        sizes = [torch.zeros_like(size) for _ in range(self._world)]
        with self._doing("a gather of sizes") as group:
            group.allgather([sizes], [size], AllgatherOptions()).wait()
        lengths = [int(found) for found in sizes]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if value:
            mine[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        parts = [torch.zeros_like(mine) for _ in lengths]
        with self._doing("a gather") as group:
            group.allgather([parts], [mine], AllgatherOptions()).wait()
        return [
            part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
        ]
