"""Samples of values that several ranks share, taken at every save, compared at the commit.

Ranks that hold the same box of a tensor each write a part of it, so that diverged replicas would be
mixed into one tensor with valid digests. Small tensors are sampled completely; large ones in
windows, at other places at each save.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from outlast.checkpoint.format.manifests import SavePoint, ValueSample

_WHOLE_BYTES = 64 << 10
_WINDOWS, _WINDOW_BYTES = 64, 512
_DEVICE_WHOLE_BYTES = 8 << 10  # on a device: samples are copied to the host
_DEVICE_WINDOWS = 16
_SLICES = 4  # a dimension, of tensors that are no run of memory


class SharedHolders(NamedTuple):
    """Names that the same ranks share, in order. `key`: equal on all of them."""

    key: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]


def salt_of(place: SavePoint) -> int:
    """Return the seed of a save's windows: equal on all ranks, different at the next save."""
    return xxhash.xxh3_64_intdigest(f"{place.step} {place.n}".encode())


def samples_of(
    shared_holders: Sequence[SharedHolders], digests: Mapping[str, bytes], rank: int
) -> list[ValueSample]:
    """Return the samples for this rank's manifest from `digests` by name."""
    return [
        ValueSample(
            key=group.key,
            ranks=group.ranks,
            digest=xxhash.xxh3_128_hexdigest(b"".join(digests[name] for name in group.names)),
            each="".join(digests[name][:4].hex() for name in group.names),
            names=group.names if rank == group.ranks[0] else (),
        )
        for group in shared_holders
    ]


@torch.no_grad()
def digests_of(tensors: Mapping[str, torch.Tensor], salt: int) -> dict[str, bytes]:
    """Return 8 bytes a tensor, by name: equal where the sampled bytes are equal."""
    digests: dict[str, bytes] = {}
    on_device: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        flat = _flat(tensor)
        if flat.is_cpu:
            digests[name] = _digest(flat, salt)
        else:
            on_device[name] = _windows(flat, salt)
    if on_device:  # one copy to the host for all of them
        host = torch.cat(list(on_device.values())).cpu().numpy()
        at = 0
        for name, part in on_device.items():
            digests[name] = xxhash.xxh3_64_digest(host[at : at + len(part)].data)
            at += len(part)
    return digests


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor where it is one plain run of memory; else a sample of it."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    tensor = tensor.detach()
    steps = tuple(slice(None, None, max(1, length // _SLICES)) for length in tensor.shape)
    return tensor[steps].resolve_conj().resolve_neg().contiguous()


def _digest(tensor: torch.Tensor, salt: int) -> bytes:
    size_bytes = tensor.nbytes
    if not size_bytes:
        return bytes(8)
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    if size_bytes <= _WHOLE_BYTES:
        return xxhash.xxh3_64_digest(memory)
    data = memoryview(memory)
    stride = size_bytes // _WINDOWS
    at = salt % (stride - _WINDOW_BYTES + 1)
    rows = np.frombuffer(data, np.uint8, stride * _WINDOWS).reshape(_WINDOWS, stride)
    return xxhash.xxh3_64_digest(np.ascontiguousarray(rows[:, at : at + _WINDOW_BYTES]).data)


def _windows(tensor: torch.Tensor, salt: int) -> torch.Tensor:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.numel() <= _DEVICE_WHOLE_BYTES:
        return flat
    stride = flat.numel() // _DEVICE_WINDOWS
    at = salt % (stride - _WINDOW_BYTES + 1)
    return flat.as_strided((_DEVICE_WINDOWS, _WINDOW_BYTES), (stride, 1), at).reshape(-1)
