"""Report of a hang: the root stall of all groups, and the verdict as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec import Struct

from outlast.fleet.flight_recorder import stalled_operations
from outlast.fleet.flight_recorder.nearby_findings import (
    NearbyFindings,
    RankFinding,
    findings_of_ranks,
)
from outlast.fleet.flight_recorder.recorded_operations import (
    OWN_CALLED,
    RecordedGroup,
    collect_groups,
    format_ranks,
    frame_of,
    is_complete,
    minimum_world_size,
)
from outlast.fleet.flight_recorder.recorded_operations import group_label as named_of
from outlast.fleet.flight_recorder.recorder_dumps import (
    DumpCollection,
    RecorderDump,
    RecorderEntry,
    UnusedDump,
)
from outlast.fleet.flight_recorder.stalled_operations import Confidence, Stall


class OrderedStalls(NamedTuple):
    """Stalls ordered by cause.

    `found`: roots first, each kind by time. `circle`: every stall waits for another one.
    """

    found: list[Stall]
    circle: bool


def order_stalls(found: Sequence[Stall]) -> OrderedStalls:
    """Order stalls: those that wait for no other stall first."""
    waits = {
        at: {
            other
            for other, elsewhere in enumerate(found)
            if other != at and _may_wait_for(stuck, elsewhere)
        }
        for at, stuck in enumerate(found)
    }
    roots = [at for at, behind in waits.items() if not behind]
    circle = bool(found) and not roots
    if circle:  # stalls that only wait for the circle are not part of it
        roots = [at for at in waits if at in _reachable(at, waits)]
    first = sorted(roots, key=lambda at: _order_key(found[at]))
    rest = sorted(set(waits) - set(roots), key=lambda at: _order_key(found[at]))
    return OrderedStalls([found[at] for at in first + rest], circle)


def _may_wait_for(stuck: Stall, other: Stall) -> bool:
    """Return whether the ranks of `stuck` may only be delayed by `other`."""
    step_was_left = other.group == OWN_CALLED != stuck.group
    return not step_was_left and bool(set(stuck.ranks) & set(other.waiting))


def _order_key(stuck: Stall) -> tuple[bool, int]:
    """Return a sort key: uncertain stalls last, then by time, unknown times last."""
    return stuck.confidence == "unsure", stuck.since_ns if stuck.since_ns is not None else 1 << 63


def _reachable(start: int, waits: dict[int, set[int]]) -> set[int]:
    reached: set[int] = set()
    open_ = [start]
    while open_:
        new = waits[open_.pop()] - reached
        reached |= new
        open_ += new
    return reached


SURE: dict[Confidence, str] = {
    "sure": "the dumps allow no other conclusion",
    "likely": "likely: the dumps are incomplete",
    "unsure": "uncertain: the dumps are not conclusive",
}


def describe_verdict(
    found: Sequence[Stall], *, circle: bool, last: str, near: Sequence[RankFinding]
) -> str:
    """Return the verdict as one paragraph. `last`: the culprit's last operation, as a sentence."""
    if not found:
        return (
            "No operation is stalled in these dumps: all ranks entered the same operations, and no"
            " record shows one that did not complete."
        )
    root = found[0]
    sentences = [sentence(root.description)]
    if circle:
        further = "; ".join(stall.description for stall in found[1:4])
        sentences.append(f"The stalls wait for each other in a circle; none is first: {further}.")
    if root.since_ns:
        since = datetime.fromtimestamp(root.since_ns / 1e9, tz=UTC)
        at = f", at {root.where}" if root.where else ""
        sentences.append(f"The first of them entered it at {since:%Y-%m-%d %H:%M:%S.%f} UTC{at}.")
    if last:
        sentences.append(last)
    if near:
        sentences.append(describe_health(near[0]))
    elif (confidence := _confidence(found, circle=circle)) != "sure":
        sentences.append(sentence(SURE[confidence]))
    return " ".join(sentences)


def _confidence(found: Sequence[Stall], *, circle: bool) -> Confidence:
    """Return the confidence in the root. A circle is as sure as its least sure stall: whether the
    root's ranks are to blame, or wait for another one, depends on each of them."""
    return max((one.confidence for one in found[: None if circle else 1]), key=[*SURE].index)


def describe_health(near: RankFinding) -> str:
    """Return a sentence about a finding on a rank's node.

    For example: The node of rank 2, node17, had XID 79 (gpu-unavailable) 4.0 seconds before.
    """
    what = near.code or near.check
    detail = f"{near.symptom}, {near.device}" if near.device else near.symptom
    side = "before" if near.before_s >= 0 else "after"
    return (
        f"The node of {format_ranks(near.ranks)}, {near.node}, had {what} ({detail})"
        f" {_format_span(near)} {side}."
    )


def sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def _format_span(near: RankFinding) -> str:
    apart_s = abs(near.before_s)
    return f"{apart_s / 60:.1f} minutes" if apart_s >= 120 else f"{apart_s:.1f} seconds"


class LastSeen(Struct, frozen=True, kw_only=True):
    """Last operation that a rank recorded, in any group."""

    op: str
    seq: int
    group: str
    t_ns: int
    where: str


class HangReport(Struct, frozen=True, kw_only=True):
    """Report that `--json` prints.

    `stuck`: the root first. `ranks`: the suspect ranks of the root.
    """

    version: int = 1
    verdict: str
    confidence: str  # sure, likely, unsure; "" where nothing stands still
    circle: bool
    ranks: tuple[int, ...]
    hosts: dict[int, str]
    stuck: tuple[Stall, ...]
    last: dict[int, LastSeen]
    health: tuple[RankFinding, ...]
    world: int
    read: tuple[int, ...]
    missing: tuple[int, ...]  # no dump that can be read
    wrapped: tuple[int, ...]  # the ring buffer has overwritten its first records
    unread: tuple[UnusedDump, ...]
    notes: tuple[str, ...]


def analyse_dumps(
    read: DumpCollection,
    *,
    world: int | None = None,
    hosts: Mapping[int, str] | None = None,
    findings: Callable[[int], NearbyFindings] | None = None,
) -> HangReport:
    """Analyse the dumps of a hang.

    `world`: number of ranks, if known. `hosts`: of ranks, overriding those of file names.
    `findings`: health findings around a Unix time in nanoseconds.
    """
    dumps = read.dumps
    notes: list[str] = []
    if read.second:
        notes.append(
            f"of several dumps of {format_ranks(read.second)} the one that goes furthest is used"
        )
    size = _world_size(read, world, notes)
    all_groups = collect_groups(dumps, size)
    found = [stuck for group in all_groups for stuck in _find_stalls(group)]
    at = order_stalls(found)
    root = at.found[0] if at.found else None
    ranks = root.ranks if root else ()
    where = {**read.hosts, **(hosts or {})}
    last = {
        rank: entry for rank in ranks if (entry := _last_operation(dumps.get(rank))) is not None
    }
    near = _health_findings(root, where, findings, notes) if root and findings else []
    _note_unknown_members(all_groups, notes)
    return HangReport(
        verdict=describe_verdict(
            at.found, circle=at.circle, last=_describe_last(root, last), near=near
        ),
        confidence=_confidence(at.found, circle=at.circle) if root else "",
        circle=at.circle,
        ranks=ranks,
        hosts={rank: where[rank] for rank in sorted({*dumps, *ranks}) if rank in where},
        stuck=tuple(at.found),
        last=last,
        health=tuple(near),
        world=size,
        read=tuple(sorted(dumps)),
        missing=tuple(rank for rank in range(size) if rank not in dumps),
        wrapped=tuple(sorted(rank for rank, dump in dumps.items() if not is_complete(dump))),
        unread=tuple(read.unread),
        notes=tuple(notes),
    )


def _find_stalls(group: RecordedGroup) -> list[Stall]:
    found = stalled_operations.find_collective_stall(group)
    return [*([found] if found else []), *stalled_operations.find_pair_stalls(group)]


def _world_size(read: DumpCollection, stated: int | None, notes: list[str]) -> int:
    named_ranks = [*read.dumps, *(dump.rank for dump in read.unread if dump.rank is not None)]
    least = max(max(named_ranks) + 1, minimum_world_size(read.dumps) or 0)
    if stated is None and minimum_world_size(read.dumps) is None:
        notes.append(
            f"the dumps do not contain the number of ranks: {least} by their names (pass --world)"
        )
    if stated is not None and stated < least:
        notes.append(f"--world {stated} is fewer than the dumps have: {least}")
    return max(stated or 0, least)


def _last_operation(dump: RecorderDump | None) -> LastSeen | None:
    if dump is None or not dump.entries:
        return None
    entry = dump.entries[-1]
    return LastSeen(
        op=entry.kind,
        seq=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        group=_group_of(entry),
        t_ns=entry.time_created_ns,
        where=frame_of(entry),
    )


def _group_of(entry: RecorderEntry) -> str:
    return RecordedGroup(*named_of(entry), backend="", members=(), known=False, tracks={}).called


def _describe_last(root: Stall | None, last: Mapping[int, LastSeen]) -> str:
    """Return a sentence about the last operation of the first suspect rank, or ""."""
    if root is None or root.kind not in ("absent", "undecided") or not last:
        return ""
    rank, entry = next(iter(last.items()))
    before = ""
    if root.since_ns and root.since_ns >= entry.t_ns:
        before = f", {(root.since_ns - entry.t_ns) / 1e9:.3f} s before"
    at = f", at {entry.where}" if entry.where else ""
    return (
        f"The last that rank {rank} entered is {entry.op} {entry.seq} of {entry.group}{before}{at}."
    )


def _health_findings(
    root: Stall,
    hosts: Mapping[int, str],
    findings: Callable[[int], NearbyFindings],
    notes: list[str],
) -> list[RankFinding]:
    ranks = root.ranks or root.waiting
    if root.since_ns is None:
        notes.append("the time of the hang is not in the dumps: health findings were not searched")
        return []
    if unknown := [rank for rank in ranks if rank not in hosts]:
        notes.append(
            f"the host of {format_ranks(unknown)} is unknown: its health findings were not searched"
            " (pass --hosts FILE: a rank and a host on each line)"
        )
    known = findings(root.since_ns)
    notes.extend(known.notes)
    found = findings_of_ranks(known.findings, ranks, hosts, root.since_ns)
    if not found and len(unknown) < len(ranks):
        notes.append(
            f"no health findings on the nodes of {format_ranks(ranks)} from 10 minutes before to 5"
            " minutes after"
        )
    return found


def _note_unknown_members(all_groups: list[RecordedGroup], notes: list[str]) -> None:
    unknown = [group for group in all_groups if not group.known]
    if unknown:
        called = ", ".join(group.called for group in unknown[:4])
        notes.append(
            f"the dumps do not contain the members of {len(unknown)} group(s) ({called}): the ranks"
            " that used them are taken for the members"
        )
