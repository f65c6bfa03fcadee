"""What of two checkpoints may differ, told by the digests of their chunks: no shard is read."""

from __future__ import annotations

from itertools import zip_longest

from outlast.checkpoint.catalog import Checkpoint
from outlast.checkpoint.chunks import Chunk
from outlast.checkpoint.record import Manifest


def suspects(a: Checkpoint, b: Checkpoint) -> set[str]:
    """Names of tensors that may differ, or be in one of them only; all others are equal to the
    bit. Where a rank's part was laid out otherwise, all that lies in it may differ.

    Raises CorruptionError or StorageError where a manifest cannot be trusted.
    """
    found: set[str] = set()
    for one, two in zip_longest(a.manifests, b.manifests):
        if one is None or two is None or not _laid_out_alike(one, two):
            found |= {name for each in (one, two) if each for name in each.tensors}
            continue
        pairs = enumerate(zip_longest(one.chunks, two.chunks))
        for number in [number for number, (left, right) in pairs if left != right]:
            for manifest in (one, two):
                if number < len(manifest.chunks):
                    found |= {n for n in Chunk(manifest, number).tensors if n in manifest.tensors}
    return found


def _laid_out_alike(one: Manifest, two: Manifest) -> bool:
    """Whether the same bytes at the same place of both shards mean the same."""
    return (one.chunk_bytes, one.tensors, one.pieces) == (two.chunk_bytes, two.tensors, two.pieces)
