"""Authenticated TCP links between keepers, and their frames.

The token itself never travels. Frames and bytes are neither hidden nor signed: a network between
hosts must be the cluster's own. Every operation has a deadline (docs/format.md, "Copies").
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time

import msgspec

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.io_limits import RateLimiter
from outlast.errors import WireError

MAGIC = b"OLC1"
HELLO_S = 5.0
STALL_S = 10.0  # for one slice, or one answer: then the other end counts as gone
SLICE_BYTES = 1 << 20  # digested and passed on while it is in the processor's cache
FRAME_BYTES_MAX = 256 << 20
_HELLO_FRAME_BYTES_MAX = 1 << 10  # until a stranger has shown that it is none
_NONCE_BYTES = 32
_LENGTH = struct.Struct("<I")


class LinkFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of everything that is said between keepers."""


class Shown(LinkFrame, frozen=True, kw_only=True):
    """The token was known: `proof` of the one who says it, over both nonces."""

    nonce: bytes
    proof: bytes


class Offer(LinkFrame, frozen=True, kw_only=True):
    """A version of a rank's part comes: so many bytes, in memory of `arena_bytes`, which later ones
    will want as well. `copy` names this transfer; `lanes`: connections that carry it, this one the
    first."""

    copy: str
    lanes: int
    rank: int
    size_bytes: int
    chunk_bytes: int
    arena_bytes: int
    place: SavePoint | None = None

    def chunks(self, lane: int = 0, lanes: int = 1) -> range:
        """Where the chunks begin that one of `lanes` carries, in their order."""
        return range(lane * self.chunk_bytes, self.size_bytes, lanes * self.chunk_bytes)


class Join(LinkFrame, frozen=True, kw_only=True):
    """This connection is another lane of a transfer that was offered."""

    copy: str
    lane: int


class Ready(LinkFrame, frozen=True, kw_only=True):
    """There is memory for it: every lane sends its chunks, one after the other."""


class Sealed(LinkFrame, frozen=True, kw_only=True):
    """All was sent, and had not changed meanwhile: the part's manifest, with its chunks' digests,
    as it would lie in a file; of a strip, also the digests of what was sent, cut as the part is."""

    record: bytes
    strip: tuple[str, ...] = ()


class Kept(LinkFrame, frozen=True, kw_only=True):
    """The version is held; where `error` says why not, the one before it still is."""

    error: str = ""


LinkMessage = Shown | Offer | Join | Ready | Sealed | Kept
_decoder = msgspec.msgpack.Decoder(LinkMessage)


class KeeperLink:
    """One connection. Every wait ends by `due` on the monotonic clock, and earlier when the other
    end stalls: then it raises OSError, as for all that breaks; WireError for what is no frame.
    What is sent keeps to a `pace`."""

    def __init__(self, sock: socket.socket, due: float, pace: RateLimiter | None = None) -> None:
        self._sock = sock
        self._pace = pace
        self._timeout_s = -1.0  # not set yet
        self.due = due
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def open(
        cls, address: str, token: str, due: float, pace: RateLimiter | None = None
    ) -> KeeperLink:
        """To the keeper at HOST:PORT, which has shown that it knows the token, too."""
        host, _, port = address.rpartition(":")
        until = min(due, time.monotonic() + HELLO_S)
        left_s = max(0.001, until - time.monotonic())
        link = cls(socket.create_connection((host.strip("[]"), int(port)), left_s), until, pace)
        try:
            link._show(token)
        except BaseException:  # whatever it is, the socket must not stay open
            link.close()
            raise
        link.due = due
        return link

    @classmethod
    def answer(cls, sock: socket.socket, token: str) -> KeeperLink:
        """Whoever came, once it has shown the token. The socket is closed where this raises."""
        link = cls(sock, time.monotonic() + HELLO_S)
        try:
            link._ask(token)
        except BaseException:  # whatever it is, the socket must not stay open
            link.close()
            raise
        return link

    def send(self, frame: LinkMessage) -> None:
        payload = msgspec.msgpack.encode(frame)
        if len(payload) > FRAME_BYTES_MAX:
            raise WireError(f"a frame of {len(payload)} bytes, above {FRAME_BYTES_MAX}: not sent")
        self.send_bytes(memoryview(_LENGTH.pack(len(payload)) + payload))

    def receive(self, patience_s: float = STALL_S) -> LinkMessage:
        return self._receive(FRAME_BYTES_MAX, patience_s)

    def send_bytes(self, data: memoryview) -> None:
        if self._pace:
            self._pace.spend(len(data))
        self._hurry(STALL_S)
        self._sock.sendall(data)

    def receive_into(self, data: memoryview, patience_s: float = STALL_S) -> None:
        """Fill it."""
        done = 0
        while done < len(data):
            self._hurry(patience_s)
            count = self._sock.recv_into(data[done:])
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            done += count

    def cut(self) -> None:
        """End it from another thread: whoever waits in it gets an error."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _hurry(self, patience_s: float) -> None:
        left_s = self.due - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        timeout_s = min(patience_s, left_s)
        if timeout_s != self._timeout_s:  # it is a system call
            self._timeout_s = timeout_s
            self._sock.settimeout(timeout_s)

    def _receive(self, size_bytes_max: int, patience_s: float) -> LinkMessage:
        header = bytearray(_LENGTH.size)
        self.receive_into(memoryview(header), patience_s)
        (length,) = _LENGTH.unpack(header)
        if length > size_bytes_max:
            raise WireError(f"a frame of {length} bytes, above {size_bytes_max}")
        payload = bytearray(length)
        self.receive_into(memoryview(payload))
        try:
            return _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise WireError(f"not a frame: {error}") from error

    # --- who is there -----------------------------------------------------------------------

    def _ask(self, token: str) -> None:
        ours = secrets.token_bytes(_NONCE_BYTES)
        self.send_bytes(memoryview(MAGIC + ours))
        shown = self._shown()
        if not hmac.compare_digest(shown.proof, _proof(token, b"sender", ours, shown.nonce)):
            raise WireError("it does not know this run's token")
        self.send(Shown(nonce=ours, proof=_proof(token, b"receiver", shown.nonce, ours)))

    def _show(self, token: str) -> None:
        hello = bytearray(len(MAGIC) + _NONCE_BYTES)
        self.receive_into(memoryview(hello))
        if not hello.startswith(MAGIC):
            raise WireError(f"no keeper of this version (it says {bytes(hello[:4])!r})")
        theirs, ours = bytes(hello[len(MAGIC) :]), secrets.token_bytes(_NONCE_BYTES)
        self.send(Shown(nonce=ours, proof=_proof(token, b"sender", theirs, ours)))
        shown = self._shown()
        if not hmac.compare_digest(shown.proof, _proof(token, b"receiver", ours, theirs)):
            raise WireError("it does not know this run's token")

    def _shown(self) -> Shown:
        frame = self._receive(_HELLO_FRAME_BYTES_MAX, HELLO_S)
        if not isinstance(frame, Shown):
            raise WireError("something was said before the token was shown")
        return frame


def _proof(token: str, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), MAGIC + who + first + second, "sha256")
