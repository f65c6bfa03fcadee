"""What a checkpoint keeps of a save by torch.distributed.checkpoint, beside tensors.

Objects are tensors of bytes, as DCP's planner made them; nobody here unpickles them. The paths of
names in the nested dict that was saved are in the shared value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.checkpoint import tree
from outlast.checkpoint.foreign.entries import path_of
from outlast.checkpoint.reader import Reader

SHARED = "shared"
_PATHS = "dcp.paths"

Paths = Mapping[str, tuple[str | int, ...]]


def encode_paths(paths: Paths) -> bytes:
    """As the shared value of a checkpoint that DCP saved."""
    return tree.encode({_PATHS: dict(paths)})


def shared_in(reader: Reader) -> dict[str, Any]:
    """The shared value of a checkpoint, decoded; an empty one where it has none.

    Raises CorruptionError or StorageError as reading does.
    """
    if not any(blob.name == SHARED for blob in reader.checkpoint.manifests[0].blobs):
        return {}
    shared = tree.decode(reader.blob(0, SHARED))
    return shared if isinstance(shared, dict) else {}


def paths_of(reader: Reader) -> Paths:
    """The path of each name in the nested dict that was saved, or that a script would give."""
    shared = shared_in(reader)
    if _PATHS in shared:
        return shared[_PATHS]
    kinds = shared.get("kinds", {})
    return {name: path_of(name, kinds) for name in reader.checkpoint.tensors}
