"""Ranks that are absent from a generation, and collectives without them.

The world size of the script stays as it is. Sums are those of the whole world, as though each rank
without a batch had contributed the mean of the others: each contribution is multiplied by the size
of the group over the number of its ranks that have a batch. Averages, whoever divides by the world
size, are then those of the ranks with a batch, and so are ratios of two sums. An idle rank, which
has no batch in this step, contributes zeros. Sums of whole numbers cannot be scaled exactly, so
that a ratio with one would be wrong: they are refused, but for the counts of DDP itself, which only
have to be above zero.

Ranks that need each other leave together, in units (controller/recovery/rank_units.py): a unit is
present as a whole, and has a batch as a whole. Collectives within one are not changed.

| collective | with absent ranks |
|---|---|
| all-reduce, reduce: SUM, AVG of floating-point numbers | as above |
| all-reduce, reduce: MIN, MAX, BAND, BOR | over the ranks that are present |
| broadcast, reduce | if their root is present; those of DDP itself come from the first one |
| barrier | over the ranks that are present |
| anything else | needs all members of its group: they are of one unit, and leave together |

A sum of floating-point numbers that is no sum (a seed that rank 0 adds to the zeros of others, a
table in which each rank fills its own place) would be scaled as well. It is recognised by its
values while all ranks are present: on each rank, each element of a small one is zero or the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, ReduceOptions

from outlast.controller.recovery.rank_units import RankUnits, Units
from outlast.errors import UnsupportedError
from outlast.transport.group_messages import GroupRanks, GroupUse
from outlast.transport.rank_spans import pack_ranks
from outlast.worker.groups.work_handles import FinishedWork

_SUMS = ("SUM", "AVG")
_OTHERS = ("MIN", "MAX", "BAND", "BOR")
_KINDS = {name: getattr(dist.ReduceOp, name) for name in (*_SUMS, *_OTHERS)}
_REDUCED = ("allreduce", "allreduce_coalesced", "reduce")
_ROOTED = ("broadcast", "reduce")
_BETWEEN_TWO = ("send", "recv")
_TABLE_MAX = 1024  # elements; a larger tensor is a gradient
_LINES_MAX = 64  # of the script, with small sums
_GROUPS = "outlast.worker.groups."
# torch.autograd: its reducer calls from a backward without a frame of its own.
_OF_DDP = ("torch.nn.parallel.distributed", "outlast.worker.state.ddp_buckets", "torch.autograd")
_POSSIBLE = frozenset((*_REDUCED, *_ROOTED, "barrier"))


class RankPresence:
    """Ranks of the connected generation, and of the present step."""

    def __init__(self) -> None:
        self.absent: frozenset[int] = frozenset()
        self.idle: frozenset[int] = frozenset()  # present, and without a batch in this step
        self.units = RankUnits(0)
        self._notes = False  # collectives are those of a step that may count
        self._needs: dict[str, None] = {}  # collectives of phases that need all members
        self._used: dict[tuple[str, int, int], None] = {}  # what was noted of a group
        self._whole: dict[GroupRanks, None] = {}  # groups of collectives, see GroupUse
        self._reduced: dict[GroupRanks, None] = {}
        self._roots: dict[tuple[int, GroupRanks], None] = {}
        self._tables: dict[str, bool] = {}
        self.has_news = False  # there are groups that were not reported yet

    def set(self, absent: Collection[int], world: int, units: Units) -> None:
        """Set the ranks that are absent from a generation, and the units of its world."""
        self.absent = frozenset(absent)
        self.set_units(world, units)

    def set_units(self, world: int, units: Units) -> None:
        """Set the units of a world; (): each rank is one, or they are known already."""
        if units or self.units.world != world:
            self.units = RankUnits(world, units)

    def of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of the ranks that are present, in their order."""
        return tuple(rank for rank in ranks if rank not in self.absent)

    def first_unit(self) -> tuple[int, ...]:
        """Return the first unit that is present."""
        return next(unit for unit in self.units.units if self.absent.isdisjoint(unit))

    def begin_phase(self, idle: frozenset[int], *, is_real: bool) -> None:
        """Begin an attempt. What rehearsals call (DDP settles its buckets) is not needed again."""
        self.idle, self._notes = idle, is_real

    # --- what the script's phases need ---

    def _note(self, op: str, ranks: Sequence[int], rank: int, args: Sequence[Any]) -> None:
        """Note a collective of a phase."""
        if len(ranks) == 1:
            return
        if op in _ROOTED and not _is_of_ddp():
            self._add(self._roots, "root", ranks, ranks[_root(args)])
        if op in _BETWEEN_TWO:
            self._needs[op] = None
            pair = ranks[rank], ranks[_root(args)]
            self._add(self._whole, "pair", ranks, pair[1], tuple(sorted({*pair})))
        elif op not in _POSSIBLE:
            self._need(op, ranks)
        elif op in _REDUCED and _kind(args) in _SUMS and _is_whole(args) and not _is_of_ddp():
            self._need(f"{op} with SUM of whole numbers (make them floating-point)", ranks)
        elif op in _REDUCED and not _kind(args):
            name = f"{op} with another operation than SUM, AVG, MIN, MAX, BAND and BOR"
            self._need(name, ranks)
        elif op in _REDUCED:
            self._add(self._reduced, "reduced", ranks)

    def _need(self, name: str, ranks: Sequence[int]) -> None:
        """Note a collective that needs all members of its group."""
        self._needs[name] = None
        self._add(self._whole, "whole", ranks)

    def _add(
        self,
        groups: dict[Any, None],
        kind: str,
        ranks: Sequence[int],
        peer: int = -1,
        members: Sequence[int] = (),
    ) -> None:
        """Note a group, whose ranks stay the same object; `peer`: a root, or the other of two."""
        if (known := (kind, id(ranks), peer)) in self._used:
            return
        self._used[known] = None
        group = pack_ranks(sorted(members or ranks))
        groups[(peer, group) if kind == "root" else group] = None
        self.has_news = True

    def needs(self) -> str:
        """Return the collectives of phases that need all members of their groups."""
        return ", ".join(sorted(self._needs))

    def use(self, sampler: tuple[int, ...] = ()) -> GroupUse:
        """Return the groups of phases, and of the loader's `sampler`."""
        whole, reduced = tuple(sorted(self._whole)), tuple(sorted(self._reduced))
        return GroupUse(whole, reduced, tuple(sorted(self._roots)), sampler)

    def watch(
        self, op: str, ranks: Sequence[int], rank: int, args: Sequence[Any]
    ) -> Callable[[], None] | None:
        """Return what has to be called once a sum is complete; None for most collectives."""
        if not self._notes or op not in _REDUCED or len(ranks) == 1 or self.absent or self.idle:
            return None
        if op == "reduce" and ranks[_root(args)] != ranks[rank]:
            return None  # its result is the root's
        sums: list[torch.Tensor] = list(args[0])
        if any(not each.is_floating_point() or each.numel() > _TABLE_MAX for each in sums):
            return None
        if _kind(args) != "SUM" or _is_of_ddp() or not (line := _calling_line()):
            return None
        if self._tables.get(line, len(self._tables) < _LINES_MAX):
            return partial(self._compare, line, [each.detach().clone() for each in sums], sums)
        return None

    def _compare(self, line: str, own: list[torch.Tensor], sums: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for mine, result in zip(own, sums, strict=True):
                if not bool(((mine == 0) | (mine == result)).all()):
                    self._tables[line] = False
                elif bool((result != 0).any()):
                    self._tables.setdefault(line, True)

    def tables(self) -> dict[str, bool]:
        """Return lines of the script with small sums, and whether they have always been tables, as
        far as this rank can see: each element is zero here, or the result."""
        return dict(self._tables)

    # --- collectives without them ---

    def run(
        self,
        call: Callable[..., Any],
        op: str,
        ranks: Sequence[int],
        rank: int,
        args: Sequence[Any],
    ) -> Any:
        """Run a collective of a group, `rank` of whose `ranks` is this one, and return its work.
        Raises UnsupportedError."""
        if self._notes:
            self._note(op, ranks, rank, args)
        if self.absent.isdisjoint(ranks) and self.idle.isdisjoint(ranks):
            return call(*args)
        here, values, joined = self.of(ranks), [*args], ranks
        if op in _BETWEEN_TWO:
            joined = ranks[rank], ranks[_root(args)]
        if len(self.units.numbers(joined)) == 1:  # which is whole, and idle or not as a whole
            if op in _BETWEEN_TWO:
                values[1] = here.index(joined[1])
            return call(*values)
        if op not in _POSSIBLE:
            if len(here) == len(ranks):
                return call(*args)
            raise self._refused(op, "it needs all ranks of its group")
        if op in _ROOTED:
            root = ranks[_root(args)]
            if root in self.absent and _is_of_ddp():
                root = here[0]
            if root in self.absent:
                raise self._refused(op, f"its root, rank {root}, is absent")
            values[1:2] = [_with_root(args[1] if len(args) > 1 else 0, here.index(root))]
        if op not in _REDUCED or _kind(args) in _OTHERS:
            return call(*values)
        if not _kind(args):
            raise self._refused(op, f"its operation is none of {', '.join(_KINDS)}")
        if _is_whole(args) and not _is_of_ddp():
            raise self._refused(op, "sums of whole numbers cannot be scaled")
        if why := self.units.why_unscalable(ranks):
            raise self._refused(op, why)
        return self._run_sum(call, here, len(ranks), ranks[rank], values)

    def _refused(self, op: str, why: str) -> UnsupportedError:
        now = "while ranks are absent"
        if not self.absent:
            now = f"in a step in which ranks {', '.join(map(str, sorted(self.idle)))} have no batch"
        return UnsupportedError(
            f"{op} cannot run {now}: {why}; no phase had called it so before ranks left, else they"
            " had not been let go; call it in an early phase, or take shrink out of the policy"
        )

    def _run_sum(
        self, call: Callable[..., Any], here: Sequence[int], size: int, own: int, args: list[Any]
    ) -> Any:
        working = sum(rank not in self.idle for rank in here)
        whole = len(here) if _kind(args) == "AVG" else size
        tensors: list[torch.Tensor] = list(args[0])
        exact = [each for each in tensors if not _is_inexact(each)]
        with torch.no_grad():
            for each in tensors:
                if own in self.idle:
                    each.zero_()
                elif _is_inexact(each):
                    each.mul_(whole / working)
        if len(here) == 1 and _kind(args) == "AVG":  # NCCL may be wrong for one rank
            return FinishedWork(tensors, 0)
        work = call(*args)
        if not exact or not working:
            return work
        if work is not None:
            work.wait()
        with torch.no_grad():
            for each in exact:
                scaled = each.abs().mul_(2 * whole).add_(working).floor_divide_(2 * working)
                each.copy_(scaled * each.sign())
        return FinishedWork(tensors, here.index(own))


def _is_whole(args: Sequence[Any]) -> bool:
    return any(not _is_inexact(each) for each in args[0])


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kind(args: Sequence[Any]) -> str:
    """Return the name of a reduction, "" for others than those of the table."""
    kind = getattr(args[1], "reduceOp", args[1]) if len(args) > 1 else dist.ReduceOp.SUM
    return next((name for name, each in _KINDS.items() if kind == each), "")


def _root(args: Sequence[Any]) -> int:
    options = args[1] if len(args) > 1 else 0
    return int(getattr(options, "rootRank", options))


def _with_root(options: Any, root: int) -> Any:
    """Return options of a broadcast or a reduce with another root."""
    if isinstance(options, int):
        return root
    fresh: Any = ReduceOptions() if hasattr(options, "reduceOp") else BroadcastOptions()
    for name in ("reduceOp", "rootTensor", "timeout", "asyncOp"):
        if hasattr(options, name):
            setattr(fresh, name, getattr(options, name))
    fresh.rootRank = root
    return fresh


def _is_of_ddp() -> bool:
    """Return whether DDP itself makes its buffers, the order of its buckets or unused parameters
    known to all ranks: any rank may be the source."""
    frame = sys._getframe(2)  # noqa: SLF001 - there is no other sign of it
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_GROUPS):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__", "").startswith(_OF_DDP)


def _calling_line() -> str:
    """Return the line of the script, or of its library, that calls a collective; "" without one."""
    frame = sys._getframe(2)  # noqa: SLF001 - there is no other sign of it
    while frame is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in ("outlast", "torch"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
