"""Where the collectives of one group stop: pure, from its ranks' records side by side.

A group's collectives are numbered alike on all its ranks. The culprit is the first number at which
they part: with `last(r)` the last number that rank r entered, the first one above `min(last)` was
not entered by somebody, if anybody did; up to there all entered, and the first that differs or was
not left counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outlast.fleet.trace.differing import differing
from outlast.fleet.trace.groups import Group
from outlast.fleet.trace.ops import UNDER_WAY, Op
from outlast.fleet.trace.stuck import Confidence, Stuck, StuckKind, named


class _Site(NamedTuple):
    """One number of one group: what those with a record of it entered."""

    group: Group
    seq: int
    ops: dict[int, Op]

    @property
    def kind(self) -> str:
        kinds = {op.kind for op in self.ops.values()}
        return kinds.pop() if len(kinds) == 1 else "collective"

    @property
    def called(self) -> str:
        return f"{self.kind} {self.seq} of {self.group.called}"

    def stuck(
        self,
        kind: StuckKind,
        ranks: Sequence[int],
        waiting: Sequence[int],
        confidence: Confidence,
        said: str,
    ) -> Stuck:
        waits = [self.ops[rank] for rank in waiting if rank in self.ops]
        return Stuck(
            kind=kind, group=self.group.called, members=self.group.members, op=self.kind,
            seq=self.seq, ranks=tuple(sorted(ranks)), waiting=tuple(sorted(waiting)),
            since_ns=min((op.t_ns for op in waits), default=None), confidence=confidence,
            said=said, where=next((op.where for op in waits if op.where), ""),
        )  # fmt: skip


def judge(group: Group) -> Stuck | None:
    """What holds this group's collectives up, if anything does."""
    lasts = {rank: track.last for rank, track in group.tracks.items() if track.last is not None}
    met = min(lasts.values(), default=0)
    highest = max(lasts.values(), default=0)
    seqs = {seq for track in group.tracks.values() for seq in track.ops}
    blind = len(lasts) < len(group.members)  # then it is not known that all entered
    left_to = min((track.left_to for track in group.tracks.values()), default=-1)
    for seq in sorted(seq for seq in seqs if left_to < seq <= met):
        if found := _met(_site(group, seq), blind=blind):
            return found
    if met < highest:
        # Not met + 1: records begin anew when torch is told to reset them, and numbers go on.
        return _absent(_site(group, min(seq for seq in seqs if seq > met)), lasts)
    return _silent(_site(group, met), lasts) if blind and highest else None


def _site(group: Group, seq: int) -> _Site:
    ops = {rank: track.ops[seq] for rank, track in group.tracks.items() if seq in track.ops}
    return _Site(group, seq, ops)


def _through(group: Group, rank: int, seq: int) -> bool:
    """Whether a rank is through it: it is known to be, or it has ended and the rank went on."""
    track = group.tracks[rank]
    went_on = track.ops[seq].progress == "ended" and (track.last or 0) > seq
    return went_on or track.left_to >= seq


def _met(site: _Site, *, blind: bool) -> Stuck | None:
    """A collective that everybody entered who can be judged, if it differs or did not end."""
    group, ops = site.group, site.ops
    inside = [rank for rank in ops if not _through(group, rank, site.seq)]
    if not inside:
        return None
    if apart := differing(ops, everybody=len(ops) == len(group.members)):
        who = f"{named(apart.ranks)} entered " if len(apart.ranks) < len(ops) else ""
        said = f"in {site.called} the ranks do not mean the same {apart.what}: {who}{apart.said}"
        sure = len(apart.ranks) < len(ops)
        return site.stuck("mismatch", apart.ranks, inside, "sure" if sure else "likely", said)
    inside = [rank for rank in inside if ops[rank].progress in UNDER_WAY]
    return None if blind or not inside else _unfinished(site, inside)


def _unfinished(site: _Site, inside: list[int]) -> Stuck:
    queued = [rank for rank in inside if site.ops[rank].progress == "queued"]
    running = [rank for rank in inside if site.ops[rank].progress == "running"]
    left = [rank for rank in site.ops if rank not in inside]
    entered = f"all ranks entered {site.called}"
    if queued and running:
        said = (
            f"{entered}; the GPUs of {named(queued)} have not come to it (something before it on"
            f" their stream does not end), and {named(running)} wait in it"
        )
        return site.stuck("unfinished", queued, running, "likely", said)
    if left:
        said = f"{entered}; {named(left)} left it, {named(inside)} did not"
        return site.stuck("unfinished", inside, inside, "likely", said)
    if queued:
        said = f"{entered}, and no GPU has come to it: something before it does not end"
        return site.stuck("unfinished", (), queued, "unsure", said)
    said = f"{entered}, the same on all of them, and nobody left it: the network between them, or"
    if not site.group.known:
        said += " a member that has never used the group, which its dump does not tell"
        return site.stuck("unfinished", (), inside, "unsure", said)
    said += " a kernel that does not end"
    return site.stuck("unfinished", (), inside, "likely", said)


def _absent(site: _Site, lasts: Mapping[int, int]) -> Stuck:
    """Some entered this one, or a later one; others did not."""
    group = site.group
    absent = [rank for rank, last in lasts.items() if last < site.seq]
    entered = [rank for rank, last in lasts.items() if last >= site.seq]
    others = [rank for rank in group.members if rank not in lasts]
    confidence: Confidence = "sure" if group.known else "likely"
    never = f"never entered {site.called}"
    if not any(lasts[rank] for rank in absent):
        never = f"entered nothing of {group.called}, and so not {site.kind} {site.seq}"
    said = f"{named(absent)} {never}, which {named(entered)} entered"
    if all(group.tracks[rank].left_to >= site.seq for rank in entered):
        said += " and left: these dumps may be of different moments"
        confidence = "unsure"
    if others:
        said += f"; of {named(others)} it is not known"
    return site.stuck("absent", absent, entered, confidence, said)


def _silent(site: _Site, lasts: Mapping[int, int]) -> Stuck | None:
    """Nobody is behind of those who can be judged; others cannot be."""
    group, ops = site.group, site.ops
    inside = [rank for rank in ops if group.tracks[rank].left_to < site.seq]
    if not inside:
        return None
    unknown = [rank for rank in group.members if rank not in lasts]
    without = [rank for rank in unknown if rank not in group.tracks]
    said = f"the last that {named(lasts)} entered is {site.called}"
    if without:
        said += f"; {named(without)} left no dump that can be read, and may not have entered it"
        waits = any(ops[rank].progress in UNDER_WAY for rank in inside)
        return site.stuck("no-dump", without, inside, "likely" if waits else "unsure", said)
    said += f"; the records of {named(unknown)} in that group have been written over"
    return site.stuck("undecided", unknown, inside, "unsure", said)
