"""State from a donor to a joiner: point to point, staged, checked by digest.

A transfer is a header (sizes), the schema, then the raw bytes of all tensors in chunks. The joiner
holds them in staging until Open, large tensors in host memory; both ends report the digest, and
the controller compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash

from outlast.checkpoint.format import codec
from outlast.errors import CorruptionError
from outlast.worker.groups import GroupRegistry

CHUNK_BYTES = 8 << 20
Ticket = tuple[str, int, float]  # digest, bytes, seconds


def send(groups: GroupRegistry, seat: int, state: Any, tick: Callable[[], None]) -> Ticket:
    """Send `state` to `seat`; `tick` is called once a chunk. Raises GroupError."""
    start = time.monotonic()
    schema, tensors = codec.flatten(state)
    total = sum(t.numel() * t.element_size() for t in tensors)
    groups.send(torch.tensor([len(schema), total], dtype=torch.int64, device="cpu"), seat, 0)
    head = torch.frombuffer(bytearray(schema), dtype=torch.uint8)
    groups.send(head, seat, 1)
    hasher = xxhash.xxh3_128(schema)
    for chunk in _chunks(tensors):
        tick()
        hasher.update(codec.raw(chunk))
        groups.send(chunk, seat, 2)
    return hasher.hexdigest(), total, time.monotonic() - start


def receive(groups: GroupRegistry, seat: int, tick: Callable[[], None]) -> tuple[Any, Ticket]:
    """Receive what `send` sends, large tensors on the CPU. Raises GroupError, CorruptionError."""
    start = time.monotonic()
    sizes = torch.zeros(2, dtype=torch.int64, device="cpu")
    groups.recv(sizes, seat, 0)
    schema_bytes, total = (int(x) for x in sizes)
    head = torch.zeros(schema_bytes, dtype=torch.uint8, device="cpu")
    groups.recv(head, seat, 1)
    schema = head.numpy().tobytes()
    specs = codec.layout(schema)
    if (expected := sum(spec.size_bytes for spec in specs)) != total:
        raise CorruptionError(
            f"seat {seat} announced {total} bytes of state, its schema says {expected}:"
            " nothing was taken over"
        )
    tensors = [spec.allocate() for spec in specs]
    hasher = xxhash.xxh3_128(schema)
    for chunk, views in _landing(tensors):
        tick()
        groups.recv(chunk, seat, 2)
        hasher.update(codec.raw(chunk))
        at = 0
        for view in views:
            view.copy_(chunk[at : at + view.numel()])
            at += view.numel()
    ticket = hasher.hexdigest(), total, time.monotonic() - start
    staged = [spec.staged(tensor) for spec, tensor in zip(specs, tensors, strict=True)]
    return codec.unflatten(schema, staged), ticket


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _pieces(sizes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Chunks as lists of (tensor, from, to): the same cut on both ends, from sizes alone."""
    chunk: list[tuple[int, int, int]] = []
    room = CHUNK_BYTES
    for index, size in enumerate(sizes):
        at = 0
        while at < size:
            take = min(room, size - at)
            chunk.append((index, at, at + take))
            at += take
            room -= take
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _chunks(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    sizes = [t.numel() * t.element_size() for t in tensors]
    for pieces in _pieces(sizes):
        parts = [_raw(tensors[index])[start:stop].cpu() for index, start, stop in pieces]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)


def _landing(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    flats = [_raw(t) for t in tensors]  # freshly allocated and contiguous: these are views
    for pieces in _pieces([f.numel() for f in flats]):
        views = [flats[index][start:stop] for index, start, stop in pieces]
        if len(views) == 1:
            yield views[0], []
        else:
            size = sum(view.numel() for view in views)
            yield torch.empty(size, dtype=torch.uint8, device="cpu"), views
