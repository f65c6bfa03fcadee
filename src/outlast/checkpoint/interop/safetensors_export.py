"""Export of tensors as safetensors, in the layout that transformers loads; needs no torch.

One `model.safetensors`, or `model-00001-of-00003.safetensors` and so on with an index.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outlast.checkpoint.format.manifests import ITEM_BYTES, Tensor
from outlast.checkpoint.interop.foreign_layouts import TensorNaming, new_directory, split_objects
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, blocks_of, read_blocks
from outlast.errors import CodecError, UsageError

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
        raise UsageError(f"{missing[0]} is said to be tied, and is not selected")
    if tensors[name] == tensors[other]:
        pairs = zip(blocks_of(name, tensors[name]), blocks_of(other, tensors[other]), strict=True)
        read = (bytes(data) for _, data in read_blocks(reader, (b for pair in pairs for b in pair)))
        if all(one == two for one, two in zip(read, read, strict=True)):
            return
    raise UsageError(
        f"{name} is said to be tied to {other}, and has other values; nothing was written"
    )
