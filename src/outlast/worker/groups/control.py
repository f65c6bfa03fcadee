"""The control group: votes, state copies and small gathers among the ranks, unseen by scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from outlast.errors import GroupError
from outlast.worker.groups.inner import InnerGroup
from outlast.worker.groups.trouble import is_transport_error

GATHER_BYTES_MAX = 16 << 20
_LOOK_UP = timedelta(seconds=0.25)


class Control:
    """Blocking operations on one generation's control group. All raise GroupError when the
    generation is severed, a peer is gone, or the operation's deadline has passed."""

    def __init__(
        self, inner: InnerGroup, generation: int, world: int, is_live: Callable[[], bool]
    ) -> None:
        self._inner = inner
        self._is_live = is_live
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

    def _wait(self, work: dist.Work) -> None:
        """gloo sometimes forgets to wake a sender whose connection broke while its event loop was
        writing: the wait looks up now and then, and leaves a severed operation behind."""
        while True:
            live = self._is_live()
            try:
                work.wait(_LOOK_UP)
            except RuntimeError:
                if work.is_completed():
                    raise
                if not live:
                    raise GroupError(
                        f"an operation of generation {self._generation} was cut and gloo did not"
                        " let go of it"
                    ) from None
            else:
                return

    def vote(self, values: Sequence[int]) -> list[int]:
        ballot = torch.tensor(list(values), dtype=torch.int64)
        with self._doing("the vote") as group:
            self._wait(group.allreduce([ballot], AllreduceOptions()))
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
            self._wait(group.allgather([sizes], [size], AllgatherOptions()))
        lengths = [int(found) for found in sizes]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if value:
            mine[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        parts = [torch.zeros_like(mine) for _ in lengths]
        with self._doing("a gather") as group:
            self._wait(group.allgather([parts], [mine], AllgatherOptions()))
        return [
            part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
        ]
