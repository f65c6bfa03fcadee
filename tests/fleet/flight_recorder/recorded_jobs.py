"""Flight recorder dumps in torch's format: single records and simulated jobs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from outlast.fleet.flight_recorder.recorder_dumps import (
    DumpCollection,
    GroupConfig,
    RecorderDump,
    RecorderEntry,
)

T_NS = 1_700_000_000 * 10**9
STEP_NS = 10**9


def entry(
    name: str = "nccl:all_reduce", seq: int = 1, record: int = 0, *, p2p: bool = False, **more: Any
) -> RecorderEntry:
    values: dict[str, Any] = {
        "process_group": ("0", "default_pg"), "state": "completed", "retired": True,
        "input_sizes": ((4,),), "output_sizes": ((4,),), "input_dtypes": ("Float",),
        "output_dtypes": ("Float",), "time_created_ns": T_NS + record * STEP_NS,
        "time_discovered_started_ns": T_NS if name.startswith("nccl") else None,
    }  # fmt: skip
    numbers = {"p2p_seq_id": seq, "collective_seq_id": 0} if p2p else {"collective_seq_id": seq}
    return RecorderEntry(
        profiling_name=name, record_id=record, is_p2p=p2p, **{**values, **numbers, **more}
    )


def dump(*entries: RecorderEntry, groups: dict[str, tuple[int, ...]] | None = None) -> RecorderDump:
    """Return a dump. `groups`: members by name; "0" is all."""
    config = {
        name: GroupConfig(name, "default_pg" if name == "0" else f"d{name}", str(list(ranks)))
        for name, ranks in (groups or {}).items()
    }
    return RecorderDump("2.10", entries, config)


def read(dumps: dict[int, RecorderDump]) -> DumpCollection:
    return DumpCollection(dumps, {}, [], {}, set())


def write(folder: Path, dumps: dict[int, RecorderDump], *, as_pickle: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, one in dumps.items():
        if as_pickle:
            data = pickled(msgspec.to_builtins(one))
            (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
        else:
            (folder / f"rank_{rank}.json").write_bytes(msgspec.json.encode(one))


class Raw(NamedTuple):
    """Opcodes in place of a value."""

    opcodes: bytes


def pickled(value: Any) -> bytes:
    """Return a pickle of plain values, as torch writes them (protocol 2)."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    match value:
        case Raw():
            return value.opcodes
        case None | bool():
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case int():
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case dict():
            pairs = b"".join(_opcodes(key) + _opcodes(one) for key, one in value.items())
            return b"}(" + pairs + b"u"
        case tuple():
            return b"(" + b"".join(map(_opcodes, value)) + b"t"
        case _:
            return b"](" + b"".join(map(_opcodes, value)) + b"e"


class Job(NamedTuple):
    """Groups by number (0: all ranks), and the groups of its collectives, in order."""

    world: int
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[int, ...]


def played(
    job: Job, culprit: int, stops_at: int, *, gloo: bool, kept: int = 10**6, told: bool = True
) -> tuple[dict[int, RecorderDump], bool]:
    """Return the dumps of a stalled job, and whether any rank waits for `culprit`.

    `culprit` omits its `stops_at`-th collective and all after it. A rank waits in each collective
    until it is complete. `kept`: number of records of a rank.
    """
    at = dict.fromkeys(range(job.world), 0)  # each rank's place in the calls
    own = {rank: [c for c in job.calls if rank in job.groups[c]] for rank in at}
    ends = {rank: stops_at if rank == culprit else len(own[rank]) for rank in at}
    done: dict[int, int] = dict.fromkeys(range(len(job.groups)), 0)  # by group
    moved = True
    while moved:
        moved = False
        for number, members in enumerate(job.groups):
            if all(at[r] < ends[r] and own[r][at[r]] == number for r in members):
                done[number] += 1
                moved = True
                for rank in members:
                    at[rank] += 1
    dumps = {
        rank: _dump(job, own[rank][: min(at[rank] + 1, ends[rank])], done, gloo, kept, told)
        for rank in at
    }
    return dumps, any(at[rank] < ends[rank] for rank in at)


def _dump(
    job: Job, entered: Sequence[int], done: dict[int, int], gloo: bool, kept: int, told: bool
) -> RecorderDump:
    entries: list[RecorderEntry] = []
    seqs = dict.fromkeys(range(len(job.groups)), 0)
    for record, number in enumerate(entered):
        seqs[number] += 1
        ended = seqs[number] <= done[number]
        entries.append(
            entry(
                f"{'gloo' if gloo else 'nccl'}:all_reduce", seqs[number], record,
                process_group=(str(number), "default_pg" if number == 0 else f"d{number}"),
                state="scheduled" if gloo else "completed" if ended else "started", retired=ended,
            )
        )  # fmt: skip
    config = {str(number): members for number, members in enumerate(job.groups)} if told else {}
    return dump(*entries[-kept:], groups=config)
