"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from outlast.errors import StorageError, UsageError


def draft_path(target: Path) -> Path:
    """Return a unique name beside `target`."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}")


def refuse_existing(target: Path) -> None:
    """Raise UsageError where `target` exists, even as a dangling link."""
    if os.path.lexists(target):
        raise UsageError(f"{target} is there already; nothing was overwritten; name a new one")


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_new(path: Path, text: str | None) -> None:
    """Write a new file, complete or not at all; None: only check that it can be written.

    Raises UsageError, StorageError.
    """
    refuse_existing(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--out {path}: there is no directory {path.absolute().parent}")
    if text is None:
        return
    draft = draft_path(path.absolute())
    try:
        try:
            draft.write_text(text, encoding="utf-8")
            sync(draft)
            draft.rename(path)
        except BaseException:  # Ctrl-C as well: the file appears whole, or not at all
            draft.unlink(missing_ok=True)
            raise
        sync(path.absolute().parent)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror}; nothing was kept of it"
        ) from error
