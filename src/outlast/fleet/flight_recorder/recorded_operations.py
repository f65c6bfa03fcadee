"""Operations and process groups as the dumps of their ranks record them.

The reliability of a state depends on the backend. NCCL's watchdog follows each operation on its
stream until it is `completed`; it records `started` only with TORCH_NCCL_ENABLE_TIMING. gloo always
records `scheduled`; `retired` tells that the operation has ended, successfully or with an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from outlast.fleet.flight_recorder.recorder_dumps import (
    GroupConfig,
    RecorderDump,
    RecorderEntry,
    Sizes,
    kind_of,
)

Progress = Literal[
    "queued",  # entered; its stream has not come to it (NCCL)
    "running",  # its kernel waits for the others, or for the network (NCCL)
    "inside",  # entered and not completed; no more is known
    "ended",  # successfully or with an error, unknown which (gloo)
    "left",  # completed
]
UNDER_WAY: tuple[Progress, ...] = ("queued", "running", "inside")
_FOLLOWED: dict[str, Progress] = {"scheduled": "queued", "started": "running", "completed": "left"}
_UNFOLLOWED = {"gloo", "mpi", "ucc"}
_ENDS = {"coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"}  # of a batch
BATCHED = " + "
_SIGNATURES_MAX = 4096  # cached
_SHOWN = 200  # characters of a name
_RANGES_SHOWN = 16
_PAIR = re.compile(r"(send|recv) ([0-9]{1,8})(->|<-)([0-9]{1,8})")


class RecordedOp(NamedTuple):
    """Operation as one rank entered it. `sizes`: elements going in and coming out."""

    seq: int
    kind: str  # all_reduce, or all_gather + all_gather of a batch
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, ...]
    progress: Progress
    t_ns: int
    at: int  # its place in the rank's own records
    where: str  # file.py:12 in train
    source: int = -1  # of a send or receive, the ranks as the group counts them
    target: int = -1


class RankTrack(NamedTuple):
    """Operations of one rank in one group.

    `last`: number of the last collective that it entered, 0 for none, None if its record may be
    lost. `left_to`: up to there it has certainly completed, since one stream runs its operations in
    order; -1 for none. `whole`: no record has been overwritten.
    """

    rank: int
    ops: dict[int, RecordedOp]
    pairs: list[RecordedOp]  # sends and receives
    whole: bool
    last: int | None
    left_to: int


def is_complete(dump: RecorderDump) -> bool:
    """Return whether no record of the ring buffer has been overwritten."""
    return not dump.entries or dump.entries[0].record_id == 0


def track_rank(rank: int, dump: RecorderDump, entries: Sequence[RecorderEntry]) -> RankTrack:
    """Return the operations of a rank in the group of these entries.

    If numbers restart, or another backend has them, the group was recreated under its name: only
    its last instance counts.
    """
    ops: dict[int, list[RecorderEntry]] = {}
    pairs: dict[int, list[RecorderEntry]] = {}
    life: int | None = None
    for entry in entries:
        numbered, seq = (
            (pairs, entry.p2p_seq_id) if entry.is_p2p else (ops, entry.collective_seq_id)
        )
        if life not in (None, entry.pg_id) or (numbered and seq < next(reversed(numbered))):
            ops = {}
            pairs = {}
            numbered = pairs if entry.is_p2p else ops
        life = entry.pg_id
        numbered.setdefault(seq, []).append(entry)
    timed = any(entry.state == "started" or entry.time_discovered_started_ns for entry in entries)
    found = {seq: _op(seq, those, timed=timed) for seq, those in ops.items()}
    all_there = is_complete(dump)
    return RankTrack(
        rank=rank,
        ops=found,
        pairs=[op for those in pairs.values() for op in _pairs(those, timed=timed)],
        whole=all_there,
        last=max(found, default=0 if all_there else None),
        left_to=max((seq for seq, op in found.items() if op.progress == "left"), default=-1),
    )


def element_counts(sizes: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Return the number of elements of each tensor; shapes need not match between ranks."""
    return tuple(math.prod(size) for size in sizes)


class _Signature(NamedTuple):
    """Kind, sizes and dtypes of an operation, which other ranks must match."""

    kind: str
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, ...]


@lru_cache(maxsize=_SIGNATURES_MAX)
def _signature(
    names: tuple[str, ...],
    given: tuple[Sizes, ...],
    taken: tuple[Sizes, ...],
    dtypes: tuple[tuple[str, ...], ...],
) -> _Signature:
    """Return the signature of a batch's parts.

    Cached: a job has few different ones in millions of records.
    """
    return _Signature(
        kind=BATCHED.join(kind_of(name) for name in names[:8]),
        sizes=(
            element_counts(size for sizes in given for size in sizes),
            element_counts(size for sizes in taken for size in sizes),
        ),
        dtypes=tuple(sorted({name for each in dtypes for name in each})),
    )


def _op(seq: int, entries: list[RecorderEntry], *, timed: bool) -> RecordedOp:
    """Return the operation of the entries under one number, which are one batch.

    The entry that ends the batch has its state.
    """
    parts = entries
    if len(entries) > 1:
        parts = [entry for entry in entries if entry.kind not in _ENDS] or entries
    signature = _signature(
        tuple([part.profiling_name for part in parts]),
        tuple([part.input_sizes for part in parts]),
        tuple([part.output_sizes for part in parts]),
        tuple([(*part.input_dtypes, *part.output_dtypes) for part in parts]),
    )
    return RecordedOp(
        seq=seq,
        kind=signature.kind,
        sizes=signature.sizes,
        dtypes=signature.dtypes,
        progress=_progress(entries[-1], timed=timed),
        t_ns=entries[0].time_created_ns,
        at=entries[-1].record_id,
        where=frame_of(entries[0]),
    )


def _pairs(entries: list[RecorderEntry], *, timed: bool) -> Iterable[RecordedOp]:
    for entry in entries:
        match = _PAIR.fullmatch(entry.kind)
        if match is None:
            continue
        first = int(match[2])
        second = int(match[4])
        send = match[1] == "send"
        yield RecordedOp(
            seq=entry.p2p_seq_id,
            kind=match[1],
            sizes=(element_counts(entry.input_sizes), element_counts(entry.output_sizes)),
            dtypes=tuple(sorted({*entry.input_dtypes, *entry.output_dtypes})),
            progress=_progress(entries[-1] if entries[-1].kind in _ENDS else entry, timed=timed),
            t_ns=entry.time_created_ns,
            at=entry.record_id,
            where=frame_of(entry),
            source=first if send else second,
            target=second if send else first,
        )


def _progress(entry: RecorderEntry, *, timed: bool) -> Progress:
    if entry.backend in _UNFOLLOWED:
        return "ended" if entry.retired else "inside"
    if entry.time_discovered_completed_ns:
        return "left"
    found = _FOLLOWED.get(entry.state, "inside")
    return "inside" if found == "queued" and not timed else found


def frame_of(entry: RecorderEntry) -> str:
    """Return the script's innermost frame outside of torch; "" without frames.

    Only pickles have frames.
    """
    for frame in entry.frames:
        if "/torch/" not in frame.filename and "/outlast/" not in frame.filename:
            file = frame.filename[-_SHOWN:].rpartition("/")[2]
            return f"{file}:{frame.line} in {frame.name[:_SHOWN]}"
    return ""


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
        names = [name for name in (self.name, self.desc) if name and name != "undefined"]
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
            candidates = (ranks for ranks in listed.get(name, ()) if rank in ranks)
            ranks = members[rank].get(name) or next(candidates, ())
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


def format_ranges(ranks: Iterable[int]) -> str:
    """Return 0-3, 7, 9-11: at most sixteen ranges."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{a}-{b}" if b > a else f"{a}" for a, b in runs[:_RANGES_SHOWN]]
    if rest := runs[_RANGES_SHOWN:]:
        shown.append(f"and {sum(b - a + 1 for a, b in rest)} more")
    return ", ".join(shown)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2` or `ranks 0-3`."""
    known = sorted(ranks)
    return f"rank{'s' if len(known) != 1 else ''} {format_ranges(known)}"
