"""Import of safetensors, one file or several with an index.

The format has no digests: the import checks that the header contradicts neither itself nor the
file's length. From the import on every byte is covered.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import ITEM_BYTES, Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.interop.foreign_layouts import TensorNaming, sizes_of
from outlast.checkpoint.interop.safetensors_export import HEADER_BYTES_MAX, INDEX, KINDS
from outlast.checkpoint.interop.stream_writer import ImportedCheckpoint, StreamItem, import_items
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import CodecError, CorruptionError, StorageError, UsageError

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
    tensors = find_safetensors(source)
    names = naming.apply(tensors)
    items = [_item(new, tensors[old]) for old, new in names.items()]
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
        for one in header_entries.values():
            sizes_of(one.shape)
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
    for name, one in sorted(header_entries.items(), key=lambda pair: pair[1].data_offsets):
        begin, end = one.data_offsets
        if one.dtype not in _NAMES:
            raise CodecError(f"{path}: {name} is of type {one.dtype}, which Outlast cannot keep")
        tensor = Tensor(_NAMES[one.dtype], one.shape)
        needed = math.prod(one.shape) * ITEM_BYTES[tensor.dtype]
        if begin != at or end - begin != needed:
            raise CorruptionError(
                f"{path}: {name} of {one.dtype} {one.shape} at bytes {begin} to {end}, where"
                f" {at} to {at + needed} were due; nothing was read"
            )
        tensors[name] = SafetensorsFiles(tensor, path, start + begin, needed)
        at = end
    if start + at != size:
        raise CorruptionError(
            f"{path}: {size} bytes where its header has {start + at}; nothing was read"
        )
    return tensors


def _item(name: str, stored: SafetensorsFiles) -> StreamItem:
    return StreamItem(name, stored.tensor, Box.whole(stored.tensor.shape), partial(_parts, stored))


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
