"""A new directory that appears whole, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outlast.atomic_files import draft_path, refuse_existing, sync
from outlast.errors import StorageError, UsageError


@contextmanager
def new_directory(target: Path, size_bytes: int) -> Iterator[Path]:
    """A draft to fill; it is synced and renamed to `target` at the end, removed after an error.

    Raises UsageError where `target` is there already or its parent is not, StorageError where
    `size_bytes` do not fit or nothing can be written.
    """
    target = target.absolute()
    draft = draft_path(target)
    try:
        _check(target, size_bytes)
        draft.mkdir()
        try:
            yield draft
            for path in draft.iterdir():
                sync(path)
            sync(draft)
            refuse_existing(target)
            draft.rename(target)
        except BaseException:  # Ctrl-C as well: the target appears whole, or not at all
            shutil.rmtree(draft, ignore_errors=True)  # the first error is the one to report
            raise
        sync(target.parent)
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
