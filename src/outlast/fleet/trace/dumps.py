"""One rank's flight-recorder dump: torch's JSON, or its pickle read as plain values only.

A pickle is never loaded: its opcodes are interpreted one by one (`outlast.checkpoint.foreign`), no
name in it is known, so that nothing can be called, and what it would come to when written out is
counted before it is used: a few bytes that refer to each other can stand for billions of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from outlast.checkpoint.foreign import pickled
from outlast.errors import CodecError, CorruptionError

BYTES_MAX = 64 << 20  # torch's default buffer of 2,000 entries is some 2 MB
OPCODES_MAX = 8_000_000
VALUES_MAX = 8_000_000
DEPTH_MAX = 32
MAJOR = "2"  # of the recorder's version: 2.0 came with torch 2.4, 2.10 is torch 2.13's
_PICKLE = b"\x80"
_ALIKE = (
    "profiling_name", "state", "process_group", "input_sizes", "output_sizes", "input_dtypes",
    "output_dtypes", "frames",
)  # fmt: skip

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Bounded, because a pickle can say one value a million times, and each is worked on.
Sizes = tuple[Annotated[tuple[Whole, ...], Meta(max_length=64)], ...]
Name = Annotated[str, Meta(max_length=256)]


class Frame(Struct, frozen=True, gc=False):
    """A line of the script's stack when a collective was entered. Only pickles have them."""

    name: str = ""
    filename: str = ""
    line: Whole = 0


class Entry(Struct, frozen=True, gc=False):
    """One record of the ring buffer, as torch writes it."""

    profiling_name: Name
    collective_seq_id: Whole
    record_id: Whole
    state: str
    pg_id: Whole = 0  # of the backend in its process: another one is another life of the group
    p2p_seq_id: Whole = 0
    process_group: tuple[str, str] = ("", "")
    is_p2p: bool = False
    retired: bool = False
    time_created_ns: Whole = 0
    time_discovered_started_ns: Whole | None = None
    time_discovered_completed_ns: Whole | None = None
    input_sizes: Sizes = ()
    output_sizes: Sizes = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()

    @property
    def backend(self) -> str:
        """nccl, gloo; a group with both counts in each."""
        return self.profiling_name.partition(":")[0]

    @property
    def kind(self) -> str:
        """all_reduce, coalesced, send 0->1."""
        return kind_of(self.profiling_name)


def kind_of(profiling_name: str) -> str:
    """Of nccl:all_reduce, all_reduce."""
    return profiling_name.partition(":")[2] or profiling_name


class GroupConfig(Struct, frozen=True):
    """What a dump says of a process group. `ranks`: "[0, 1]"; empty from gloo of torch 2.13."""

    name: str = ""
    desc: str = ""
    ranks: str | tuple[Whole, ...] = ()


class Dump(Struct, frozen=True):
    """One rank's dump. Entries are sorted by `record_id`, which counts from 0 since the process
    began to record: a buffer whose first is another has been written round. torch's JSON leaves
    them out where there are none."""

    version: str
    entries: tuple[Entry, ...] = ()
    pg_config: dict[str, GroupConfig] = {}


def decode(data: bytes, where: str, alike: dict[Any, Any] | None = None) -> Dump:
    """A dump from the bytes of a file; `where` is for messages. `alike`: values that dumps decoded
    before have, and that this one shares with them.

    Raises CodecError for what is no dump, or asks for more than plain values, and CorruptionError
    for one that is cut off or damaged.
    """
    if not data.strip():
        raise CorruptionError(f"{where}: the file is empty")
    if len(data) > BYTES_MAX:
        raise CodecError(f"{where}: larger than any dump ({len(data) >> 20} MiB)")
    try:
        dump = _decoded(data, where)
    except msgspec.ValidationError as error:
        raise CodecError(f"{where}: no flight-recorder dump ({error})") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CorruptionError(f"{where}: cut off or damaged ({error})") from error
    if dump.version.partition(".")[0] != MAJOR:
        raise CodecError(
            f"{where}: version {dump.version[:20]} of the recorder, of which {MAJOR}.x is read"
        )
    entries = sorted(dump.entries, key=lambda entry: entry.record_id)
    _share(entries, {} if alike is None else alike)
    return msgspec.structs.replace(dump, entries=tuple(entries))


def _share(entries: Iterable[Entry], alike: dict[Any, Any]) -> None:
    """What entries have alike is there once: a job has a hundred sorts of collectives, and millions
    of records of them. They are nobody else's yet, so that they may be changed."""
    for entry in entries:
        for name in _ALIKE:
            value = getattr(entry, name)
            msgspec.structs.force_setattr(entry, name, alike.setdefault(value, value))


def _decoded(data: bytes, where: str) -> Dump:
    if data.lstrip()[:1] == b"{":
        return msgspec.json.decode(data, type=Dump, strict=False)
    if data[:1] != _PICKLE:
        raise CodecError(f"{where}: neither JSON nor a pickle")
    value = pickled.read(data, {}, where, opcodes_max=OPCODES_MAX, keys=(str,))
    if _written_out(value, {}, 0) > VALUES_MAX:
        raise CodecError(f"{where}: its pickle refers to itself more often than data needs")
    return msgspec.convert(value, type=Dump, strict=False)


def _written_out(value: Any, known: dict[int, int], depth: int) -> int:
    """How many values it would be with nothing shared. What is `known` is not counted again."""
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return 1
    if depth > DEPTH_MAX:
        return VALUES_MAX + 1
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = VALUES_MAX + 1  # what refers to itself never ends
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    count = 1 + sum(_written_out(one, known, depth + 1) for one in inner)
    known[id(value)] = count
    return count
