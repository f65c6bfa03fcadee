"""Digests of tensors in place: xxh3 on the CPU, a sum of weighted words on a device.

Both detect every single flipped bit. Ranks that are compared compute on the same type of device,
which the fingerprint ensures.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from outlast.checkpoint.format.codec import raw
from outlast.errors import ProtectError

DIGEST_BYTES = 8
_BLOCK_WORDS = 1 << 22  # 32 MiB of a tensor at a time: bounds the memory for weights
_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, as a signed word
_MIX = -0x40A7B892E31B1A47
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object
_READ = 0x100  # PyBUF_READ


@torch.no_grad()
def digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return a digest of each tensor's bytes, waiting for a device once at most."""
    return values_of([word_of(tensor) for tensor in tensors])


Word = bytes | torch.Tensor


def values_of(words: Sequence[Word]) -> list[bytes]:
    """Return results of `word_of` as bytes, waiting for a device once at most."""
    found = [word if isinstance(word, bytes) else b"" for word in words]
    far = [index for index, word in enumerate(words) if not isinstance(word, bytes)]
    if far:
        sums = torch.stack([torch.as_tensor(words[index]) for index in far]).tolist()
        for index, word in zip(far, sums, strict=True):
            found[index] = word.to_bytes(DIGEST_BYTES, "little", signed=True)
    return found


_EMPTY = xxhash.xxh3_64_digest(b"")


def word_of(tensor: torch.Tensor, start: int = 0, end: int | None = None) -> Word:
    """Return a digest of a tensor: bytes, or a tensor on a device, without synchronization.

    `start`, `end`: of these elements only, in the order of a contiguous tensor.
    """
    if tensor.is_cpu and tensor.is_contiguous():  # a view of its bytes would cost seven calls
        count = tensor.numel() if end is None else min(end, tensor.numel())
        if count <= start:
            return _EMPTY
        width = tensor.element_size()
        address = tensor.data_ptr() + start * width
        return xxhash.xxh3_64_digest(_memory_at(address, (count - start) * width, _READ))
    tensor = tensor.detach().contiguous()
    if start or end is not None:
        tensor = tensor.reshape(-1)[start:end]
    return xxhash.xxh3_64_digest(raw(tensor)) if tensor.is_cpu else weighted_sum(tensor)


def first_difference(before: Mapping[str, Word], now: Mapping[str, Word]) -> str:
    """Return the first common name whose results of `word_of` differ, "" if there is none.

    Waits for a device once at most.
    """
    far: list[str] = []
    for name in (name for name in before if name in now):
        if isinstance(before[name], bytes) and before[name] != now[name]:
            return name
        if isinstance(before[name], torch.Tensor):
            far.append(name)
    if not far:
        return ""
    far.sort()
    one = torch.as_tensor(before[far[0]]).device
    old = torch.stack([torch.as_tensor(before[name], device=one) for name in far])
    new = torch.stack([torch.as_tensor(now[name], device=one) for name in far])
    differs = (old != new).tolist()
    return next((name for name, each in zip(far, differs, strict=True) if each), "")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank holds of a tensor: a DTensor's shard, else all of it.

    A DTensor is recognized by its method: importing the class takes 0.3 s in every process.
    """
    if type(tensor) in _PLAIN_TENSORS:
        return tensor
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # the memory itself, not a view recorded by autograd
        return to_local()


def local_shards(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the memory that this rank holds of each tensor, by name."""
    return {name: local_shard(tensor.detach()) for name, tensor in named}


def must_match(
    what: str, saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> None:
    """Raise ProtectError if names or shapes of a donor's tensors differ from those here."""
    wrong = [
        key
        for key in {*saved, *live}
        if key not in saved or key not in live or saved[key].shape != live[key].shape
    ]
    if wrong:
        raise ProtectError(
            f"{what}: {len(wrong)} entries differ from what the donor sent, first {min(wrong)!r};"
            " this worker's script built another model; nothing was taken over"
        )


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, each times an odd weight of its place, modulo 2**64.

    Integers are added, so that the order of a device's threads does not matter. An odd weight
    keeps every bit of a difference: one flipped bit always changes the sum.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = -data.numel() % 8
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    words = data.view(torch.int64)
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        place = torch.arange(start, start + block.numel(), device=block.device)
        weight = place * _ODD
        weight = (weight ^ (weight >> 29)) * _MIX
        total += ((weight | 1) * block).sum()
    return total


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether both hold the same objects; without `id`, which is an audit event."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
