"""Consistency checks of commit records, manifests and files. Pure.

Digests detect a damaged record; these checks detect one that was written wrongly, or is in the
wrong place. A fault is part of a sentence ("is of job 'a' where ...").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET

from outlast.checkpoint.format.manifests import (
    FORMAT_FROZEN,
    ITEM_BYTES,
    Commit,
    Manifest,
    ManifestEntry,
    Tensor,
    ValueSample,
    digest_of,
    manifest_name,
    shard_name,
)
from outlast.checkpoint.format.tensor_boxes import Box, divide
from outlast.errors import CorruptionError

CHUNK_BYTES_MAX = 1 << 30
_BLOCK_BYTES = 4096
_NAMED_MAX = 8  # in a message
_MOST = (1 << 63) // 16  # elements, of any type: torch counts bytes in 64 bits


def check_commit(commit: Commit, directory: str) -> Iterator[str]:
    """Yield the faults of a commit record in the directory `directory`."""
    if commit.place.directory != directory:
        yield f"is the record of {commit.place.directory}"
    named = [(entry.rank, entry.name) for entry in commit.manifests]
    wanted = [(rank, manifest_name(rank)) for rank in range(len(named))]
    if not 0 < commit.world == len(named) or named != wanted:
        yield f"does not name the manifests of ranks 0 to {commit.world - 1}"


def check_manifest(data: bytes, entry: ManifestEntry) -> Iterator[str]:
    """Yield the faults of a manifest's bytes, by the commit record."""
    if len(data) != entry.size_bytes:
        yield f"has {len(data)} bytes where the commit record has {entry.size_bytes}"
    elif digest_of(data) != entry.digest:
        yield "does not match its digest in the commit record"


def check_part(manifest: Manifest, rank: int, commit: Commit) -> Iterator[str]:
    """Yield the faults of rank `rank`'s manifest as a part of the checkpoint of `commit`."""
    for field, actual, expected in (
        ("job", manifest.job, commit.job),
        ("place", manifest.place.directory, commit.place.directory),
        ("world", manifest.world, commit.world),
        ("plan", manifest.plan, commit.plan),
        ("rank", manifest.rank, rank),
        ("shard", manifest.shard, shard_name(rank)),
    ):
        if actual != expected:
            yield f"is of {field} {actual!r} where the checkpoint has {expected!r}"
    if not 0 < manifest.chunk_bytes <= CHUNK_BYTES_MAX or manifest.chunk_bytes % _BLOCK_BYTES:
        yield f"has chunks of {manifest.chunk_bytes} bytes"
    elif len(manifest.chunks) != -(-manifest.size_bytes // manifest.chunk_bytes):
        yield f"has {len(manifest.chunks)} digests for {manifest.size_bytes} bytes"
    elif (manifest.format >= FORMAT_FROZEN) != (manifest.frozen is not UNSET):
        yield f"is of format {manifest.format}, with a frozen region of {manifest.frozen!r} bytes"
    elif manifest.frozen is not UNSET and not _is_region(manifest.frozen, manifest):
        yield f"has a frozen region of {manifest.frozen} bytes"
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"has {name}, of type {tensor.dtype!r}, which this Outlast does not know"
            return
        if min(tensor.shape, default=0) < 0 or math.prod(n or 1 for n in tensor.shape) > _MOST:
            yield f"has {name}, of shape {tensor.shape}, which no tensor has"
    for piece in manifest.pieces:
        tensor, box = manifest.tensors.get(piece.name), Box(piece.start, piece.size)
        width = ITEM_BYTES[tensor.dtype] if tensor else 0
        if tensor is None:
            yield f"has a piece of {piece.name}, which it does not describe"
        elif not box.within(tensor.shape):
            yield f"has a piece of {piece.name} outside of its shape {tensor.shape}"
        elif not _inside(piece.at, box.elements * width, manifest) or piece.at % width:
            yield f"has a piece of {piece.name} outside of its shard"
    for blob in manifest.blobs:
        if not _inside(blob.at, blob.size_bytes, manifest):
            yield f"has a blob {blob.name!r} outside of its shard"


def merge_manifests(manifests: Sequence[Manifest]) -> dict[str, Tensor]:
    """Return every tensor by name.

    Raises CorruptionError where two ranks describe one differently, or it is larger than all
    shards: memory is allocated for it before its pieces are read.
    """
    tensors: dict[str, Tensor] = {}
    size_bytes = sum(manifest.size_bytes for manifest in manifests)
    for manifest in manifests:
        for name, tensor in manifest.tensors.items():
            if math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] > size_bytes:
                raise CorruptionError(
                    f"tensor {name}: rank {manifest.rank} has {tensor.dtype} {tensor.shape}, more"
                    f" than the {size_bytes} bytes of all shards"
                )
            if tensors.setdefault(name, tensor) != tensor:
                raise CorruptionError(
                    f"tensor {name}: rank {manifest.rank} has {tensor.dtype} {tensor.shape} where"
                    f" another rank has {tensors[name].dtype} {tensors[name].shape}"
                )
    return tensors


def find_disagreements(samples: Mapping[int, Sequence[ValueSample]]) -> list[str]:
    """Return the differences of values that ranks share, in words: tensors and values by name.

    The ranks' common save of such a value is a mixture.
    """
    by_key: dict[str, dict[int, ValueSample]] = {}
    for rank, views in samples.items():
        for sample in views:
            by_key.setdefault(sample.key, {})[rank] = sample
    wrong: list[str] = []
    for samples_by_rank in by_key.values():
        ranks = next(iter(samples_by_rank.values())).ranks
        named = ", ".join(map(str, ranks[:_NAMED_MAX])) + ("..." if ranks[_NAMED_MAX:] else "")
        if tuple(sorted(samples_by_rank)) != ranks:
            wrong.append(f"ranks {named} lack samples of the values that they hold in common")
        elif len({each.digest for each in samples_by_rank.values()}) > 1:
            wrong.append(f"{_differing(samples_by_rank)} on ranks {named}")
    return wrong


def _differing(samples: Mapping[int, ValueSample]) -> str:
    views = list(samples.values())
    names = next((each.names for each in views if each.names), ())
    pieces = [[each.each[at : at + 8] for at in range(0, len(each.each), 8)] for each in views]
    odd = [number for number, row in enumerate(zip(*pieces, strict=False)) if len(set(row)) > 1]
    called = [names[number] if number < len(names) else f"tensor {number}" for number in odd]
    more = f" and {len(called) - _NAMED_MAX} more" if called[_NAMED_MAX:] else ""
    return f"{', '.join(called[:_NAMED_MAX]) or 'something'}{more}"


def check_files(files: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, str]:
    """Return the faults of files by name; `wanted`: the sizes in bytes."""
    faults: dict[str, str] = {}
    for name, size in wanted.items():
        size_bytes = files.get(name)
        if size_bytes is None:
            faults[name] = "is missing"
        elif size_bytes < 0:
            faults[name] = "is no regular file"
        elif size_bytes != size:
            faults[name] = f"has {size_bytes} bytes where {size} were written"
    return faults


def uncovered_elements(wanted: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return the parts of `wanted` that lie in none of `boxes`."""
    uncovered = [wanted] if wanted.elements else []
    for box in boxes:
        if not uncovered:
            break
        _, uncovered = divide(uncovered, box)
    return uncovered


def _is_region(size_bytes: int, manifest: Manifest) -> bool:
    return 0 < size_bytes <= manifest.size_bytes and not size_bytes % manifest.chunk_bytes


def _inside(at: int, size_bytes: int, manifest: Manifest) -> bool:
    return at >= 0 and size_bytes >= 0 and at + size_bytes <= manifest.size_bytes
