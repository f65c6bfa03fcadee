"""Control group: votes, state copies and small gathers among the ranks, hidden from scripts.

gloo connects every rank of a group with every other. Above FAN_OUT ranks the control group is
therefore a tree of groups: blocks of FAN_OUT ranks, blocks of their first ranks, and so on. A value
is reduced or gathered from the blocks up, and broadcast from the first ranks down. State is copied
in groups of two.

    level 1        0            32            64         first ranks of the blocks
    level 0    0 1 .. 31    32 33 .. 63    64 65 .. 95
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from outlast.errors import GroupError
from outlast.worker.groups.inner_group import InnerGroup, is_transport_error
from outlast.worker.groups.work_handles import wait_unless_severed

FAN_OUT = 32
GATHER_BYTES_MAX = 16 << 20
_SWAPS = 7  # tag of exchanges of inputs
_RECENT = 16  # works kept after their end
_BALLOTS = 1 << 44  # far from the largest share: a wrong place and a share never cancel by design


class ControlBlocks(NamedTuple):
    """The blocks of the control tree in which a rank is, from its leaf up."""

    blocks: tuple[tuple[int, ...], ...]
    has_top: bool  # the last one is the root of the tree


def control_blocks(place: int, size: int) -> ControlBlocks:
    """Return the blocks of a place among `size` ranks; those of one rank are left out if there are
    more."""
    blocks: list[tuple[int, ...]] = []
    stride = 1
    while True:
        width = stride * FAN_OUT
        first = place - place % width
        block = tuple(range(first, min(size, first + width), stride))
        if len(block) > 1 or size == 1:
            blocks.append(block)
        if width >= size or place != first:
            return ControlBlocks(tuple(blocks), width >= size)
        stride = width


def _name(ranks: tuple[int, ...], world: int) -> str:
    """Return the name of a block, "control" for one of all ranks."""
    return "control" if len(ranks) == world else f"control {ranks[0]}-{ranks[-1]} of {len(ranks)}"


def control_members(rank: int, present: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of a rank's blocks among those that are present, by name."""
    blocks = control_blocks(present.index(rank), len(present)).blocks
    members = (tuple(present[place] for place in block) for block in blocks)
    return {_name(ranks, len(present)): ranks for ranks in members}


class ControlTree(NamedTuple):
    """The groups of one rank. `levels`: of its blocks. `pairs`: seat -> group of two for copies;
    none where one block has all ranks. `below`: how many levels are below the root. `present`: all
    ranks of the generation. `partners`: those with which it exchanges its own state, if any."""

    levels: tuple[InnerGroup, ...]
    pairs: Mapping[int, InnerGroup]
    below: int
    present: tuple[int, ...] = ()
    partners: InnerGroup | None = None

    def with_seat(self, seat: int) -> InnerGroup:
        """Return the group for copies to or from a seat; callers must not bind it, see
        ControlGroup."""
        return self.pairs.get(seat, self.levels[0])

    def place_of(self, seat: int) -> int:
        """Return the place of a seat in the group for copies to or from it."""
        return 1 - self.pairs[seat].group.rank() if seat in self.pairs else self.present.index(seat)

    @classmethod
    def connect(
        cls,
        build: Callable[[str, tuple[int, ...]], InnerGroup],
        rank: int,
        present: tuple[int, ...],
        copies: Sequence[tuple[int, int]],
        partners: tuple[int, ...] = (),
    ) -> ControlTree:
        """Build the groups, those for copies in their order, which is the same on all ranks."""
        members = control_members(rank, present)
        has_top = control_blocks(present.index(rank), len(present)).has_top
        levels = tuple(build(name, ranks) for name, ranks in members.items())
        pairs: dict[int, InnerGroup] = {}
        for pair in copies if len(present) > FAN_OUT else ():
            if rank in pair:
                low, high = sorted(pair)
                pairs[low + high - rank] = build(f"copies {low}-{high}", (low, high))
        name = "partners " + "-".join(map(str, partners))
        together = build(name, partners) if partners else None
        return cls(levels, pairs, len(levels) - has_top, present, together)


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

    def vote(self, place: str, share: int = 0) -> bool:
        """Return whether every rank votes yes on the same `place`, and the shares of all ranks add
        up to 0, modulo 2**64.

        The vote is one number, a digest: gloo's ring splits an all-reduce by elements, so that five
        elements need five times the messages.
        """
        ballot = xxhash.xxh3_64_intdigest(f"{self._generation} {place}".encode()) % _BALLOTS + 1
        total = torch.tensor([_signed(ballot + share)], dtype=torch.int64, device="cpu")
        with self._doing("the vote"):
            for level in range(len(self._tree.levels)):
                self._wait(self._group(level).allreduce([total], AllreduceOptions()))
            for level in reversed(range(self._tree.below)):
                self._wait(self._group(level).broadcast([total], BroadcastOptions()))
        return int(total) == _signed(len(self._tree.present) * ballot)

    def send(self, tensor: torch.Tensor, seat: int, tag: int) -> None:
        """Send a tensor to a seat."""
        with self._doing(f"the copy to seat {seat}"):
            self._copies(seat, "send", tensor, tag)

    def recv(self, tensor: torch.Tensor, seat: int, tag: int) -> None:
        """Receive a tensor from a seat."""
        with self._doing(f"the copy from seat {seat}"):
            self._copies(seat, "recv", tensor, tag)

    def swap(self, value: bytes, to: int, source: int) -> bytes:
        """Send bytes to a rank of this one's block, and return those of another; -1: of none."""
        with self._doing("an exchange of inputs"):
            data = torch.frombuffer(bytearray(value or b"."), dtype=torch.uint8)
            size = torch.tensor([len(value)], dtype=torch.int64, device="cpu")
            sent = [self._point("send", each, to) for each in (size, data) if to >= 0]
            result = b""
            if source >= 0:
                count = torch.zeros_like(size)
                self._point("recv", count, source).wait(self._copy_s)
                found = torch.zeros(max(1, int(count)), dtype=torch.uint8, device="cpu")
                self._point("recv", found, source).wait(self._copy_s)
                result = found.numpy().tobytes()[: int(count)]
            for work in sent:
                work.wait(self._copy_s)
        return result

    def _point(self, operation: str, tensor: torch.Tensor, seat: int) -> dist.Work:
        place = self._tree.present.index(seat) % FAN_OUT
        work = getattr(self._group(0), operation)([tensor], place, _SWAPS)
        self._recent.append(work)
        return work

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


def _signed(number: int) -> int:
    """Return a number modulo 2**64, from -2**63 on."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _unpack(data: bytes) -> list[bytes]:
    return msgspec.msgpack.decode(data, type=list[bytes])
