"""Authenticated TCP links between keepers, and their frames.

The token itself is never sent. Frames and bytes are neither encrypted nor signed: a network between
hosts must be the cluster's own. Every operation has a deadline (docs/format.md, "Copies").
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from pathlib import Path

import msgspec

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_frames import HeldVersion, VersionParity
from outlast.checkpoint.stores.chunk_reader import RateLimiter
from outlast.errors import WireError

MAGIC = b"OLC1"
HELLO_S = 5.0
STALL_S = 10.0  # for one slice or one answer; after it the other end counts as dead
COPY_S = 30.0  # for a copy, besides its bytes: connecting and allocating memory
SLICE_BYTES = 1 << 20  # digested and passed on while it is in the processor's cache
FRAME_BYTES_MAX = 256 << 20
_HELLO_FRAME_BYTES_MAX = 1 << 10  # before the other end is authenticated
_NONCE_BYTES = 32
DOOR = "door:"  # before the path of a file with HOST:PORT, of a keeper that may move
_ADDRESS_LENGTH_MAX = 300
_LENGTH = struct.Struct("<I")


class LinkFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all frames between keepers."""


class Shown(LinkFrame, frozen=True, kw_only=True):
    """Proof that the sender of the frame has the token: an HMAC over both nonces."""

    nonce: bytes
    proof: bytes


class Offer(LinkFrame, frozen=True, kw_only=True):
    """Announcement of a version of a rank's part, or of a strip of it.

    `arena_bytes`: memory that later versions need as well. `copy` identifies this transfer;
    `lanes`: number of connections, this one the first.
    """

    copy: str
    lanes: int
    rank: int
    size_bytes: int
    chunk_bytes: int
    arena_bytes: int
    place: SavePoint | None = None

    def chunks(self, lane: int = 0, lanes: int = 1) -> range:
        """Return the offsets of the chunks that one of `lanes` carries, in order."""
        return range(lane * self.chunk_bytes, self.size_bytes, lanes * self.chunk_bytes)


class Join(LinkFrame, frozen=True, kw_only=True):
    """This connection is another lane of an offered transfer."""

    copy: str
    lane: int


class Ready(LinkFrame, frozen=True, kw_only=True):
    """Memory is allocated: every lane may send its chunks, one after the other."""


class Sealed(LinkFrame, frozen=True, kw_only=True):
    """End of a transfer whose source was not overwritten meanwhile.

    `record`: the part's manifest, with its chunks' digests, as in its file; `strip`: of a strip,
    the digests of the sent bytes, in chunks of the same size.
    """

    record: bytes
    strip: tuple[str, ...] = ()


class Kept(LinkFrame, frozen=True, kw_only=True):
    """The version is held; with an `error`, the previous one is held instead."""

    error: str = ""


class ListRequest(LinkFrame, frozen=True, kw_only=True):
    """Request for the contents of the keeper's memory (remote_copies)."""


class ListAnswer(LinkFrame, frozen=True, kw_only=True):
    """Contents of the keeper's memory. `arenas`: (number, size_bytes) of each."""

    versions: list[HeldVersion]
    parities: list[VersionParity]
    arenas: list[tuple[int, int]]


class ReadRequest(LinkFrame, frozen=True, kw_only=True):
    """Request for bytes of an arena, which follow without a frame."""

    arena: int
    at: int
    size_bytes: int


LinkMessage = Shown | Offer | Join | Ready | Sealed | Kept | ListRequest | ListAnswer | ReadRequest
_decoder = msgspec.msgpack.Decoder(LinkMessage)


class KeeperLink:
    """One connection.

    Every wait ends by `due` on the monotonic clock, and earlier when the other end stalls: then it
    raises OSError, as for all connection errors; WireError for invalid frames. Sends respect
    `pace`.
    """

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
        """Connect to the keeper at HOST:PORT, or to the one that the file of `door:FILE` names.

        Both ends prove that they have the token.
        """
        host, _, port = _current(address).rpartition(":")
        until = min(due, time.monotonic() + HELLO_S)
        left_s = max(0.001, until - time.monotonic())
        if not port.isdecimal():
            raise WireError(f"{address} names no keeper")
        link = cls(socket.create_connection((host.strip("[]"), int(port)), left_s), until, pace)
        try:
            link._authenticate_to(token)
        except BaseException:  # close the socket after any error
            link.close()
            raise
        link.due = due
        return link

    @classmethod
    def answer(cls, sock: socket.socket, token: str) -> KeeperLink:
        """Authenticate an incoming connection. The socket is closed where this raises."""
        link = cls(sock, time.monotonic() + HELLO_S)
        try:
            link._authenticate_sender(token)
        except BaseException:  # close the socket after any error
            link.close()
            raise
        return link

    def send(self, frame: LinkMessage) -> None:
        """Send a frame. Raises WireError for one that is too large."""
        payload = msgspec.msgpack.encode(frame)
        if len(payload) > FRAME_BYTES_MAX:
            raise WireError(f"a frame of {len(payload)} bytes, above {FRAME_BYTES_MAX}: not sent")
        self.send_bytes(memoryview(_LENGTH.pack(len(payload)) + payload))

    def receive(self, patience_s: float = STALL_S) -> LinkMessage:
        """Receive a frame; `patience_s`: how long to wait for its first bytes."""
        return self._receive(FRAME_BYTES_MAX, patience_s)

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes, within the limit of `pace`."""
        if self._pace:
            self._pace.spend(len(data))
        self._set_timeout(STALL_S)
        self._sock.sendall(data)

    def receive_into(self, data: memoryview, patience_s: float = STALL_S) -> None:
        """Fill `data`; `patience_s`: how long to wait for each part."""
        done = 0
        while done < len(data):
            self._set_timeout(patience_s)
            count = self._sock.recv_into(data[done:])
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            done += count

    def cut(self) -> None:
        """End the connection from another thread: pending calls raise an error."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _set_timeout(self, patience_s: float) -> None:
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

    # --- authentication ---------------------------------------------------------------------

    def _authenticate_sender(self, token: str) -> None:
        ours = secrets.token_bytes(_NONCE_BYTES)
        self.send_bytes(memoryview(MAGIC + ours))
        shown = self._receive_proof()
        if not hmac.compare_digest(shown.proof, _proof(token, b"sender", ours, shown.nonce)):
            raise WireError("it does not have this run's token")
        self.send(Shown(nonce=ours, proof=_proof(token, b"receiver", shown.nonce, ours)))

    def _authenticate_to(self, token: str) -> None:
        hello = bytearray(len(MAGIC) + _NONCE_BYTES)
        self.receive_into(memoryview(hello))
        if not hello.startswith(MAGIC):
            raise WireError(f"no keeper of this version (its first bytes are {bytes(hello[:4])!r})")
        theirs, ours = bytes(hello[len(MAGIC) :]), secrets.token_bytes(_NONCE_BYTES)
        self.send(Shown(nonce=ours, proof=_proof(token, b"sender", theirs, ours)))
        shown = self._receive_proof()
        if not hmac.compare_digest(shown.proof, _proof(token, b"receiver", ours, theirs)):
            raise WireError("it does not have this run's token")

    def _receive_proof(self) -> Shown:
        frame = self._receive(_HELLO_FRAME_BYTES_MAX, HELLO_S)
        if not isinstance(frame, Shown):
            raise WireError(f"{type(frame).__name__} before the proof of the token")
        return frame


def _current(address: str) -> str:
    """Return HOST:PORT of an address. Raises OSError if its file cannot be read."""
    if not address.startswith(DOOR):
        return address
    with Path(address.removeprefix(DOOR)).open(errors="replace") as file:
        return file.read(_ADDRESS_LENGTH_MAX).strip()


def _proof(token: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), MAGIC + role + first + second, "sha256")
