"""Process groups as the dumps of their ranks record them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from outlast.fleet.flight_recorder.recorded_operations import RankTrack, track_rank
from outlast.fleet.flight_recorder.recorder_dumps import GroupConfig, RecorderDump, RecorderEntry

DEFAULT = "default_pg"
OWN = "control"  # of `outlast run`: all ranks vote in it at the end of each step
OWN_CALLED = f"group {OWN} (of Outlast)"
_RANKS_MAX = 1 << 20
_LIST = msgspec.json.Decoder(tuple[int, ...])


class RecordedGroup(NamedTuple):
    """A process group on one backend.

    `members`: in the group's order. `known`: a dump lists them; otherwise they are the ranks that
    used it.
    """

    name: str
    desc: str
    backend: str
    members: tuple[int, ...]
    known: bool
    tracks: dict[int, RankTrack]  # of the members with a dump

    @property
    def called(self) -> str:
        """Name of the group for messages."""
        if self.name.startswith("group "):  # as `outlast run` calls those of the script
            return self.name
        names = [one for one in (self.name, self.desc) if one and one != "undefined"]
        if names == [OWN]:
            return OWN_CALLED
        return (
            f"group {names[0]} ({names[1]})"
            if len(names) == 2
            else f"group {''.join(names)}".strip()
        )


def group_label(entry: RecorderEntry) -> tuple[str, str]:
    """Return the name and description of an entry's group.

    One without a name gets its number, which is equal on all ranks that create their groups in the
    same order.
    """
    name, desc = entry.process_group
    return (name, desc) if name or desc else (f"without a name, number {entry.pg_id}", "")


_Key = tuple[str, str, str, tuple[int, ...]]


def minimum_world_size(dumps: Mapping[int, RecorderDump]) -> int | None:
    """Return the least number of ranks, by the groups' members; None if no dump lists any."""
    highest = (
        max(ranks)
        for dump in dumps.values()
        for config in dump.pg_config.values()
        if (ranks := _ranks(config))
    )
    return max(highest, default=-1) + 1 or None


def collect_groups(dumps: Mapping[int, RecorderDump], world: int) -> list[RecordedGroup]:
    """Return all recorded groups.

    Groups of equal names with different members are different groups.
    """
    used: dict[_Key, dict[int, list[RecorderEntry]]] = {}
    members = {rank: _configured(dump) for rank, dump in dumps.items()}
    listed: dict[str, set[tuple[int, ...]]] = {}
    for configured in members.values():
        for name, ranks in configured.items():
            listed.setdefault(name, set()).add(ranks)
    for rank, dump in dumps.items():
        mine: dict[tuple[str, str, str], list[RecorderEntry]] = {}
        for entry in dump.entries:
            mine.setdefault((*group_label(entry), entry.backend), []).append(entry)
        for (name, desc, backend), entries in mine.items():
            others = (ranks for ranks in listed.get(name, ()) if rank in ranks)
            ranks = members[rank].get(name) or next(others, ())
            used.setdefault((name, desc, backend, ranks), {})[rank] = entries
    return [_group(key, found, dumps, world) for key, found in used.items()]


def _group(
    key: _Key,
    found: Mapping[int, Sequence[RecorderEntry]],
    dumps: Mapping[int, RecorderDump],
    world: int,
) -> RecordedGroup:
    name, desc, backend, ranks = key
    if not ranks and desc == DEFAULT:
        ranks = tuple(range(world))
    members = ranks or tuple(sorted(found))
    return RecordedGroup(
        name=name,
        desc=desc,
        backend=backend,
        members=members,
        known=bool(ranks),
        tracks={
            rank: track_rank(rank, dumps[rank], found.get(rank, ()))
            for rank in members
            if rank in dumps
        },
    )


def _configured(dump: RecorderDump) -> dict[str, tuple[int, ...]]:
    """Return the members by group name.

    gloo's groups are all named "", so that one overwrites the others and is ignored.
    """
    found = {name: _ranks(config) for name, config in dump.pg_config.items() if name}
    return {name: ranks for name, ranks in found.items() if ranks}


def _ranks(config: GroupConfig) -> tuple[int, ...]:
    """Return a group's members; none if the text is no list of ranks, as gloo's empty one."""
    try:
        ranks = config.ranks if isinstance(config.ranks, tuple) else _LIST.decode(config.ranks)
    except (msgspec.DecodeError, UnicodeError):
        return ()
    if len(ranks) > _RANKS_MAX or not all(0 <= rank < _RANKS_MAX for rank in ranks):
        return ()
    return ranks
