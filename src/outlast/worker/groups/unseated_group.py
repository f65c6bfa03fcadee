"""Process groups of a hot spare, which has no rank yet.

The *stand-in* is a rank that the process may not get.

| who asks for the rank | answer while there is none |
|---|---|
| torch's DDP and log records, Outlast, C++ outside of a Python call | the stand-in: none keeps it |
| device meshes, DTensor, FSDP2 | the stand-in: they are moved (`unseated_mesh`) |
| torch's `DistributedSampler` | a `PendingRank`, which becomes the rank when it is used |
| anything else | none: `wait` returns when the spare has a seat |
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from outlast.worker.groups.closed_answers import RankPlace
from outlast.worker.groups.rendezvous import meeting_name
from outlast.worker.groups.stable_group import StableGroup
from outlast.worker.groups.work_handles import opaque_class

_IN_BOUNDS = 0
_PASSING = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.distributed.utils",  # DDP's broadcast of parameters
)
_KEEPS_NONE = ("torch.nn.parallel.distributed",)
_LOG_RECORDS = ("torch._logging._internal", ("trace_structured", "format"))
_SAMPLER = "torch.utils.data.distributed"

Wait = Callable[[str], int]  # from who asks, to the rank; blocks until there is one


class PendingRank:
    """Rank of a worker that has none yet; every use except the sampler's check of its bounds waits
    for it."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __index__(self) -> int:
        return self._wait("a DistributedSampler that is read outside session.batches")

    __int__ = __index__
    __class__ = property(lambda _self: int)  # type: ignore[assignment] - isinstance(rank, int)

    def __getattr__(self, name: str) -> Any:
        return getattr(int(self), name)

    def __lt__(self, other: int) -> bool:
        return (_IN_BOUNDS if _is_check_of_bounds(sys._getframe(1)) else int(self)) < other

    def __ge__(self, other: int) -> bool:
        return (_IN_BOUNDS if _is_check_of_bounds(sys._getframe(1)) else int(self)) >= other

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def _waiting(name: str) -> Callable[..., Any]:
    return lambda rank, *others: getattr(int(rank), name)(*others)


_OF_ANY_OBJECT = {
    "__eq__",
    "__ne__",
    "__gt__",
    "__le__",
    "__hash__",
    "__repr__",
    "__str__",
    "__format__",
}
for _name in ({*dir(int)} - {*dir(object)} | _OF_ANY_OBJECT) - {"__int__", "__index__"}:
    if _name.startswith("__") and _name != "__getnewargs__":
        setattr(PendingRank, _name, _waiting(_name))


def _is_check_of_bounds(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__init__" and module_of(frame) == _SAMPLER


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs."""
    return frame.f_globals.get("__name__", "")


@opaque_class
class UnseatedGroup(StableGroup):
    """A group of a process that learns its own rank later.

    `place` has the rank of the stand-in. The members are in one of `rows`: in that of the rank.
    """

    wait: Wait | None = None  # None: `place` has the rank
    is_moved: Callable[[FrameType], bool] = staticmethod(lambda _frame: False)
    rows: tuple[tuple[int, ...], ...] = ()

    def move(self, rank: int, earlier: list[tuple[int, ...]]) -> None:
        """Become the group of `rank`. `earlier`: the ranks of the groups before it, to which this
        one's are added."""
        self.wait = None
        self.ranks = next(row for row in self.rows if rank in row)
        self.place = RankPlace(self.ranks.index(rank), len(self.ranks))
        self.meeting = meeting_name(self.ranks, earlier.count(self.ranks))
        earlier.append(self.ranks)
        by_rank = {member: at for at, member in enumerate(self.ranks)}
        known: Any = distributed_c10d._world.pg_group_ranks  # noqa: SLF001 - torch has no setter
        if self in known:  # the script has not destroyed it
            known[self] = by_rank

    def rank(self) -> Any:
        """Return the rank, or what stands for it (see the module)."""
        return self._rank_for(sys._getframe(1), lazily=True)  # noqa: SLF001

    def getRank(self) -> int:  # noqa: N802 - the name that torch's C++ looks up
        return self._rank_for(sys._getframe(1), lazily=False)  # noqa: SLF001

    def _rank_for(self, frame: FrameType | None, *, lazily: bool) -> Any:
        if self.wait is None:
            return self.place.rank
        while frame is not None and module_of(frame) in _PASSING:
            frame = frame.f_back
        if frame is None or _keeps_none(frame) or self.is_moved(frame):
            return self.place.rank
        if lazily and _is_check_of_bounds(frame):
            return PendingRank(self.wait)
        reader = frame
        while module_of(reader).startswith("torch.") and reader.f_back is not None:
            reader = reader.f_back  # who has called torch
        return self.wait(f"the rank, read in {reader.f_code.co_filename}:{reader.f_lineno}")


def _keeps_none(frame: FrameType) -> bool:
    name = module_of(frame)
    if name == _LOG_RECORDS[0]:
        return frame.f_code.co_name in _LOG_RECORDS[1]
    return name in _KEEPS_NONE or name.startswith("outlast.")
