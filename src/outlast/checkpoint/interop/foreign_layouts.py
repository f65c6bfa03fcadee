"""Names, sizes and new directories of other formats."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlast.atomic_files import open_draft, refuse_existing
from outlast.checkpoint.format.manifests import Tensor
from outlast.errors import StorageError, UsageError

OBJECT = "dcp.object/"  # in front of the names of objects that DCP saved

_SHOWN_MAX = 10


@dataclass(frozen=True)
class TensorNaming:
    """Selection and renaming of tensors for import and export.

    `select`: only names with one of these prefixes (none given: all), without those of `drop`
    (complete names). The first matching prefix of `strip` is removed, `add` is prepended, and
    `rename` (complete names after these steps) comes last.
    """

    select: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()
    add: str = ""
    rename: Mapping[str, str] = field(default_factory=dict[str, str])

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """Return the new name of each selected name.

        Raises UsageError where nothing is selected or two names become one.
        """
        names = list(names)
        chosen = {name: self._renamed(name) for name in names if self._selects(name)}
        if not chosen:
            more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
            raise UsageError(
                f"no tensor has a name with the prefix {' or '.join(map(repr, self.select))};"
                f" there are {', '.join(_heads(names)) or 'none at all'}{more}; nothing was written"
            )
        sources: dict[str, str] = {}
        for name, other in chosen.items():
            if sources.setdefault(other, name) != name:
                raise UsageError(
                    f"{sources[other]} and {name} would both be called {other!r}; nothing was"
                    " written; select fewer, or rename one"
                )
        return chosen

    def _selects(self, name: str) -> bool:
        return name not in self.drop and (not self.select or name.startswith(self.select))

    def _renamed(self, name: str) -> str:
        prefix = next((prefix for prefix in self.strip if name.startswith(prefix)), "")
        name = self.add + name.removeprefix(prefix)
        return self.rename.get(name, name)


def split_objects(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint's tensors, and the bytes of DCP's objects, by name."""
    objects = {
        name.removeprefix(OBJECT): tensor
        for name, tensor in tensors.items()
        if name.startswith(OBJECT)
    }
    return {n: t for n, t in tensors.items() if not n.startswith(OBJECT)}, objects


def _heads(names: list[str]) -> list[str]:
    """Return some of the names; those with new first parts come first."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition(".")[0], name)
    return [*first.values(), *(name for name in names if name not in first.values())][:_SHOWN_MAX]


DIMS_MAX = 64  # NumPy's
_SIZE_MAX = (1 << 63) - 1  # torch's


def sizes_of(values: Any) -> tuple[int, ...]:
    """Return a tensor's sizes, strides or offsets. Raises TypeError or ValueError if invalid."""
    sizes = tuple(values)
    if len(sizes) > DIMS_MAX:
        raise ValueError(f"{len(sizes)} dimensions, where {DIMS_MAX} are possible")
    if not all(type(n) is int for n in sizes):
        raise TypeError("a tensor's sizes are no whole numbers")
    if sizes and not 0 <= min(sizes) <= max(sizes) <= _SIZE_MAX:
        raise ValueError("a tensor's sizes are negative, or larger than any")
    return sizes


@contextmanager
def new_directory(target: Path, size_bytes: int) -> Iterator[Path]:
    """Yield a draft directory; at the end sync it and rename it to `target`.

    The draft is removed after an error. Raises UsageError where `target` exists or its parent does
    not, StorageError where `size_bytes` do not fit or nothing can be written.
    """
    target = target.absolute()
    try:
        _check(target, size_bytes)
        with open_draft(target, new=True) as draft:
            draft.mkdir()
            yield draft
    except OSError as error:
        raise StorageError(
            f"{target}: could not be written: {error.strerror or error}; nothing was kept of it"
        ) from error


def _check(target: Path, size_bytes: int) -> None:
    refuse_existing(target)
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is no directory; make it first; nothing was written")
    free = shutil.disk_usage(target.parent).free
    if size_bytes > free:
        raise StorageError(
            f"{target} needs {size_bytes} bytes, and {target.parent} has {free} left; nothing was"
            " written"
        )
