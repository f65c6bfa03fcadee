"""Export and import of safetensors, in the layout that transformers loads; needs no torch.

One `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with an index.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import ITEM_BYTES, Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.interop.foreign_layouts import (
    TensorNaming,
    new_directory,
    sizes_of,
    split_objects,
)
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, blocks_of, read_blocks
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import CodecError, CorruptionError, StorageError, UsageError

if TYPE_CHECKING:
    from outlast.checkpoint.interop.stream_writer import ImportedCheckpoint

INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000  # limit of the safetensors library
KINDS = {  # by torch's names
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


SHARD_BYTES = 5_000_000_000  # as transformers divides a model


def write_safetensors(
    reader: CheckpointReader,
    target: Path,
    naming: TensorNaming,
    *,
    shard_bytes: int = SHARD_BYTES,
    tied: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Write the selected tensors to the new directory `target`; return its file names.

    No file has more than `shard_bytes` of tensors, unless one tensor has. `tied`: names (Outlast's)
    that are left out because another one has the same values, which is checked. Every byte is
    verified as it is read, and `target` appears complete or not at all. Raises UsageError for a
    selection that is empty or contradicts itself, CodecError for element types that safetensors
    lack, and errors of reading and writing.
    """
    tensors, _ = split_objects(reader.checkpoint.tensors)
    names = naming.apply(tensors)
    for name, other in (tied or {}).items():
        _check_tied(reader, tensors, name, other, names)
        del names[name]
    if wrong := [f"{name} ({tensors[name].dtype})" for name in names if not _kind(tensors[name])]:
        raise CodecError(
            f"safetensors have no such element type: {', '.join(wrong)}; nothing was written;"
            " select others"
        )
    files = _divide(names, tensors, shard_bytes)
    total = sum(_size_bytes(tensors[name]) for name in names)
    headers = [_header(file, names, tensors) for file in files]
    with new_directory(target, total + sum(map(len, headers))) as draft:
        titles = _titles(len(files))
        for title, file, header in zip(titles, files, headers, strict=True):
            with (draft / title).open("wb") as out:
                out.write(header)
                blocks = (block for name in file for block in blocks_of(name, tensors[name]))
                for _, data in read_blocks(reader, blocks):
                    out.write(data)
        if len(files) > 1:
            placed = {
                names[name]: title
                for title, file in zip(titles, files, strict=True)
                for name in file
            }
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            (draft / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)) + b"\n")
            titles.append(INDEX)
    return tuple(titles)


def _kind(tensor: Tensor) -> str:
    return KINDS.get(tensor.dtype, "")


def _size_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _divide(
    names: Mapping[str, str], tensors: Mapping[str, Tensor], shard_bytes: int
) -> list[list[str]]:
    """Return the names of each file.

    Files follow the order of target names; within a file wide elements come first, so that each
    tensor lies at a multiple of its element's size.
    """
    files: list[list[str]] = [[]]
    file_bytes = 0
    for name in sorted(names, key=lambda name: names[name]):
        size = _size_bytes(tensors[name])
        if files[-1] and file_bytes + size > shard_bytes:
            files.append([])
            file_bytes = 0
        files[-1].append(name)
        file_bytes += size
    for file in files:
        file.sort(key=lambda name: -ITEM_BYTES[tensors[name].dtype])
    return files


def _header(file: list[str], names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in file:
        tensor = tensors[name]
        end = at + _size_bytes(tensor)
        entries[names[name]] = {
            "dtype": _kind(tensor),
            "shape": tensor.shape,
            "data_offsets": (at, end),
        }
        at = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_BYTES_MAX:
        raise UsageError(f"{len(file)} tensors are too many for one file; use smaller files")
    return struct.pack("<Q", len(header)) + header


def _titles(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _check_tied(
    reader: CheckpointReader,
    tensors: Mapping[str, Tensor],
    name: str,
    other: str,
    names: Mapping[str, str],
) -> None:
    """Raise UsageError unless both are selected and have the same values."""
    if missing := [each for each in (name, other) if each not in names]:
        raise UsageError(f"{missing[0]} is given as tied, and is not selected")
    if tensors[name] == tensors[other]:
        pairs = zip(blocks_of(name, tensors[name]), blocks_of(other, tensors[other]), strict=True)
        read = (bytes(data) for _, data in read_blocks(reader, (b for pair in pairs for b in pair)))
        if all(first == second for first, second in zip(read, read, strict=True)):
            return
    raise UsageError(
        f"{name} is given as tied to {other}, and has other values; nothing was written"
    )


_PART_BYTES = 16 << 20
_DIVIDED = "DCP_SHARDING_INFO"  # in the metadata of files that hold parts of tensors
_MALFORMED = (msgspec.DecodeError, RecursionError, ValueError)
_NAMES = {kind: name for name, kind in KINDS.items()}


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsFiles(NamedTuple):
    """A tensor in a file: its bytes lie there in C order."""

    tensor: Tensor
    file: Path
    at: int
    size_bytes: int


def read_safetensors(
    source: Path, store: Store, naming: TensorNaming, *, step: int, job: str
) -> ImportedCheckpoint:
    """Import a file, or a directory with one file or an index, as a checkpoint at `step`.

    Raises CorruptionError for files that contradict themselves or are cut short, CodecError for
    element types that a checkpoint cannot keep, UsageError for an empty selection, StorageError for
    files that cannot be read or written. A failed import leaves nothing.
    """
    from outlast.checkpoint.interop.stream_writer import StreamItem, import_items  # needs torch

    tensors = find_safetensors(source)
    names = naming.apply(tensors)
    items = [
        StreamItem(new, stored.tensor, Box.whole(stored.tensor.shape), partial(_parts, stored))
        for stored, new in ((tensors[old], new) for old, new in names.items())
    ]
    return import_items(store, items, {}, step=step, job=job, by=f"import of {source.name}")


def find_safetensors(source: Path) -> dict[str, SafetensorsFiles]:
    """Return every tensor of a file or a directory, by name. Raises as `read_safetensors`."""
    if not source.is_dir():
        return _in_file(source)
    if (source / INDEX).exists():
        return _indexed(source)
    files = sorted(source.glob("*.safetensors"))
    if len(files) != 1:
        raise UsageError(
            f"{source} has {len(files)} files of safetensors and no {INDEX}; name one file"
        )
    return _in_file(files[0])


def _indexed(source: Path) -> dict[str, SafetensorsFiles]:
    path = source / INDEX
    if (size := _size(path)) > HEADER_BYTES_MAX:
        raise CorruptionError(f"{path}: {size} bytes are more than an index has")
    data = _read(path, 0, size)
    try:
        placed = msgspec.json.decode(data, type=_Index).weight_map
    except _MALFORMED as error:
        raise CorruptionError(f"{path}: {error}; nothing was read") from error
    files: dict[str, dict[str, SafetensorsFiles]] = {}
    tensors: dict[str, SafetensorsFiles] = {}
    for name, title in placed.items():
        if Path(title).name != title or "\0" in title:
            raise CorruptionError(f"{path}: {title!r} leads out of its directory")
        file_tensors = files.get(title) or files.setdefault(title, _in_file(source / title))
        if name not in file_tensors:
            raise CorruptionError(f"{path}: {name} is not in {title}; nothing was read")
        tensors[name] = file_tensors[name]
    return tensors


def _in_file(path: Path) -> dict[str, SafetensorsFiles]:
    size = _size(path)
    (length,) = struct.unpack("<Q", _read(path, 0, 8))
    if length > min(HEADER_BYTES_MAX, size - 8):
        raise CorruptionError(f"{path}: a header of {length} bytes in {size}; nothing was read")
    header = _read(path, 8, length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        about = msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str])
        header_entries = {
            name: msgspec.json.decode(raw, type=_HeaderEntry) for name, raw in entries.items()
        }
        for entry in header_entries.values():
            sizes_of(entry.shape)
    except _MALFORMED as error:
        raise CorruptionError(f"{path}: {error}; nothing was read") from error
    if _DIVIDED in about:
        raise CodecError(
            f"{path} holds parts of tensors, as torch.distributed.checkpoint writes them for"
            " consolidation; consolidate them first"
        )
    return _checked(header_entries, path, 8 + length, size)


def _checked(
    header_entries: Mapping[str, _HeaderEntry], path: Path, start: int, size: int
) -> dict[str, SafetensorsFiles]:
    """Return the tensors of a valid header: known dtypes, right sizes, no gaps."""
    tensors: dict[str, SafetensorsFiles] = {}
    at = 0
    for name, entry in sorted(header_entries.items(), key=lambda pair: pair[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in _NAMES:
            raise CodecError(f"{path}: {name} is of type {entry.dtype}, which Outlast cannot keep")
        tensor = Tensor(_NAMES[entry.dtype], entry.shape)
        needed = math.prod(entry.shape) * ITEM_BYTES[tensor.dtype]
        if begin != at or end - begin != needed:
            raise CorruptionError(
                f"{path}: {name} of {entry.dtype} {entry.shape} at bytes {begin} to {end}, where"
                f" {at} to {at + needed} were due; nothing was read"
            )
        tensors[name] = SafetensorsFiles(tensor, path, start + begin, needed)
        at = end
    if start + at != size:
        raise CorruptionError(
            f"{path}: {size} bytes where its header has {start + at}; nothing was read"
        )
    return tensors


def _parts(stored: SafetensorsFiles) -> Iterator[bytes]:
    for at in range(0, stored.size_bytes, _PART_BYTES):
        size = min(_PART_BYTES, stored.size_bytes - at)
        yield _read(stored.file, stored.at + at, size)


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise CorruptionError(f"{path} is missing; nothing was read") from error
    except OSError as error:
        raise StorageError(f"{path}: could not be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise CorruptionError(f"{path} is no regular file; nothing was read")
    return status.st_size


def _read(path: Path, at: int, size_bytes: int) -> bytes:
    """Return exactly these bytes. Raises CorruptionError where the file ends before them."""
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), size_bytes, at)
    except OSError as error:
        raise StorageError(f"{path}: could not be read: {error.strerror or error}") from error
    if len(data) != size_bytes:
        raise CorruptionError(f"{path}: ends at byte {at + len(data)}; nothing was read")
    return data
