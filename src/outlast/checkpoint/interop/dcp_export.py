"""Export of a checkpoint to a directory that torch.distributed.checkpoint loads."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from outlast.checkpoint.format.manifests import Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.format.value_encoder import DTYPES
from outlast.checkpoint.interop.foreign_entries import Paths, paths_of, shared_in, values_of
from outlast.checkpoint.interop.foreign_layouts import (
    OBJECT,
    TensorNaming,
    new_directory,
    split_objects,
)
from outlast.checkpoint.load.checkpoint_reader import (
    CheckpointReader,
    TensorBlock,
    blocks_of,
    read_blocks,
)

_FILE = "__0_0.distcp"
_ENTRY_BYTES = 4096  # upper bound of torch.save's overhead a tensor


def write_dcp(reader: CheckpointReader, target: Path, naming: TensorNaming) -> None:
    """Write the selected tensors and values to the new directory `target`.

    Tensors keep their names, but for `naming`. Hyperparameters, counters and other plain values
    have the names of torch's `get_state_dict`. Objects that DCP saved through `OutlastWriter` are
    copied unchanged. Every byte is verified as it is read, in blocks that fit into memory, and
    `target` appears complete or not at all. Raises UsageError for a selection that is empty or
    contradicts itself, and errors of reading and writing.
    """
    tensors, objects = split_objects(reader.checkpoint.tensors)
    shared = shared_in(reader)
    flat, paths = flatten_state_dict(values_of(shared) if "kinds" in shared else {})
    values = {name: value for name, value in flat.items() if name not in tensors}
    names = naming.apply([*tensors, *objects, *values])
    saved = {names[name]: _saved(value) for name, value in values.items() if name in names}
    blocks = [b for name in tensors if name in names for b in blocks_of(name, tensors[name])]
    object_blocks = [
        TensorBlock(OBJECT + name, tensor, Box.whole(tensor.shape))
        for name, tensor in objects.items()
        if name in names
    ]
    size_bytes = sum(block.size_bytes + _ENTRY_BYTES for block in [*blocks, *object_blocks])
    with new_directory(target, size_bytes + sum(map(len, saved.values()))) as draft:
        metadata = _metadata(blocks, names, {**paths, **paths_of(reader)})
        results: list[WriteResult] = []
        with (draft / _FILE).open("wb") as out:
            for index, at in _entries(reader, [*object_blocks, *blocks], names, saved, out):
                length = out.tell() - at
                results.append(WriteResult(index, length, _StorageInfo(_FILE, at, length)))
                if index.offset is None:
                    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
        _MetadataWriter(draft).finish(metadata, [results])


class _MetadataWriter(FileSystemWriter):
    """torch's writer of metadata, without the name of a draft."""

    def storage_meta(self) -> StorageMeta:
        """Return empty metadata of the storage."""
        return StorageMeta()


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _metadata(blocks: list[TensorBlock], names: Mapping[str, str], known: Paths) -> Metadata:
    """Return the metadata of the tensors; objects are added later."""
    about: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, tensor, box in blocks:
        entry = about.setdefault(names[name], _storage_metadata(tensor))
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)))
    paths = {new: known.get(old, (new,)) if old == new else (new,) for old, new in names.items()}
    return Metadata(about, planner_data=paths)


def _storage_metadata(tensor: Tensor) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=DTYPES[tensor.dtype])
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), [])


def _entries(
    reader: CheckpointReader,
    blocks: list[TensorBlock],
    names: Mapping[str, str],
    saved: Mapping[str, bytes],
    out: io.BufferedWriter,
) -> Iterator[tuple[MetadataIndex, int]]:
    """Write all entries in order; yield each with its offset."""
    for name, data in saved.items():
        at = out.tell()
        out.write(data)
        yield MetadataIndex(name), at
    for block, data in read_blocks(reader, blocks):
        at = out.tell()
        if block.name.startswith(OBJECT):
            out.write(data)
            yield MetadataIndex(names[block.name.removeprefix(OBJECT)]), at
        else:
            _save(_tensor(block, data), out)
            yield MetadataIndex(names[block.name], block.box.start), at


def _save(tensor: torch.Tensor, out: io.BufferedWriter) -> None:
    try:
        torch.save(tensor, out)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None  # a full disk, say: torch reports positions
        raise


def _tensor(block: TensorBlock, data: memoryview) -> torch.Tensor:
    dtype = DTYPES[block.tensor.dtype]
    if not data:
        return torch.empty(block.box.size, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).reshape(block.box.size)
