"""Authenticated frames on a byte stream, and an event loop channel for them.

A frame is `magic(4) | length(4, big endian) | tag(16) | payload(length)`. The payload is an array
of `MessageEnvelope` as msgpack; the tag is the payload's blake2b hash keyed with the run's token.
Both ends of an agent's TCP connection and of a worker's socket pair use this module.

A channel sends what is queued in one turn of its event loop as one frame: 16 ranks of a host that
answer together cost one frame, and so do a controller's messages to them. The first message has a
frame of its own: a listener takes no large frame from a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from outlast.errors import WireError
from outlast.transport import messages
from outlast.transport.messages import MessageEnvelope
from outlast.transport.tls import reason_of

MAGIC = b"OLW3"
HEADER = struct.Struct(">4sI16s")
_ARRAY = struct.Struct(">BI")  # head of an array in msgpack: a tag, and how many follow
_ARRAY_TAG = 0xDD
FRAME_BYTES_MAX = 128 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[MessageEnvelope]] = msgspec.msgpack.Decoder(
    list[MessageEnvelope]
)


def _tag(token: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, key=token, digest_size=16).digest()


def encode_envelope(envelope: MessageEnvelope) -> bytes:
    """Return the envelope as part of a frame; raises WireError above FRAME_BYTES_MAX."""
    data = _encoder.encode(envelope)
    if len(data) + _ARRAY.size > FRAME_BYTES_MAX:
        raise WireError(
            f"message {type(envelope.body).__name__} of {len(data)} bytes is above the limit of"
            f" {FRAME_BYTES_MAX}: the state that one rank keeps outside the process is too large"
        )
    return data


def pack_frame(envelopes: Sequence[bytes], token: bytes) -> bytes:
    """Return encoded envelopes as one frame. It must not exceed FRAME_BYTES_MAX."""
    payload = b"".join((_ARRAY.pack(_ARRAY_TAG, len(envelopes)), *envelopes))
    return HEADER.pack(MAGIC, len(payload), _tag(token, payload)) + payload


def encode_frame(envelope: MessageEnvelope, token: bytes) -> bytes:
    """Return one envelope as a frame; raises WireError above FRAME_BYTES_MAX."""
    return pack_frame((encode_envelope(envelope),), token)


def _decode(payload: bytes) -> list[MessageEnvelope]:
    """Return the envelopes of an authentic frame; raises WireError."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError(f"a frame cannot be read: {error}") from error


class FrameDecoder:
    """Decoder of a byte stream into envelopes. After a WireError the connection must be closed."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageEnvelope]:
        """Yield the envelopes of the frames completed by `data`; raises WireError for an invalid
        frame."""
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
            yield from _decode(payload)


_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_READ_BYTES = 256 << 10
_READS_MAX = 16  # per turn of the loop: one sender must not starve the others
PENDING_BYTES_MAX = 512 << 20
STRANGER_BYTES_MAX = 64 << 10
SILENCE_S = 3


def _reason(error: OSError) -> str:
    return reason_of(error) if isinstance(error, ssl.SSLError) else str(error.strerror)


def end_when_unreachable(sock: socket.socket, silence_s: int = SILENCE_S) -> None:
    """Let a connection end when the peer's kernel acknowledges nothing for `silence_s`. TCP repeats
    after ever longer pauses: a new connection is through first when a cut network heals."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_s * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, 1)


class Channel:
    """Bidirectional channel of frames. `on_frame` gets every authentic envelope; `on_closed` is
    called once, with the reason, when the stream has ended or is invalid.

    A `stranger` is an unauthenticated peer, limited to STRANGER_BYTES_MAX before its first frame.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        on_frame: Callable[[messages.MessageEnvelope], None],
        on_closed: Callable[[str], None],
        *,
        stranger: bool = False,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            end_when_unreachable(sock)
        self._sock = sock
        self._token = token
        self._decoder = FrameDecoder(token)
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._stranger = stranger
        self._stranger_bytes = 0
        self._queued: list[bytes] = []  # encoded envelopes of this turn of the loop
        self._queued_bytes = 0
        self._is_first = True  # nothing was sent yet
        self._pending: deque[memoryview] = deque()  # frames
        self._pending_bytes = 0
        self._is_full = False  # the kernel takes no more now
        self._loop = asyncio.get_running_loop()
        self._broken = ""  # why nothing can be sent any more; what the peer has sent is still read
        self.closed = False
        self._loop.add_reader(sock, self._readable)

    def send(self, envelope: messages.MessageEnvelope) -> bool:
        """Queue one envelope for this turn's frame; return False if the stream is closed, also by
        exceeding PENDING_BYTES_MAX of unread data. Raises WireError above FRAME_BYTES_MAX."""
        if self.closed or self._broken:
            return False
        data = encode_envelope(envelope)
        if self._pending_bytes + self._queued_bytes + len(data) > PENDING_BYTES_MAX:
            self.close(f"the peer left {self._pending_bytes} bytes unread")
            return False
        if self._queued_bytes + len(data) + _ARRAY.size > FRAME_BYTES_MAX:
            self._flush()
        if not self._queued:
            self._loop.call_soon(self._flush)
        self._queued.append(data)
        self._queued_bytes += len(data)
        if self._is_first:
            self._is_first = False
            self._flush()
        return True

    def _flush(self) -> None:
        """Send what this turn has queued as one frame."""
        if not self._queued or self.closed or self._broken:
            return
        frame = memoryview(pack_frame(self._queued, self._token))
        self._queued.clear()
        self._queued_bytes = 0
        self._pending.append(frame)
        self._pending_bytes += len(frame)
        if len(self._pending) == 1:
            self._writable()

    def read_rest(self) -> None:
        """Read the remaining data of a dead peer."""
        while not self.closed and self._read_once() > 0:
            pass

    def close(self, reason: str = "closed here") -> None:
        """Close the connection, with a reason for the log."""
        self._flush()
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._pending.clear()
        self._pending_bytes = 0
        self._on_closed(reason)

    def _readable(self) -> None:
        least = 1 if isinstance(self._sock, ssl.SSLSocket) else _READ_BYTES
        for _ in range(_READS_MAX):
            if self.closed or self._read_once() < least:
                return

    def _read_once(self) -> int:
        """Return how many bytes were read: 0 if there are none now or the channel is closed."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except _LATER:
            return 0
        except OSError as error:
            self.close(f"the connection broke: {_reason(error)}")
            return 0
        if not data:
            self.close("the peer closed the connection")
            return 0
        self._stranger_bytes += len(data) if self._stranger else 0
        try:
            for envelope in self._decoder.feed(data):
                self._stranger = False
                self._on_frame(envelope)
                if self.closed:
                    return 0
        except WireError as error:
            self.close(str(error))
            return 0
        if self._stranger and self._stranger_bytes > STRANGER_BYTES_MAX:
            self.close(f"no authentic frame within {STRANGER_BYTES_MAX} bytes")
            return 0
        return len(data)

    def _writable(self) -> None:
        try:
            while self._pending:
                sent = self._sock.send(self._pending[0])
                self._pending_bytes -= sent
                if sent < len(self._pending[0]):
                    self._pending[0] = self._pending[0][sent:]
                else:
                    self._pending.popleft()
        except _LATER:
            self._is_full = True
            self._loop.add_writer(self._sock, self._writable)
            return
        except OSError as error:
            self._broken = f"the connection broke: {_reason(error)}"
            self._pending.clear()
            self._pending_bytes = 0
            self._loop.call_soon(self._end)  # later: the caller may be at work on another frame
        if self._is_full:
            self._is_full = False
            with contextlib.suppress(ValueError):
                self._loop.remove_writer(self._sock)

    def _end(self) -> None:
        """Close a connection that cannot be written to, after its peer's last frames."""
        self.read_rest()
        self.close(self._broken)
