"""A directory of torch's distributed checkpoint, read into a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from outlast.checkpoint.dtypes import ITEM_BYTES
from outlast.checkpoint.foreign.dcp_metadata import Entry, Section, read_layout
from outlast.checkpoint.foreign.imported import Imported, import_items
from outlast.checkpoint.foreign.naming import Naming
from outlast.checkpoint.foreign.torch_saved import Saved, Stored, opened
from outlast.checkpoint.foreign.written import Item, Part
from outlast.checkpoint.record import Tensor
from outlast.checkpoint.storage import Store
from outlast.checkpoint.tree import flatten
from outlast.errors import CodecError, CorruptionError, StorageError

_OBJECTS_BYTES_MAX = 1 << 30  # of all of them: they are in memory until they are written


def read_dcp(source: Path, store: Store, naming: Naming, *, step: int, job: str) -> Imported:
    """Import a directory that torch.distributed.checkpoint wrote, as a checkpoint of its own at
    `step`.

    Nothing in it is unpickled. Tensors come over in the pieces in which they were saved, each with
    its checksum checked; objects of plain values become part of the shared value, others are
    skipped by name. Raises CorruptionError for what is damaged or contradicts itself, CodecError
    for what is more than data, UsageError for a selection of nothing, StorageError for what cannot
    be read or written. Nothing is left of an import that failed.
    """
    layout = read_layout(source)
    names = naming.apply([*layout.tensors, *layout.objects])
    items: list[Item] = []
    for name, (tensor, sections) in layout.tensors.items():
        for section in sections if name in names else ():
            parts = partial(_parts, source, name, tensor, section)
            items.append(Item(names[name], tensor, section.box, parts))
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
        store,
        items,
        objects,
        step=step,
        job=job,
        by=f"import of {source.name}",
        skipped=skipped,
    )


def _parts(source: Path, name: str, tensor: Tensor, section: Section) -> Iterator[Part]:
    """The bytes of a section in C order."""
    with _open(source, name, section.entry) as saved:
        stored = saved.value
        if (
            not isinstance(stored, Stored)
            or (stored.dtype, stored.shape) != (tensor.dtype, section.box.size)
            or stored.size_bytes != section.box.elements * ITEM_BYTES[tensor.dtype]
        ):
            raise CorruptionError(
                f"{source / section.entry.file}: {name} is not the {tensor.dtype}"
                f" {section.box.size} that its metadata has; nothing was kept"
            )
        yield from saved.parts(stored)


def _plain(source: Path, name: str, entry: Entry, limit_bytes: int) -> tuple[Any, int]:
    """An object, and about how many bytes it has. Raises CodecError for one that is too large."""
    with _open(source, name, entry) as saved:
        value = saved.plain(limit_bytes)
    flatten(value)  # refuses what the shared value cannot keep
    return value, saved.object_bytes


@contextmanager
def _open(source: Path, name: str, entry: Entry) -> Iterator[Saved]:
    path = source / entry.file
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with opened(file, entry.at, entry.size_bytes, f"{path} ({name})") as saved:
                yield saved
        finally:
            os.close(file)
    except OSError as error:
        raise StorageError(f"{path}: could not be read: {error.strerror or error}") from error
