"""Stalled collectives, mismatched collectives, and sends without receives, by group.

All ranks number a group's collectives alike. The stalled one is the first at which they diverge:
with `last(r)` the last number that rank r entered, the first one above `min(last)`, if it exists,
was not entered by all ranks; up to there all entered, and the first that differs or was not
completed counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct, field

from outlast.fleet.flight_recorder.recorded_operations import (
    BATCHED,
    UNDER_WAY,
    RecordedGroup,
    RecordedOp,
    format_ranks,
)

StallKind = Literal[
    "absent",  # some ranks entered it, others did not
    "mismatch",  # all entered, with different operations
    "unfinished",  # all entered the same, and it did not complete
    "no-dump",  # all ranks with a dump entered; a rank without one may not have
    "undecided",  # the decisive records have been overwritten
]
Confidence = Literal["sure", "likely", "unsure"]


class Stall(Struct, frozen=True, kw_only=True):
    """Operation of a group that did not complete. `waiting`: ranks inside of it."""

    kind: StallKind
    group: str
    members: tuple[int, ...]
    op: str
    seq: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    since_ns: int | None  # time that the first waiting rank entered it; None: not recorded
    confidence: Confidence
    description: str = field(name="said")
    where: str = ""  # the script's line at which the others wait


# Equal on all ranks: elements going in, coming out. Others are compared by kind only.
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


class CollectiveMismatch(NamedTuple):
    """Difference between ranks, with its description.

    `what`: kind, size or dtype. `ranks`: the minority; all of them in a tie.
    """

    what: str
    ranks: tuple[int, ...]
    description: str


def find_mismatch(ops: Mapping[int, RecordedOp], *, is_complete: bool) -> CollectiveMismatch | None:
    """Return the first mismatch of these ranks' operations of one number.

    `is_complete`: all members are among them, which the check of an exchange needs.
    """
    for what, of in (("kind", _kind), ("size", _size), ("dtype", _dtype)):
        values = {rank: of(op) for rank, op in ops.items()}
        if len(set(values.values())) > 1:
            return _find_minority(what, values, ops, _words[what])
    exchanged = [op for op in ops.values() if op.kind in _EXCHANGE]
    if is_complete and len(exchanged) == len(ops):
        given = sum(sum(op.sizes[0]) for op in exchanged)
        taken = sum(sum(op.sizes[1]) for op in exchanged)
        if given != taken:
            detail = f"together they give {given:,} elements and take {taken:,}"
            return CollectiveMismatch("size", tuple(ops), detail)
    return None


def _kind(op: RecordedOp) -> str:
    return op.kind


def _size(op: RecordedOp) -> Hashable:
    if all(kind in _BOTH for kind in op.kind.split(BATCHED)):
        return op.sizes
    if op.kind in _IN:
        return op.sizes[0]
    return op.sizes[1] if op.kind in _OUT else None


def _dtype(op: RecordedOp) -> Hashable:
    return None if op.kind in _ROOTED or not op.dtypes else op.dtypes


def _find_minority(
    what: str,
    values: Mapping[int, Hashable],
    ops: Mapping[int, RecordedOp],
    describe: Callable[[RecordedOp], str],
) -> CollectiveMismatch:
    counts = Counter(values.values())
    (usual, most), (_, second) = counts.most_common(2)
    if most == second:  # a tie
        few = tuple(values)
        detail = "; ".join(
            f"{format_ranks([rank for rank, own in values.items() if own == value])}: "
            + describe(ops[next(rank for rank, own in values.items() if own == value)])
            for value in list(counts)[:4]
        )
        return CollectiveMismatch(what, few, detail)
    few = tuple(rank for rank, value in values.items() if value != usual)
    majority = next(op for rank, op in ops.items() if values[rank] == usual)
    return CollectiveMismatch(what, few, f"{describe(ops[few[0]])} instead of {describe(majority)}")


def _elements(op: RecordedOp) -> str:
    counts = op.sizes[1] if op.kind in _OUT else op.sizes[0]
    shown = " + ".join(f"{count:,}" for count in counts[:4])
    more = f" + {len(counts) - 4} more tensors" if len(counts) > 4 else ""
    return f"{op.kind} of {shown or 'no'}{more} elements"


_words: dict[str, Callable[[RecordedOp], str]] = {
    "kind": lambda op: op.kind,
    "size": _elements,
    "dtype": lambda op: f"{op.kind} of {', '.join(op.dtypes)}",
}


class _Site(NamedTuple):
    """One numbered collective of a group, and the ranks' records of it."""

    group: RecordedGroup
    seq: int
    ops: dict[int, RecordedOp]

    @property
    def kind(self) -> str:
        kinds = {op.kind for op in self.ops.values()}
        return kinds.pop() if len(kinds) == 1 else "collective"

    @property
    def called(self) -> str:
        return f"{self.kind} {self.seq} of {self.group.called}"

    def stall(
        self,
        kind: StallKind,
        ranks: Sequence[int],
        waiting: Sequence[int],
        confidence: Confidence,
        detail: str,
    ) -> Stall:
        waits = [self.ops[rank] for rank in waiting if rank in self.ops]
        return Stall(
            kind=kind,
            group=self.group.called,
            members=self.group.members,
            op=self.kind,
            seq=self.seq,
            ranks=tuple(sorted(ranks)),
            waiting=tuple(sorted(waiting)),
            since_ns=min((op.t_ns for op in waits), default=None),
            confidence=confidence,
            description=detail,
            where=next((op.where for op in waits if op.where), ""),
        )


def find_collective_stall(group: RecordedGroup) -> Stall | None:
    """Return the stall of this group's collectives, if there is one."""
    lasts = {rank: track.last for rank, track in group.tracks.items() if track.last is not None}
    met = min(lasts.values(), default=0)
    highest = max(lasts.values(), default=0)
    seqs = {seq for track in group.tracks.values() for seq in track.ops}
    blind = len(lasts) < len(group.members)  # then it is unknown whether all entered
    left_to = min((track.left_to for track in group.tracks.values()), default=-1)
    for seq in sorted(seq for seq in seqs if left_to < seq <= met):
        if found := _mismatch_or_hang(_site(group, seq), blind=blind):
            return found
    if met < highest:
        # Not met + 1: after a reset of the recorder the numbers continue.
        return _absent_stall(_site(group, min(seq for seq in seqs if seq > met)), lasts)
    return _unrecorded_stall(_site(group, met), lasts) if blind and highest else None


def _site(group: RecordedGroup, seq: int) -> _Site:
    ops = {rank: track.ops[seq] for rank, track in group.tracks.items() if seq in track.ops}
    return _Site(group, seq, ops)


def _has_completed(group: RecordedGroup, rank: int, seq: int) -> bool:
    """Return whether a rank completed it: known so, or ended with later ones entered."""
    track = group.tracks[rank]
    was_followed = track.ops[seq].progress == "ended" and (track.last or 0) > seq
    return was_followed or track.left_to >= seq


def _mismatch_or_hang(site: _Site, *, blind: bool) -> Stall | None:
    """Return the stall of a collective that all judged ranks entered, if there is one."""
    group = site.group
    ops = site.ops
    inside = [rank for rank in ops if not _has_completed(group, rank, site.seq)]
    if not inside:
        return None
    if split := find_mismatch(ops, is_complete=len(ops) == len(group.members)):
        subject = f"{format_ranks(split.ranks)} entered " if len(split.ranks) < len(ops) else ""
        detail = (
            f"in {site.called} the ranks do not have the same {split.what}:"
            f" {subject}{split.description}"
        )
        sure = len(split.ranks) < len(ops)
        return site.stall("mismatch", split.ranks, inside, "sure" if sure else "likely", detail)
    inside = [rank for rank in inside if ops[rank].progress in UNDER_WAY]
    return None if blind or not inside else _unfinished_stall(site, inside)


def _unfinished_stall(site: _Site, inside: list[int]) -> Stall:
    queued = [rank for rank in inside if site.ops[rank].progress == "queued"]
    running = [rank for rank in inside if site.ops[rank].progress == "running"]
    done = [rank for rank in site.ops if rank not in inside]
    entered = f"all ranks entered {site.called}"
    if queued and running:
        detail = (
            f"{entered}; the GPUs of {format_ranks(queued)} have not started it (an earlier"
            f" operation on their stream does not end), and {format_ranks(running)} wait in it"
        )
        return site.stall("unfinished", queued, running, "likely", detail)
    if done:
        detail = f"{entered}; {format_ranks(done)} completed it, {format_ranks(inside)} did not"
        return site.stall("unfinished", inside, inside, "likely", detail)
    if queued:
        detail = f"{entered}, and no GPU has started it: an earlier operation does not end"
        return site.stall("unfinished", (), queued, "unsure", detail)
    detail = f"{entered}, the same on all, and none completed it: the network between them, or"
    if not site.group.known:
        detail += " a member that never used the group, which the dumps cannot show"
        return site.stall("unfinished", (), inside, "unsure", detail)
    detail += " a kernel that does not end"
    return site.stall("unfinished", (), inside, "likely", detail)


def _absent_stall(site: _Site, lasts: Mapping[int, int]) -> Stall:
    """Return the stall of a collective that some ranks entered and others did not."""
    group = site.group
    absent = [rank for rank, last in lasts.items() if last < site.seq]
    entered = [rank for rank, last in lasts.items() if last >= site.seq]
    unknown = [rank for rank in group.members if rank not in lasts]
    confidence: Confidence = "sure" if group.known else "likely"
    never = f"never entered {site.called}"
    if not any(lasts[rank] for rank in absent):
        never = f"entered nothing of {group.called}, and so not {site.kind} {site.seq}"
    detail = f"{format_ranks(absent)} {never}, which {format_ranks(entered)} entered"
    if all(group.tracks[rank].left_to >= site.seq for rank in entered):
        detail += " and completed: these dumps may be from different times"
        confidence = "unsure"
    if unknown:
        detail += f"; for {format_ranks(unknown)} it is unknown"
    return site.stall("absent", absent, entered, confidence, detail)


def _unrecorded_stall(site: _Site, lasts: Mapping[int, int]) -> Stall | None:
    """Return the stall of the last collective if ranks without records may not have entered it."""
    group = site.group
    ops = site.ops
    inside = [rank for rank in ops if group.tracks[rank].left_to < site.seq]
    if not inside:
        return None
    unknown = [rank for rank in group.members if rank not in lasts]
    without = [rank for rank in unknown if rank not in group.tracks]
    detail = f"the last collective that {format_ranks(lasts)} entered is {site.called}"
    if without:
        detail += f"; {format_ranks(without)} left no readable dump, and may not have entered it"
        waits = any(ops[rank].progress in UNDER_WAY for rank in inside)
        return site.stall("no-dump", without, inside, "likely" if waits else "unsure", detail)
    detail += f"; the records of {format_ranks(unknown)} in that group have been overwritten"
    return site.stall("undecided", unknown, inside, "unsure", detail)


def find_pair_stalls(group: RecordedGroup) -> list[Stall]:
    """Return one stall for each waiting pair of ranks, oldest first."""
    found = [
        stuck
        for source, target in _pairs(group)
        if (stuck := _find_pair_stall(group, source, target)) is not None
    ]
    return sorted(found, key=lambda stall: stall.since_ns or 0)


def _pairs(group: RecordedGroup) -> list[tuple[int, int]]:
    """Return the pairs of sends and receives, in group ranks."""
    size = len(group.members)
    return sorted(
        {
            (op.source, op.target)
            for track in group.tracks.values()
            for op in track.pairs
            if op.source < size and op.target < size
        }
    )


def _find_pair_stall(group: RecordedGroup, source: int, target: int) -> Stall | None:
    sender = group.members[source]
    receiver = group.members[target]
    sends = list(_matching_ops(group, sender, "send", source, target))
    receives = list(_matching_ops(group, receiver, "recv", source, target))
    complete = all(group.tracks[rank].whole for rank in (sender, receiver) if rank in group.tracks)
    waiting_sends = [op for op in sends if op.progress in UNDER_WAY]
    waiting_receives = [op for op in receives if op.progress in UNDER_WAY]
    counted = (
        (len(sends), len(receives)) if complete else (len(waiting_sends), len(waiting_receives))
    )
    if not waiting_sends and not waiting_receives:
        return None
    if counted[0] > counted[1]:
        return _unmatched_stall(group, waiting_sends or sends[-1:], sender, receiver, "send")
    if counted[1] > counted[0]:
        return _unmatched_stall(group, waiting_receives or receives[-1:], receiver, sender, "recv")
    first = min(waiting_sends + waiting_receives, key=lambda op: op.t_ns)
    detail = (
        f"rank {sender} sends to rank {receiver} in {group.called}, both have entered it, and it"
        " does not complete: the network between them, or different sizes"
    )
    ranks = (sender, receiver)
    return _pair_stall(group, first, "unfinished", (), ranks, detail)


def _matching_ops(
    group: RecordedGroup, rank: int, kind: str, source: int, target: int
) -> Iterator[RecordedOp]:
    if rank in group.tracks:
        for op in group.tracks[rank].pairs:
            if op.kind == kind and (op.source, op.target) == (source, target):
                yield op


def _unmatched_stall(
    group: RecordedGroup, ops: list[RecordedOp], here: int, there: int, kind: str
) -> Stall:
    verb, other = ("sends to", "receive") if kind == "send" else ("waits to receive from", "send")
    detail = f"rank {here} {verb} rank {there} in {group.called}, and "
    if there not in group.tracks:
        detail += f"{format_ranks([there])} left no readable dump"
        return _pair_stall(group, ops[0], "no-dump", (there,), (here,), detail)
    detail += f"rank {there} has not entered that {other}"
    return _pair_stall(group, ops[0], "absent", (there,), (here,), detail)


def _pair_stall(
    group: RecordedGroup,
    op: RecordedOp,
    kind: StallKind,
    ranks: tuple[int, ...],
    waiting: tuple[int, ...],
    detail: str,
) -> Stall:
    return Stall(
        kind=kind,
        group=group.called,
        members=group.members,
        op=op.kind,
        seq=op.seq,
        ranks=ranks,
        waiting=waiting,
        since_ns=op.t_ns,
        confidence="likely",
        description=detail,
        where=op.where,
    )
