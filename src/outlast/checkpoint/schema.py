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
STAGED_BYTES_MIN = 1 << 20
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
    """What a receiver must know of one tensor. `device` is a type ("cpu", "cuda")."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """Memory for its bytes, on the CPU whatever the script's default device is."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")

    def home(self) -> torch.device:
        """Where this process keeps such a tensor: its own device of that type, else the CPU."""
        if self.device == "cpu":
            return torch.device("cpu")
        own = torch.accelerator.current_accelerator(check_available=True)
        return torch.device(self.device if own is not None and own.type == self.device else "cpu")

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A model that waits to be taken over stays on the CPU, or it would lie in the device's
        memory twice. What is small goes home: owners of counters copy nothing, they keep them."""
        return tensor if self.size_bytes > STAGED_BYTES_MIN else tensor.to(self.home())


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
