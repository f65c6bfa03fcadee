"""Conversion between checkpoints and torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

from outlast import pickle_reader
from outlast.checkpoint.format.codec import flatten
from outlast.checkpoint.format.manifest_checks import uncovered_elements
from outlast.checkpoint.format.manifests import ITEM_BYTES, Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.format.value_encoder import DTYPES
from outlast.checkpoint.interop.foreign_entries import Paths, paths_of, shared_in, values_of
from outlast.checkpoint.interop.foreign_layouts import (
    OBJECT,
    TensorNaming,
    new_directory,
    sizes_of,
    split_objects,
)
from outlast.checkpoint.interop.stream_writer import (
    ImportedCheckpoint,
    PartBytes,
    StreamItem,
    import_items,
)
from outlast.checkpoint.interop.torch_save_reader import (
    StoredTensor,
    TorchSaveFile,
    open_torch_save,
)
from outlast.checkpoint.load.checkpoint_reader import (
    CheckpointReader,
    TensorBlock,
    blocks_of,
    read_blocks,
)
from outlast.checkpoint.stores.store_interfaces import GET_BYTES_MAX, Store
from outlast.errors import CodecError, CorruptionError, StorageError
from outlast.pickle_reader import Builder, PickleGlobal, PickleRecord

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
            raise error.__context__ from None  # such as a full disk: torch reports only positions
        raise


def _tensor(block: TensorBlock, data: memoryview) -> torch.Tensor:
    dtype = DTYPES[block.tensor.dtype]
    if not data:
        return torch.empty(block.box.size, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).reshape(block.box.size)


METADATA = ".metadata"
_CHUNK_BYTES = 16  # the least that a chunk takes there; torch writes some 200


class DcpEntry(NamedTuple):
    """The bytes of one torch.save: file, offset and size."""

    file: str
    at: int
    size_bytes: int


class DcpSection(NamedTuple):
    """A box of a tensor, and its entry."""

    box: Box
    entry: DcpEntry


class DcpLayout(NamedTuple):
    """The contents of a directory: tensors, each with its sections, and other objects."""

    tensors: dict[str, tuple[Tensor, tuple[DcpSection, ...]]]
    objects: dict[str, DcpEntry]


def read_layout(source: Path) -> DcpLayout:
    """Return the layout of a directory; each claim about files and boxes is checked.

    Raises CodecError for metadata outside of the format, CorruptionError for contradictions and
    missing files, StorageError for unreadable files.
    """
    path = source / METADATA
    try:
        if path.stat().st_size > GET_BYTES_MAX:
            raise CorruptionError(f"{path}: more bytes than metadata can have; nothing was read")
        data = path.read_bytes()
        files = {entry.name: entry.stat().st_size for entry in source.iterdir() if entry.is_file()}
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path} is missing: no checkpoint of torch.distributed.checkpoint, one that was never"
            " finished, or one that was saved with use_collectives=False, which is not supported"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: could not be read: {error.strerror or error}") from error
    metadata = pickle_reader.read_pickle(data, _KNOWN, str(path))
    try:
        return _layout(metadata, files, path, len(data))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptionError(f"{path}: metadata of an unknown form ({error!r})") from error


def _layout(
    metadata: PickleRecord, files: Mapping[str, int], path: Path, size_bytes: int
) -> DcpLayout:
    """Return the checked layout.

    `size_bytes`: of the metadata; it bounds the chunks, since a pickle may repeat a list.
    """
    entries: dict[tuple[str, tuple[int, ...] | None], DcpEntry] = {}
    for index, info in metadata.field("storage_data").items():
        name, offset = _name(index.field("fqn")), index.field("offset")
        at = None if offset is None else sizes_of(offset)
        entries[name, at] = _entry(info, files, f"{path}: {name}")
    tensors: dict[str, tuple[Tensor, tuple[DcpSection, ...]]] = {}
    objects: dict[str, DcpEntry] = {}
    count = 0
    for name, about in metadata.field("state_dict_metadata").items():
        if _name(name) and about.name.endswith("BytesStorageMetadata"):
            objects[name] = entries[name, None]
            continue
        tensor = Tensor(_dtype(about, f"{path}: {name}"), sizes_of(about.field("size")))
        count += len(about.field("chunks"))
        if count > size_bytes // _CHUNK_BYTES:
            raise CorruptionError(f"{path}: {count} chunks in {size_bytes} bytes; nothing was read")
        sections: list[DcpSection] = []
        for chunk in about.field("chunks"):
            box = Box(sizes_of(chunk.field("offsets")), sizes_of(chunk.field("sizes")))
            if not box.within(tensor.shape):
                raise CorruptionError(f"{path}: {name} has a chunk {box} outside {tensor.shape}")
            if (name, box.start) not in entries:
                raise CorruptionError(f"{path}: no file is named for {name} from {box.start} on")
            sections.append(DcpSection(box, entries[name, box.start]))
        if missing := uncovered_elements(
            Box.whole(tensor.shape), (section.box for section in sections)
        ):
            raise CorruptionError(f"{path}: {name} of {tensor.shape} has no chunk for {missing[0]}")
        tensors[name] = tensor, tuple(sections)
    return DcpLayout(tensors, objects)


def _dtype(about: PickleRecord, where: str) -> str:
    """Return the name of the dtype in a tensor's metadata."""
    dtype = about.field("properties").state[0]
    name = dtype.name.removeprefix("torch.")
    if not isinstance(dtype, PickleGlobal) or name not in DTYPES:
        raise CodecError(f"{where} is a tensor of {dtype.name}, which Outlast cannot keep")
    return name


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} as a name")
    return value


def _entry(info: PickleRecord, files: Mapping[str, int], where: str) -> DcpEntry:
    entry = DcpEntry(_name(info.field("relative_path")), info.field("offset"), info.field("length"))
    if not type(entry.at) is type(entry.size_bytes) is int:
        raise TypeError("an entry lies at no whole number")
    if info.field("transform_descriptors"):
        raise CodecError(f"{where} is compressed or encrypted, which Outlast does not read")
    size = files.get(entry.file)  # a name of the listing leads nowhere else
    if size is None:
        raise CorruptionError(f"{where}: {entry.file!r} is missing from its directory")
    if entry.at < 0 or entry.size_bytes < 0 or entry.at + entry.size_bytes > size:
        raise CorruptionError(
            f"{where}: {entry.file} has {size} bytes, where bytes {entry.at} to"
            f" {entry.at + entry.size_bytes} were wanted"
        )
    return entry


_DCP = "torch.distributed.checkpoint."
_KNOWN: dict[str, Builder | None] = {
    **dict.fromkeys(f"torch.{name}" for name in DTYPES),
    **pickle_reader.known_records(
        *(
            f"{_DCP}metadata.{name}"
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_DCP}filesystem._StorageInfo",
        "torch.serialization._get_layout",
        *(f"pathlib.{flavour}Path" for flavour in ("Posix", "Windows", "PurePosix")),
        *(f"pathlib._local.{flavour}Path" for flavour in ("Posix", "Windows", "PurePosix")),
    ),
    "torch.Size": tuple,
    "builtins.getattr": pickle_reader.record_member,
}


_OBJECTS_BYTES_MAX = 1 << 30  # of all of them: they are in memory until they are written


def read_dcp(
    source: Path, store: Store, naming: TensorNaming, *, step: int, job: str
) -> ImportedCheckpoint:
    """Import a directory of torch.distributed.checkpoint as a checkpoint at `step`.

    Nothing in it is unpickled. Tensors are imported in the pieces in which they were saved, each
    with its checksum checked; objects of plain values become part of the shared value, others are
    skipped by name. Raises CorruptionError for damage and contradictions, CodecError for objects
    that are more than data, UsageError for an empty selection, StorageError for files that cannot
    be read or written. A failed import leaves nothing.
    """
    layout = read_layout(source)
    names = naming.apply([*layout.tensors, *layout.objects])
    items: list[StreamItem] = []
    for name, (tensor, sections) in layout.tensors.items():
        for section in sections if name in names else ():
            parts = partial(_tensor_parts, source, name, tensor, section)
            items.append(StreamItem(names[name], tensor, section.box, parts))
    objects: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    left_bytes = _OBJECTS_BYTES_MAX
    for name, entry in layout.objects.items():
        if name in names:
            try:
                objects[names[name]], size_bytes = _plain(source, name, entry, left_bytes)
                left_bytes -= size_bytes
            except CodecError as error:
                skipped[name] = str(error)
    return import_items(
        store, items, objects, step=step, job=job, by=f"import of {source.name}", skipped=skipped
    )


def _tensor_parts(
    source: Path, name: str, tensor: Tensor, section: DcpSection
) -> Iterator[PartBytes]:
    """Yield the bytes of a section in C order."""
    with _open(source, name, section.entry) as saved:
        stored = saved.value
        if (
            not isinstance(stored, StoredTensor)
            or (stored.dtype, stored.shape) != (tensor.dtype, section.box.size)
            or stored.size_bytes != section.box.elements * ITEM_BYTES[tensor.dtype]
        ):
            raise CorruptionError(
                f"{source / section.entry.file}: {name} is not the {tensor.dtype}"
                f" {section.box.size} that its metadata has; nothing was kept"
            )
        yield from saved.parts(stored)


def _plain(source: Path, name: str, entry: DcpEntry, limit_bytes: int) -> tuple[Any, int]:
    """Return an object, and its size in bytes. Raises CodecError for one that is too large."""
    with _open(source, name, entry) as saved:
        value = saved.plain(limit_bytes)
    flatten(value)  # raises CodecError for unsupported values
    return value, saved.object_bytes


@contextmanager
def _open(source: Path, name: str, entry: DcpEntry) -> Iterator[TorchSaveFile]:
    path = source / entry.file
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with open_torch_save(file, entry.at, entry.size_bytes, f"{path} ({name})") as saved:
                yield saved
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(f"{path}: could not be read: {error.strerror or error}") from error
