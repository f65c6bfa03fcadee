"""Control group: votes, state copies and small gathers among the ranks, hidden from scripts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch
import xxhash
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from outlast.errors import GroupError
from outlast.worker.groups.control_tree import ControlTree
from outlast.worker.groups.inner_group import is_transport_error
from outlast.worker.groups.work_handles import wait_unless_severed

GATHER_BYTES_MAX = 16 << 20
_RECENT = 16  # works kept after their end
_BALLOTS = 1 << 44  # the sum of half a million fits into an int64


class ControlGroup:
    """Blocking operations on one generation's control group. They raise GroupError when the
    generation is severed, a peer is lost, or the deadline has passed."""

    def __init__(
        self,
        tree: ControlTree,
        generation: int,
        is_live: Callable[[], bool],
        copy_s: float,
    ) -> None:
        """`copy_s` bounds each `send` and `recv`; the group's time-out bounds everything else."""
        self._tree = tree
        self._is_live = is_live
        self._generation = generation
        self._copy_s = timedelta(seconds=copy_s)
        self._busy = 0
        # gloo's thread would else release the last reference, and make a thread state of Python for
        # it. Python before 3.12 cannot be forked in that moment: a loader process hung for ever.
        self._recent: deque[dist.Work] = deque(maxlen=_RECENT)

    @property
    def busy(self) -> bool:
        """Return whether an operation is under way in some thread."""
        return self._busy > 0

    def let_go(self) -> None:
        """Drop the references to the inner groups; no operation may follow."""
        self._tree = ControlTree((), {}, 0)
        self._recent.clear()

    def _group(self, level: int) -> dist.ProcessGroup:
        """Return the group of a level; callers must not bind it to a local variable. A stored
        traceback would reference it, and releasing that would block in gloo's destructor."""
        return self._tree.levels[level].group

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._busy += 1
        try:
            yield
        except RuntimeError as error:
            if not is_transport_error(error):
                raise
            raise GroupError(
                f"{what} of generation {self._generation} did not end: {error}"
            ) from error.with_traceback(None)
        finally:
            self._busy -= 1

    def _wait(self, work: dist.Work) -> None:
        """Wait for `work`, and abandon it once the generation is severed."""
        self._recent.append(work)
        if not wait_unless_severed(work, self._is_live):
            raise GroupError(
                f"an operation of generation {self._generation} was cut and gloo did not let go of"
                " it"
            )

    def vote(self, place: str) -> bool:
        """Return whether every rank votes yes on the same `place`.

        The vote is one number, a digest: gloo's ring splits an all-reduce by elements, so that five
        elements need five times the messages.
        """
        ballot = xxhash.xxh3_64_intdigest(f"{self._generation} {place}".encode()) % _BALLOTS + 1
        total = torch.tensor([ballot], dtype=torch.int64, device="cpu")
        with self._doing("the vote"):
            for level in range(len(self._tree.levels)):
                self._wait(self._group(level).allreduce([total], AllreduceOptions()))
            for level in reversed(range(self._tree.below)):
                self._wait(self._group(level).broadcast([total], BroadcastOptions()))
        return int(total) == len(self._tree.present) * ballot

    def send(self, tensor: torch.Tensor, seat: int, tag: int) -> None:
        """Send a tensor to a seat."""
        with self._doing(f"the copy to seat {seat}"):
            self._copies(seat, "send", tensor, tag)

    def recv(self, tensor: torch.Tensor, seat: int, tag: int) -> None:
        """Receive a tensor from a seat."""
        with self._doing(f"the copy from seat {seat}"):
            self._copies(seat, "recv", tensor, tag)

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Return the values of all ranks that are present, in order of rank."""
        if len(value) > GATHER_BYTES_MAX:
            raise GroupError(
                f"{len(value)} bytes are too many to gather from every rank (at most"
                f" {GATHER_BYTES_MAX}); nothing was sent"
            )
        values = [value]
        with self._doing("a gather"):
            for level in range(len(self._tree.levels)):
                packed = msgspec.msgpack.encode(values)
                values = [each for part in self._gather(level, packed) for each in _unpack(part)]
            for level in reversed(range(self._tree.below)):
                values = _unpack(self._spread(level, msgspec.msgpack.encode(values)))
        return values

    def share(self, mine: torch.Tensor, outputs: list[torch.Tensor]) -> dist.Work:
        """Begin an all-gather of the own state among partners."""
        partners = self._tree.partners
        if partners is None:
            raise GroupError("this rank has no partners")
        with self._doing("an exchange of own state"):
            work = partners.group.allgather([outputs], [mine], AllgatherOptions())
        self._recent.append(work)
        return work

    def await_share(self, work: dist.Work) -> None:
        """Wait for a work of `share`."""
        with self._doing("an exchange of own state"):
            self._wait(work)

    def _copies(self, seat: int, operation: str, tensor: torch.Tensor, tag: int) -> None:
        place = self._tree.place_of(seat)
        getattr(self._tree.with_seat(seat).group, operation)([tensor], place, tag).wait(
            self._copy_s
        )

    def _gather(self, level: int, value: bytes) -> list[bytes]:
        """Return the values of the ranks of one level, in order."""
        size = torch.tensor([len(value)], dtype=torch.int64, device="cpu")
        sizes = [torch.zeros_like(size) for _ in range(self._group(level).size())]
        self._wait(self._group(level).allgather([sizes], [size], AllgatherOptions()))
        lengths = [int(size) for size in sizes]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8, device="cpu")
        mine[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        parts = [torch.zeros_like(mine) for _ in lengths]
        self._wait(self._group(level).allgather([parts], [mine], AllgatherOptions()))
        return [
            part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
        ]

    def _spread(self, level: int, value: bytes) -> bytes:
        """Return the value of the first rank of a level; what the others pass is not used."""
        size = torch.tensor([len(value)], dtype=torch.int64, device="cpu")
        self._wait(self._group(level).broadcast([size], BroadcastOptions()))
        data = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self._group(level).rank() == 0:
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self._wait(self._group(level).broadcast([data], BroadcastOptions()))
        return data.numpy().tobytes()


def _unpack(data: bytes) -> list[bytes]:
    return msgspec.msgpack.decode(data, type=list[bytes])
