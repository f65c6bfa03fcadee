"""Sends without receives: what stops between two ranks of a group.

The k-th send from one rank to another goes with the other's k-th receive from it. Where records
have been written over, only those still under way can be counted against each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from outlast.fleet.trace.groups import Group
from outlast.fleet.trace.ops import UNDER_WAY, Op
from outlast.fleet.trace.stuck import Stuck, StuckKind, named


def judge(group: Group) -> list[Stuck]:
    """One finding for each pair of ranks that waits, oldest first."""
    found = [
        stuck
        for source, target in _pairs(group)
        if (stuck := _between(group, source, target)) is not None
    ]
    return sorted(found, key=lambda one: one.since_ns or 0)


def _pairs(group: Group) -> list[tuple[int, int]]:
    """As the group counts its ranks, and only those it has."""
    size = len(group.members)
    return sorted(
        {
            (op.source, op.target)
            for track in group.tracks.values()
            for op in track.pairs
            if op.source < size and op.target < size
        }
    )


def _between(group: Group, source: int, target: int) -> Stuck | None:
    sender, receiver = group.members[source], group.members[target]
    sends = list(_of(group, sender, "send", source, target))
    receives = list(_of(group, receiver, "recv", source, target))
    whole = all(group.tracks[rank].whole for rank in (sender, receiver) if rank in group.tracks)
    waiting_sends = [op for op in sends if op.progress in UNDER_WAY]
    waiting_receives = [op for op in receives if op.progress in UNDER_WAY]
    counted = (len(sends), len(receives)) if whole else (len(waiting_sends), len(waiting_receives))
    if not waiting_sends and not waiting_receives:
        return None
    if counted[0] > counted[1]:
        return _alone(group, waiting_sends or sends[-1:], sender, receiver, "send")
    if counted[1] > counted[0]:
        return _alone(group, waiting_receives or receives[-1:], receiver, sender, "recv")
    first = min(waiting_sends + waiting_receives, key=lambda op: op.t_ns)
    said = (
        f"rank {sender} sends to rank {receiver} in {group.called}, both have entered it, and it"
        " does not end: the network between them, or sizes that differ"
    )
    ranks = (sender, receiver)
    return _stuck(group, first, "unfinished", (), ranks, said)


def _of(group: Group, rank: int, kind: str, source: int, target: int) -> Iterator[Op]:
    if rank in group.tracks:
        for op in group.tracks[rank].pairs:
            if op.kind == kind and (op.source, op.target) == (source, target):
                yield op


def _alone(group: Group, ops: list[Op], here: int, there: int, kind: str) -> Stuck:
    verb, other = ("sends to", "receive") if kind == "send" else ("waits to receive from", "send")
    said = f"rank {here} {verb} rank {there} in {group.called}, and "
    if there not in group.tracks:
        said += f"{named([there])} left no dump that can be read"
        return _stuck(group, ops[0], "no-dump", (there,), (here,), said)
    said += f"rank {there} has not entered that {other}"
    return _stuck(group, ops[0], "absent", (there,), (here,), said)


def _stuck(
    group: Group,
    op: Op,
    kind: StuckKind,
    ranks: tuple[int, ...],
    waiting: tuple[int, ...],
    said: str,
) -> Stuck:
    return Stuck(
        kind=kind,
        group=group.called, members=group.members, op=op.kind, seq=op.seq, ranks=ranks,
        waiting=waiting, since_ns=op.t_ns, confidence="likely", said=said, where=op.where,
    )  # fmt: skip
