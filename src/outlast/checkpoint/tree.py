"""Values without pickle: numbers, containers, tensors, arrays, generator states, to bytes and back.

`encode` and `decode` make one self-contained blob: `OLB1 | length of schema | schema | tensors |
xxh3_128`, little endian. `flatten` and `unflatten` keep the tensors apart, for those who stream
them. What is kept: None, bool, int, float (each bit), complex, str, bytes, list, tuple, dict,
OrderedDict, Counter, defaultdict of a builtin type, set, frozenset, strided tensors of every dtype
(values and device type; not strides, sharing or requires_grad), torch.Size, dtype and device, NumPy
arrays and scalars without objects, pathlib paths. Anything else is a CodecError with its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import xxhash

from outlast.checkpoint import decoder, encoder
from outlast.checkpoint.schema import BLOB_MAGIC, DIGEST_BYTES, SIZE, TensorSpec, seal
from outlast.errors import CorruptionError

__all__ = ["TensorSpec", "decode", "encode", "flatten", "layout", "raw", "unflatten"]


def flatten(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The schema of `value`, and its tensors: detached, by reference where contiguous.

    Raises CodecError naming the place ("scheduler.lr_lambdas[0] is a function ...").
    """
    writer = encoder.Writer()
    writer.value(value)
    return seal(b"".join(writer.parts)), writer.tensors


def unflatten(schema: bytes | memoryview, tensors: Iterable[torch.Tensor]) -> Any:
    """The value of `schema` with `tensors` in their places, by reference.

    Raises CorruptionError when the schema is damaged or does not fit the tensors.
    """
    rest = iter(tensors)

    def fitting(spec: TensorSpec) -> torch.Tensor:
        tensor = next(rest, None)
        if tensor is None:
            raise CorruptionError("a schema speaks of more tensors than there are")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise CorruptionError(
                f"a tensor of {tuple(tensor.shape)} {tensor.dtype} stands where the schema has"
                f" {spec.shape} {spec.dtype}; nothing was taken over"
            )
        return tensor

    value = decoder.read(schema, fitting)
    if next(rest, None) is not None:
        raise CorruptionError("there are more tensors than the schema speaks of")
    return value


def layout(schema: bytes | memoryview) -> list[TensorSpec]:
    """The tensors that belong to `schema`, in order, for who must allocate them.

    Raises CorruptionError when the schema is damaged.
    """
    specs: list[TensorSpec] = []
    nothing = torch.empty(0, device="cpu")

    def collect(spec: TensorSpec) -> torch.Tensor:
        specs.append(spec)
        return nothing

    decoder.read(schema, collect)
    return specs


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor: its own memory on the CPU (writing there writes the
    tensor), a copy from elsewhere."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():  # it may have any strides, which a view of its bytes must not have
        flat = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return flat.view(torch.uint8).cpu().numpy().data


def encode(value: Any) -> bytes:
    """`value` as one blob. Raises CodecError as `flatten` does."""
    schema, tensors = flatten(value)
    body = b"".join((BLOB_MAGIC, SIZE.pack(len(schema)), schema, *map(raw, tensors)))
    return body + xxhash.xxh3_128_digest(body)


def decode(blob: bytes | memoryview) -> Any:
    """The value of a blob; tensors own their memory, and are on this process's device of the type
    that they were on (on the CPU where it has none).

    Raises CorruptionError when any bit of it is wrong; nothing is taken over then.
    """
    view = memoryview(blob)
    body, end = view[:-DIGEST_BYTES], len(view) - DIGEST_BYTES
    start = len(BLOB_MAGIC) + SIZE.size
    if end < start:
        raise CorruptionError(f"a value of {len(view)} bytes is cut short; nothing was read")
    magic = bytes(body[: len(BLOB_MAGIC)])
    if magic != BLOB_MAGIC:
        raise CorruptionError(
            f"not a value of version 1 (starts with {magic!r}): it is damaged or was written by"
            " another version of Outlast; nothing was read"
        )
    if xxhash.xxh3_128_digest(body) != view[end:]:
        raise CorruptionError("a value's bytes do not match their digest; nothing was read")
    (schema_bytes,) = SIZE.unpack_from(body, len(BLOB_MAGIC))
    at = start + schema_bytes

    def copied(spec: TensorSpec) -> torch.Tensor:
        nonlocal at
        tensor = spec.allocate()
        piece = body[at : at + spec.size_bytes]
        raw(tensor)[:] = piece
        at += len(piece)
        return tensor.to(spec.home())

    value = decoder.read(body[start:at], copied)
    if at != end:
        raise CorruptionError(f"a value has {end - at} bytes too many; nothing was taken over")
    return value
