"""Frames on a byte stream: versioned, bounded, authenticated.

A frame is `magic(4) | length(4, big endian) | tag(16) | payload(length)`, where the payload is the
msgpack of a `MessageEnvelope` and the tag its blake2b keyed with the run's token.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator

import msgspec

from outlast.errors import WireError
from outlast.transport.messages import MessageEnvelope

MAGIC = b"OLW1"
HEADER = struct.Struct(">4sI16s")
FRAME_BYTES_MAX = 128 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[MessageEnvelope] = msgspec.msgpack.Decoder(MessageEnvelope)


def _tag(token: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, key=token, digest_size=16).digest()


def encode(envelope: MessageEnvelope, token: bytes) -> bytes:
    """One frame, ready to be written. Raises WireError above FRAME_BYTES_MAX."""
    payload = _encoder.encode(envelope)
    if len(payload) > FRAME_BYTES_MAX:
        raise WireError(
            f"frame {type(envelope.body).__name__} of {len(payload)} bytes is above the limit of"
            f" {FRAME_BYTES_MAX}: the state that one rank keeps outside the process is too large"
        )
    return HEADER.pack(MAGIC, len(payload), _tag(token, payload)) + payload


class Decoder:
    """Turns a byte stream back into envelopes. Raises WireError on the first bad byte; the
    connection is then useless and must be closed."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageEnvelope]:
        """Yield the frames that are complete after `data`. Raises WireError for one that is
        invalid."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            magic, length, tag = HEADER.unpack_from(self._buffer)
            if magic != MAGIC:
                raise WireError(f"not an Outlast frame (starts with {magic!r})")
            if length > FRAME_BYTES_MAX:
                raise WireError(f"a frame announces {length} bytes, above {FRAME_BYTES_MAX}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            if not hmac.compare_digest(tag, _tag(self._token, payload)):
                raise WireError("a frame does not carry this run's token")
            try:
                yield _decoder.decode(payload)
            except msgspec.DecodeError as error:
                raise WireError(f"a frame cannot be read: {error}") from error
