"""What lies in a directory of torch's distributed checkpoint, from its `.metadata`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outlast.checkpoint.boxes import Box
from outlast.checkpoint.checking import uncovered
from outlast.checkpoint.foreign import pickled
from outlast.checkpoint.foreign.dtypes import DTYPES
from outlast.checkpoint.foreign.pickled import Builder, Global, Record
from outlast.checkpoint.foreign.sizes import sizes_of
from outlast.checkpoint.record import Tensor
from outlast.checkpoint.storage import GET_BYTES_MAX
from outlast.errors import CodecError, CorruptionError, StorageError

METADATA = ".metadata"
_CHUNK_BYTES = 16  # the least that a chunk takes there; torch writes some 200


class Entry(NamedTuple):
    """Bytes that one torch.save wrote: in which file, from where on."""

    file: str
    at: int
    size_bytes: int


class Section(NamedTuple):
    """A box of a tensor, and where it is."""

    box: Box
    entry: Entry


class Layout(NamedTuple):
    """A whole directory: tensors with the sections that are one together, and other objects."""

    tensors: dict[str, tuple[Tensor, tuple[Section, ...]]]
    objects: dict[str, Entry]


def read_layout(source: Path) -> Layout:
    """What a directory says that it holds; each claim about files and boxes is checked.

    Raises CodecError for metadata that name what is no part of the format, CorruptionError for
    what contradicts itself or is missing, StorageError for what cannot be read.
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
    metadata = pickled.read(data, _KNOWN, str(path))
    try:
        return _layout(metadata, files, path, len(data))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptionError(f"{path}: metadata of no known form ({error!r})") from error


def _layout(metadata: Record, files: Mapping[str, int], path: Path, size_bytes: int) -> Layout:
    """`size_bytes`: of the metadata. A list may be named in a pickle any number of times."""
    entries: dict[tuple[str, tuple[int, ...] | None], Entry] = {}
    for index, info in metadata.field("storage_data").items():
        name, offset = _name(index.field("fqn")), index.field("offset")
        at = None if offset is None else sizes_of(offset)
        entries[name, at] = _entry(info, files, f"{path}: {name}")
    tensors: dict[str, tuple[Tensor, tuple[Section, ...]]] = {}
    objects: dict[str, Entry] = {}
    count = 0
    for name, about in metadata.field("state_dict_metadata").items():
        if _name(name) and about.name.endswith("BytesStorageMetadata"):
            objects[name] = entries[name, None]
            continue
        tensor = Tensor(_dtype(about, f"{path}: {name}"), sizes_of(about.field("size")))
        count += len(about.field("chunks"))
        if count > size_bytes // _CHUNK_BYTES:
            raise CorruptionError(f"{path}: {count} chunks in {size_bytes} bytes; nothing was read")
        sections: list[Section] = []
        for chunk in about.field("chunks"):
            box = Box(sizes_of(chunk.field("offsets")), sizes_of(chunk.field("sizes")))
            if not box.within(tensor.shape):
                raise CorruptionError(f"{path}: {name} has a chunk {box} outside {tensor.shape}")
            if (name, box.start) not in entries:
                raise CorruptionError(f"{path}: no file is named for {name} from {box.start} on")
            sections.append(Section(box, entries[name, box.start]))
        if missing := uncovered(Box.whole(tensor.shape), (section.box for section in sections)):
            raise CorruptionError(f"{path}: {name} of {tensor.shape} has no chunk for {missing[0]}")
        tensors[name] = tensor, tuple(sections)
    return Layout(tensors, objects)


def _dtype(about: Record, where: str) -> str:
    """The dtype's name of a tensor's metadata."""
    dtype = about.field("properties").state[0]
    name = dtype.name.removeprefix("torch.")
    if not isinstance(dtype, Global) or name not in DTYPES:
        raise CodecError(f"{where} is a tensor of {dtype.name}, which Outlast cannot keep")
    return name


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} as a name")
    return value


def _entry(info: Record, files: Mapping[str, int], where: str) -> Entry:
    entry = Entry(_name(info.field("relative_path")), info.field("offset"), info.field("length"))
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
    **pickled.known_records(
        *(
            f"{_DCP}metadata.{name}"
            for name in (
                "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
                "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_DCP}filesystem._StorageInfo",
        "torch.serialization._get_layout",
        *(f"pathlib.{flavour}Path" for flavour in ("Posix", "Windows", "PurePosix")),
        *(f"pathlib._local.{flavour}Path" for flavour in ("Posix", "Windows", "PurePosix")),
    ),
    "torch.Size": tuple,
    "builtins.getattr": pickled.member,
}  # fmt: skip
