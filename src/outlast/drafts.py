"""What appears whole, or not at all: written beside its place, synced, and renamed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from outlast.errors import UsageError


def draft_of(target: Path) -> Path:
    """A name beside `target` that nobody else has."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}")


def refuse_existing(target: Path) -> None:
    """Raises UsageError where something is at `target`, a dangling link included."""
    if os.path.lexists(target):
        raise UsageError(f"{target} is there already; nothing was overwritten; name a new one")


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
