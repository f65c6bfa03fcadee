"""Frames between trainer and keeper over a Unix socket, with file descriptors.

A frame is `length(4, little endian) | descriptors(1) | payload(length)`, the payload a msgpack
structure with its type. Both ends are normally of one installation; Hello has the version as well.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import Commit, Manifest, SavePoint
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.errors import StorageError, WireError

VERSION = 1
FRAME_BYTES_MAX = 256 << 20
DESCRIPTORS_MAX = 64
_READ_BYTES = 256 << 10
_HEADER = struct.Struct("<IB")


class SaveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One save as ordered: the arena's first `manifest.size_bytes` are the shard.

    `manifest` comes without chunks, `commit` (on rank 0) without manifests, time and size: the
    keeper fills them in. Without `to_disk` the version is only held in memory. `deadline_s` counts
    from the order. `read_back`: read files completely before linking them. `owner`: the token that
    `root` must have (directory_ownership.py); "" for any. `faults` are for tests.
    """

    save: int
    arena: int
    root: str
    manifest: Manifest
    commit: Commit | None = None
    deadline_s: float
    to_disk: bool = True
    read_back: bool = False
    owner: str = ""
    faults: tuple[DiskFault, ...] = ()


class PeerKeeper(msgspec.Struct, frozen=True, kw_only=True):
    """Another keeper, which holds copies of this keeper's versions. `address`: HOST:PORT."""

    name: str
    address: str


class KeeperSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher's settings for its keeper, one line of JSON.

    `door_fd`: a listening TCP socket for other keepers, which the launcher keeps open: its address
    outlives the keeper. With a `group` of ranks, including this one's, `peers` are those of the
    others, in its order, and get strips for their parity instead of copies. `peers_bytes_per_s`: to
    all of them together.
    """

    token: str
    door_fd: int = -1
    peers: tuple[PeerKeeper, ...] = ()
    peers_bytes_per_s: int | None = None
    rank: int = 0
    group: tuple[int, ...] = ()


class KeeperFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all frames."""


# --- frames of the trainer ------------------------------------------------------------------


class Hello(KeeperFrame, frozen=True, kw_only=True):
    """The first frame, with a pidfd of the trainer: its forks may keep the socket open."""

    version: int = VERSION
    token: str = ""
    name: str


class Lend(KeeperFrame, frozen=True, kw_only=True):
    """An arena, with its descriptor. It replaces an arena lent under the same number."""

    arena: int
    size_bytes: int


class Drop(KeeperFrame, frozen=True, kw_only=True):
    """Release an arena, and the version in it."""

    arena: int


class Write(KeeperFrame, frozen=True, kw_only=True):
    """Execute this order.

    `stamp`: the arena's stamp while it holds this version. `attempt`: number of keepers that died
    during this order; `written`: this rank's part is on the disk, only the commit is missing.
    """

    order: SaveOrder
    stamp: int
    attempt: int
    written: bool
    deadline_s: float


class ContentsRequest(KeeperFrame, frozen=True, kw_only=True, tag="Ask"):
    """Request for the contents of the keeper's memory, answered by Lying."""


# --- frames of the keeper -------------------------------------------------------------------


class OlderVersion(msgspec.Struct, frozen=True, array_like=True):
    """An arena of an earlier trainer, and the version in it, if there is one."""

    arena: int
    size_bytes: int
    place: SavePoint | None


class Welcome(KeeperFrame, frozen=True, kw_only=True):
    """The answer to Hello. `peers`: number of keepers that get copies of each order."""

    pid: int
    peers: int
    older: list[OlderVersion]


class Outcome(KeeperFrame, frozen=True, kw_only=True):
    """The outcome of a save.

    "committed" only on rank 0, after its own "written"; "skipped" is set by an engine, for saves
    that it never ordered. With peers, one "copied" is sent besides: `copies` of them hold the
    version, or their strip of it where there are `strips`, and `error` names failures of others;
    it neither ends nor fails the save. The `error` of "written" names older files that were found
    damaged.
    """

    save: int
    place: SavePoint
    kind: Literal["held", "written", "committed", "failed", "skipped", "copied"]
    error: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    copies: int = 0
    strips: int = 0

    @property
    def shortfall(self) -> str:
        """Sentence on the copies that are there, beside those that failed."""
        if self.strips:
            return f"{self.copies} of {self.strips} strips are in the parity of its group"
        return (
            f"fewer copies in memory than requested ({self.copies} beside that of this rank's own"
            " keeper)"
        )


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version in a keeper's memory, independent of its write.

    It is the trainer's, or a copy from another rank's keeper (an arena below zero). `manifest` has
    its chunks: digests of the write or transfer, or else of the present bytes.
    """

    manifest: Manifest
    arena: int


class VersionParity(msgspec.Struct, frozen=True, kw_only=True):
    """Parity of one version in the keeper of `rank`.

    It is the XOR of a strip of each part that `manifests` describe, of all others in the group.
    """

    rank: int
    group: tuple[int, ...]
    manifests: list[Manifest]
    arena: int


class KeeperContents(KeeperFrame, frozen=True, kw_only=True, tag="Lying"):
    """The keeper's contents.

    `arenas`: (number, size_bytes) of each; their descriptors come with it, in this order.
    """

    versions: list[HeldVersion] = msgspec.field(name="held")
    parities: list[VersionParity]
    arenas: list[tuple[int, int]]


KeeperMessage = Hello | Lend | Drop | Write | ContentsRequest | Welcome | Outcome | KeeperContents
_decoder = msgspec.msgpack.Decoder(KeeperMessage)


class ReceivedFrame(NamedTuple):
    """A frame, and the descriptors that came with it; the receiver owns them."""

    frame: KeeperMessage
    fds: list[int]


class KeeperStream:
    """Frames over a connected Unix stream socket. No method blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._in = bytearray()
        self._fds: list[int] = []
        self.broken = False  # no more sends; received frames may still be read

    @property
    def pending(self) -> bool:
        """Return whether frames wait for space in the socket's buffer."""
        return bool(self._out) and not self.broken

    def send(self, frame: KeeperMessage, fds: Sequence[int] = ()) -> None:
        """Queue a frame and send as much as the socket accepts. `fds` stay the caller's.

        Raises WireError for a frame that cannot be encoded, and StorageError where no descriptor is
        free.
        """
        try:
            payload = msgspec.msgpack.encode(frame)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"a {type(frame).__name__} that cannot be written: {error}") from error
        if len(payload) > FRAME_BYTES_MAX:
            raise WireError(f"a frame of {len(payload)} bytes, above {FRAME_BYTES_MAX}: not sent")
        data = _HEADER.pack(len(payload), len(fds)) + payload
        self._out.append((memoryview(data), _duplicate(fds)))
        self.flush()

    def flush(self) -> None:
        """Send as much of the queued frames as the socket accepts."""
        try:
            while self._out and not self.broken:
                data, fds = self._out[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self.sock.sendmsg([data], rights if fds else [])
                _close(fds)
                if sent < len(data):
                    self._out[0] = (data[sent:], [])
                else:
                    self._out.popleft()
        except BlockingIOError:
            return
        except OSError:  # the peer closed; receive() reports it after the last frame
            self.broken = True

    def receive(self) -> list[ReceivedFrame] | None:
        """Return the complete frames; None when there will never be another.

        Raises WireError for invalid data.
        """
        ended = False
        try:
            while not ended:
                space = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
                flags = socket.MSG_CMSG_CLOEXEC
                data, ancillary, flags_received, _ = self.sock.recvmsg(_READ_BYTES, space, flags)
                for level, kind, raw in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        self._fds += array.array("i", raw[: len(raw) // 4 * 4])
                if flags_received & socket.MSG_CTRUNC:
                    raise WireError("received more descriptors than a frame may carry")
                self._in += data
                ended = not data
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        frames = self._parse()
        return None if ended and not frames else frames

    def close(self) -> None:
        """Close the socket and all descriptors."""
        self.broken = True
        self.sock.close()
        _close(self._fds)
        for _, fds in self._out:
            _close(fds)
        self._out.clear()

    def _parse(self) -> list[ReceivedFrame]:
        frames: list[ReceivedFrame] = []
        at = 0
        while len(self._in) - at >= _HEADER.size:
            length, count = _HEADER.unpack_from(self._in, at)
            if length > FRAME_BYTES_MAX or count > DESCRIPTORS_MAX:
                raise WireError(f"a frame of {length} bytes with {count} descriptors")
            begin, end = at + _HEADER.size, at + _HEADER.size + length
            if len(self._in) < end:
                break
            if len(self._fds) < count:
                raise WireError(f"a frame lacks {count - len(self._fds)} of its descriptors")
            try:
                frame = _decoder.decode(memoryview(self._in)[begin:end].tobytes())
            except msgspec.DecodeError as error:
                raise WireError(f"not a frame: {error}") from error
            fds, self._fds = self._fds[:count], self._fds[count:]
            frames.append(ReceivedFrame(frame, fds))
            at = end
        del self._in[:at]
        return frames


def _duplicate(fds: Sequence[int]) -> list[int]:
    doubled: list[int] = []
    try:
        for fd in fds:
            doubled.append(os.dup(fd))  # noqa: PERF401 - those that are there by an error are closed
    except OSError as error:
        _close(doubled)
        raise StorageError(f"no memory can be lent to the keeper: {error.strerror}") from error
    return doubled


def _close(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()
