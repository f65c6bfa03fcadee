"""From dumps to a verdict: pure, but for the findings that are asked for once the time is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from outlast.fleet.trace import collectives, pairs
from outlast.fleet.trace.dumps import Dump, Entry
from outlast.fleet.trace.files import Read, Unread
from outlast.fleet.trace.groups import Group, groups, world_of
from outlast.fleet.trace.groups import named as named_of
from outlast.fleet.trace.near import Around, Near, near
from outlast.fleet.trace.ops import frame_of, whole
from outlast.fleet.trace.root import ordered
from outlast.fleet.trace.stuck import Stuck, named
from outlast.fleet.trace.words import verdict


class LastSeen(Struct, frozen=True, kw_only=True):
    """The last thing that a rank recorded, in any group."""

    op: str
    seq: int
    group: str
    t_ns: int
    where: str


class Report(Struct, frozen=True, kw_only=True):
    """What `--json` prints. `stuck`: the root first. `ranks`: those to look at, of the root."""

    version: int = 1
    verdict: str
    confidence: str  # sure, likely, unsure; "" where nothing stands still
    circle: bool
    ranks: tuple[int, ...]
    hosts: dict[int, str]
    stuck: tuple[Stuck, ...]
    last: dict[int, LastSeen]
    health: tuple[Near, ...]
    world: int
    read: tuple[int, ...]
    missing: tuple[int, ...]  # no dump that can be read
    wrapped: tuple[int, ...]  # the start of its records has been written over
    unread: tuple[Unread, ...]
    notes: tuple[str, ...]


def analyse(
    read: Read,
    *,
    world: int | None = None,
    hosts: Mapping[int, str] | None = None,
    findings: Callable[[int], Around] | None = None,
) -> Report:
    """`world`: how many ranks the job had, where the caller knows. `hosts`: of ranks, before what
    names of files say. `findings`: what nodes said around a Unix time in nanoseconds."""
    dumps = read.dumps
    notes: list[str] = []
    if read.second:
        notes.append(f"of several dumps of {named(read.second)} the one that goes furthest is used")
    size = _world(read, world, notes)
    all_groups = groups(dumps, size)
    found = [stuck for group in all_groups for stuck in _judged(group)]
    at = ordered(found)
    root = at.found[0] if at.found else None
    ranks = root.ranks if root else ()
    where = {**read.hosts, **(hosts or {})}
    last = {rank: seen for rank in ranks if (seen := _last(dumps.get(rank))) is not None}
    said = _health(root, where, findings, notes) if root and findings else []
    _note(all_groups, notes)
    return Report(
        verdict=verdict(at.found, circle=at.circle, last=_did(root, last), near=said),
        confidence=root.confidence if root else "",
        circle=at.circle,
        ranks=ranks,
        hosts={rank: where[rank] for rank in sorted({*dumps, *ranks}) if rank in where},
        stuck=tuple(at.found),
        last=last,
        health=tuple(said),
        world=size,
        read=tuple(sorted(dumps)),
        missing=tuple(rank for rank in range(size) if rank not in dumps),
        wrapped=tuple(sorted(rank for rank, dump in dumps.items() if not whole(dump))),
        unread=tuple(read.unread),
        notes=tuple(notes),
    )


def _judged(group: Group) -> list[Stuck]:
    found = collectives.judge(group)
    return [*([found] if found else []), *pairs.judge(group)]


def _world(read: Read, told: int | None, notes: list[str]) -> int:
    named_ranks = [*read.dumps, *(one.rank for one in read.unread if one.rank is not None)]
    least = max(max(named_ranks) + 1, world_of(read.dumps) or 0)
    if told is None and world_of(read.dumps) is None:
        notes.append(
            f"the dumps do not say how many ranks there were: {least} by their names (--world says"
            " it)"
        )
    if told is not None and told < least:
        notes.append(f"--world {told} is fewer than the dumps have: {least}")
    return max(told or 0, least)


def _last(dump: Dump | None) -> LastSeen | None:
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


def _group_of(entry: Entry) -> str:
    return Group(*named_of(entry), backend="", members=(), known=False, tracks={}).called


def _did(root: Stuck | None, last: Mapping[int, LastSeen]) -> str:
    """What the first of the culprits did last."""
    if root is None or root.kind not in ("absent", "undecided") or not last:
        return ""
    rank, seen = next(iter(last.items()))
    before = ""
    if root.since_ns and root.since_ns >= seen.t_ns:
        before = f", {(root.since_ns - seen.t_ns) / 1e9:.3f} s before"
    at = f", at {seen.where}" if seen.where else ""
    return f"The last that rank {rank} entered is {seen.op} {seen.seq} of {seen.group}{before}{at}."


def _health(
    root: Stuck,
    hosts: Mapping[int, str],
    findings: Callable[[int], Around],
    notes: list[str],
) -> list[Near]:
    ranks = root.ranks or root.waiting
    if root.since_ns is None:
        notes.append("the time of the hang is not in the dumps: health was not looked at")
        return []
    if unknown := [rank for rank in ranks if rank not in hosts]:
        notes.append(
            f"the host of {named(unknown)} is not known, and its health was not looked at (--hosts"
            " FILE says it: a rank and a host a line)"
        )
    known = findings(root.since_ns)
    notes.extend(known.notes)
    found = near(known.findings, ranks, hosts, root.since_ns)
    if not found and len(unknown) < len(ranks):
        notes.append(
            f"nothing is known to have been wrong with the nodes of {named(ranks)} from 10 minutes"
            " before to 5 minutes after"
        )
    return found


def _note(all_groups: list[Group], notes: list[str]) -> None:
    unsaid = [group for group in all_groups if not group.known]
    if unsaid:
        called = ", ".join(group.called for group in unsaid[:4])
        notes.append(
            f"the dumps do not say who the members of {len(unsaid)} group(s) are ({called}): those"
            " who used them are taken for them"
        )
