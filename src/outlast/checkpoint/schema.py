"""The frame around a schema, and what it says of each tensor.

A schema is `OLS1 | xxh3_64(body) | body`, little endian. A body is one node; a node is a tag byte
and its payload (encoder.py writes them, decoder.py reads them). Tensors are not inside: a tensor
node holds dtype, device type and shape, and the tensors travel beside the schema, in the order of
their nodes.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import NamedTuple

import torch
import xxhash

from outlast.errors import CorruptionError

MAGIC = b"OLS1"
BLOB_MAGIC = b"OLB1"
DIGEST_BYTES = 16
DEPTH_MAX = 100
_HEAD = struct.Struct("<4sQ")
SIZE = struct.Struct("<Q")
INT = struct.Struct("<q")
FLOAT = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")

FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
}

assert sys.byteorder == "little", "values are stored as this machine's bytes: little endian only"


class TensorSpec(NamedTuple):
    """What a receiver must allocate for one tensor. `device` is a type ("cpu", "cuda")."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def seal(body: bytes) -> bytes:
    """`body` with its head."""
    return _HEAD.pack(MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def unseal(schema: bytes | memoryview) -> memoryview:
    """The body. Raises CorruptionError when it is damaged or of another version."""
    if len(schema) < _HEAD.size:
        raise CorruptionError(f"a schema of {len(schema)} bytes is cut short; nothing was read")
    magic, digest = _HEAD.unpack_from(schema)
    if magic != MAGIC:
        raise CorruptionError(
            f"not a schema of version 1 (starts with {magic!r}): it is damaged or was written by"
            " another version of Outlast; nothing was read"
        )
    body = memoryview(schema)[_HEAD.size :]
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise CorruptionError("a schema's bytes do not match its digest; nothing was read")
    return body
