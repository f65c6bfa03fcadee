"""Whether ranks that met in one collective meant the same one, and who did not.

What may differ by the rules of a collective is no mismatch: shapes of as many elements, what a
root alone gives or gets, the parts of an uneven gather. Who differs is who is in the minority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from outlast.fleet.trace.ops import BATCHED, Op
from outlast.fleet.trace.stuck import named

# What must be equal on all ranks: elements going in, coming out. Others are judged by kind only.
_BOTH = {
    "all_reduce", "allreduce", "allreduce_coalesced", "broadcast", "_broadcast_oop", "reduce",
    "_reduce_oop", "_all_gather_base", "_allgather_base", "all_gather_single",
    "all_gather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
}  # fmt: skip
_IN = {"reduce_scatter", "reduce_scatter_v"}
_OUT = {"all_gather", "all_gather_v", "allgather"}
_EXCHANGE = {"all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall", "alltoall_base"}
_ROOTED = {"scatter", "gather", "barrier", "all_reduce_barrier"}


class Differing(NamedTuple):
    """`what`: kind, size or dtype. `ranks`: the fewest who say it; all of them where none are."""

    what: str
    ranks: tuple[int, ...]
    said: str


def differing(ops: Mapping[int, Op], *, everybody: bool) -> Differing | None:
    """The first way in which these ranks' operations of one number cannot go together.

    `everybody`: all members are among them, which an exchange needs to be judged."""
    for what, of in (("kind", _kind), ("size", _size), ("dtype", _dtype)):
        values = {rank: of(op) for rank, op in ops.items()}
        if len(set(values.values())) > 1:
            return _apart(what, values, ops, _words[what])
    exchanged = [op for op in ops.values() if op.kind in _EXCHANGE]
    if everybody and len(exchanged) == len(ops):
        given = sum(sum(op.sizes[0]) for op in exchanged)
        taken = sum(sum(op.sizes[1]) for op in exchanged)
        if given != taken:
            said = f"together they give {given:,} elements and take {taken:,}"
            return Differing("size", tuple(ops), said)
    return None


def _kind(op: Op) -> str:
    return op.kind


def _size(op: Op) -> Hashable:
    if all(kind in _BOTH for kind in op.kind.split(BATCHED)):
        return op.sizes
    if op.kind in _IN:
        return op.sizes[0]
    return op.sizes[1] if op.kind in _OUT else None


def _dtype(op: Op) -> Hashable:
    return None if op.kind in _ROOTED or not op.dtypes else op.dtypes


def _apart(
    what: str, values: Mapping[int, Hashable], ops: Mapping[int, Op], say: Callable[[Op], str]
) -> Differing:
    counts = Counter(values.values())
    (usual, most), (_, second) = counts.most_common(2)
    if most == second:  # as many say the one as the other
        few = tuple(values)
        said = "; ".join(
            f"{named([rank for rank, one in values.items() if one == value])}: "
            + say(ops[next(rank for rank, one in values.items() if one == value)])
            for value in list(counts)[:4]
        )
        return Differing(what, few, said)
    few = tuple(rank for rank, value in values.items() if value != usual)
    others = next(op for rank, op in ops.items() if values[rank] == usual)
    return Differing(what, few, f"{say(ops[few[0]])} instead of {say(others)}")


def _elements(op: Op) -> str:
    counts = op.sizes[1] if op.kind in _OUT else op.sizes[0]
    shown = " + ".join(f"{count:,}" for count in counts[:4])
    more = f" + {len(counts) - 4} more tensors" if len(counts) > 4 else ""
    return f"{op.kind} of {shown or 'no'}{more} elements"


_words: dict[str, Callable[[Op], str]] = {
    "kind": lambda op: op.kind,
    "size": _elements,
    "dtype": lambda op: f"{op.kind} of {', '.join(op.dtypes)}",
}
