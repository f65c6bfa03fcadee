"""Placement of replicas of snapshots: failure domains and equal loads."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from outlast.errors import ConfigError

SET_MAX = 16  # ranks that hold each other's own state, for the sake of domains


class ReplicaSpot(NamedTuple):
    """Location of a rank. Ranks that share a label fail together; an unnamed rack is one rack."""

    host: str
    rack: str = ""


class ReplicaPlacement(NamedTuple):
    """Placement. `peers`: by rank, the other holders of its part. `notes`: losses not survived."""

    peers: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]


def place(spots: Sequence[ReplicaSpot], copies: int) -> ReplicaPlacement:
    """Return `copies` holders for each rank's part, the rank itself first. Deterministic.

    A part lies in as many racks, then hosts, as possible, up to `copies`. Every rank holds as many
    parts of other ranks as it has peers, unless domains differ so much in size that the load must
    be unequal for that. Raises ConfigError if there are too few ranks.
    """
    world = len(spots)
    if not 1 <= copies <= max(1, world):
        raise ConfigError(
            f"{copies} copies of each rank's part need {copies} ranks, and the run has {world};"
            f" choose 1 to {max(1, world)}"
        )
    hosts = [(spot.rack, spot.host) for spot in spots]
    racks = {rack for rack, _ in hosts}
    wanted = (min(copies, len(racks)), min(copies, len(set(hosts))))
    peers = _ring(hosts, copies)
    alone = [rank for rank in range(world) if _spread(hosts, (rank, *peers[rank])) < wanted]
    if alone:
        _move(hosts, peers, alone)
    notes = (
        *_note("rack", {spot.rack for spot in spots}, copies),
        *_note("host", {spot.host for spot in spots}, copies),
    )
    return ReplicaPlacement(tuple(map(tuple, peers)), notes)


def group(spots: Sequence[ReplicaSpot], size: int) -> ReplicaPlacement:
    """Return parity groups of up to `size` ranks; `peers`: the other members of a rank's group, in
    order. The number of groups is minimal and sizes are as equal as possible, at least two. The
    ranks of a domain lie in as many groups as possible. Raises ConfigError if there are too few
    ranks.
    """
    world = len(spots)
    if not 2 <= size <= world:
        raise ConfigError(
            f"a parity group of {size} ranks needs as many, and the run has {world}; choose"
            f" {f'2 to {world}' if world > 1 else 'none'}"
        )
    count = min(-(-world // size), world // 2)
    line = sorted(range(world), key=lambda rank: (spots[rank].rack, spots[rank].host, rank))
    groups = [sorted(line[first::count]) for first in range(count)]
    peers: list[tuple[int, ...]] = [()] * world
    for members in groups:
        for rank in members:
            peers[rank] = tuple(other for other in members if other != rank)
    notes = (
        *_group_note("rack", [spot.rack for spot in spots], groups),
        *_group_note("host", [f"{spot.rack}/{spot.host}" for spot in spots], groups),
    )
    return ReplicaPlacement(tuple(peers), notes)


class PartnerSets(NamedTuple):
    """Ranks that hold each other's own state. `note`: the loss that takes a rank with all copies,
    though domains are known; "" if there is none."""

    sets: tuple[tuple[int, ...], ...]
    note: str


def partner_sets(hosts: Sequence[str], domains: Mapping[str, str]) -> PartnerSets:
    """Return sets of ranks, each on two hosts or more; none on one host.

    `hosts`: by rank; `domains`: paths of their failure domains, the largest part first, {} if they
    are unknown. Each set is in two domains of the largest level that has two: in pairs, where none
    of these has more than half of the ranks (but for one set of three in an odd world), else in
    sets of up to SET_MAX that share the ranks of the other domains.
    """
    world, counts = len(hosts), Counter(hosts)
    levels = max((domain.count("/") + 1 for domain in domains.values() if domain), default=0)
    paths = {host: (*_levels(domains.get(host, ""), levels), host) for host in counts}
    sizes: Counter[tuple[str, ...]] = Counter()
    for host, path in paths.items():
        for depth in range(1, levels + 2):
            sizes[path[:depth]] += counts[host]
    order = {prefix: index for index, prefix in enumerate(sizes)}
    keys = {
        host: [(-sizes[path[:depth]], order[path[:depth]]) for depth in range(1, levels + 2)]
        for host, path in paths.items()
    }
    line = sorted(range(world), key=lambda rank: keys[hosts[rank]])
    note = ""
    for depth in range(1, levels + 2):
        name, most = max(
            ((prefix, size) for prefix, size in sizes.items() if len(prefix) == depth),
            key=lambda each: each[1],
            default=((), world),
        )
        number = min(world // 2, world - most)
        if number and (depth > levels or -(-world // number) <= SET_MAX):
            sets = tuple(tuple(sorted(line[first::number])) for first in range(number))
            return PartnerSets(sets, note)
        if depth <= levels and (number or depth == levels):
            note = note or _partner_note("/".join(name), world, most)
    return PartnerSets((), "")


def _levels(domain: str, levels: int) -> list[str]:
    """Return the names of a domain from the largest part on; those that are missing are ""."""
    names = domain.split("/") if domain else []
    return [*names, *[""] * (levels - len(names))]


def _partner_note(name: str, world: int, most: int) -> str:
    return (
        f"{most} of {world} ranks are in the failure domain {name.rstrip('/') or 'without a name'}:"
        " some of them have their own state on hosts of this domain alone; if it fails as a whole,"
        " all ranks go back to the newest checkpoint"
    )


def _ring(hosts: Sequence[tuple[str, str]], copies: int) -> list[list[int]]:
    """Return peers at equal strides on a ring of ranks in order of domains. A domain of at most one
    stride is used once per rank, and every stride uses each rank once."""
    world = len(hosts)
    line = sorted(range(world), key=lambda rank: (hosts[rank], rank))
    stride = world // copies
    peers: list[list[int]] = [[] for _ in line]
    for at, rank in enumerate(line):
        peers[rank] = [line[(at + turn * stride) % world] for turn in range(1, copies)]
    return peers


def _spread(hosts: Sequence[tuple[str, str]], holders: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of racks and hosts of these ranks."""
    found = {hosts[rank] for rank in holders}
    return len({rack for rack, _ in found}), len(found)


def _move(hosts: Sequence[tuple[str, str]], peers: list[list[int]], ranks: Sequence[int]) -> None:
    """Give these ranks the peers with the widest spread and, among those, the least load."""
    moved = set(ranks)
    others = (peer for rank, peers_of in enumerate(peers) if rank not in moved for peer in peers_of)
    loads = Counter(others)
    queues: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for rank, host in enumerate(hosts):
        queues.setdefault(host, []).append((loads[rank], rank))
    for queue in queues.values():
        heapq.heapify(queue)
    for rank in ranks:
        count, peers[rank] = len(peers[rank]), []
        aside = _take(queues[hosts[rank]], rank)
        chosen = [rank]
        taken = [(aside, hosts[rank])]
        for _ in range(count):
            used = {hosts[holder] for holder in chosen}
            used_racks = {rack for rack, _ in used}
            host = min(
                (host for host, queue in queues.items() if queue),
                key=lambda host: (host[0] in used_racks, host in used, queues[host][0]),
            )
            load, peer = heapq.heappop(queues[host])
            chosen.append(peer)
            taken.append(((load + 1, peer), host))
        for entry, host in taken:
            heapq.heappush(queues[host], entry)
        peers[rank] = chosen[1:]


def _take(queue: list[tuple[int, int]], rank: int) -> tuple[int, int]:
    """Remove a rank from its host's queue, since no rank is its own peer."""
    at = next(at for at, (_, found) in enumerate(queue) if found == rank)
    entry = queue.pop(at)
    heapq.heapify(queue)
    return entry


def _note(what: str, names: set[str], copies: int) -> tuple[str, ...]:
    if len(names) >= copies or names == {""}:
        return ()
    if len(names) == 1:
        return (f"all {copies} copies of a part lie on one {what}: none survives its loss",)
    return (
        f"{copies} copies of a part lie on {len(names)} {what}s: they survive the loss of all but"
        " one of them, and no more",
    )


def _group_note(what: str, where: Sequence[str], groups: Sequence[Sequence[int]]) -> Iterator[str]:
    names = set(where)
    most = max(max(Counter(where[rank] for rank in members).values()) for members in groups)
    if most > 1 and names != {""}:
        which = f"one {what}" if len(names) == 1 else f"a {what} that {most} of its ranks are on"
        yield f"a group's parity does not survive the loss of {which}"
