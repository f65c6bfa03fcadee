"""Frames between trainer and keeper over a Unix socket, with file descriptors.

A frame is `length(4, little endian) | descriptors(1) | payload(length)`, the payload a msgpack
structure with its type. Both ends are of one installation; Hello says the version all the same.
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
    """One save, as the trainer orders it: the arena's first `manifest.size_bytes` are the shard.

    `manifest` comes without chunks, `commit` (on rank 0) without manifests, time and size: the
    keeper fills them in. Without `to_disk` the version is held in memory, and no more.
    `deadline_s` counts from the order. `read_back`: what is linked is read whole before. `owner`:
    the token that `root` must have (ownership.py); "" for any. `faults` are for tests.
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
    """Another keeper, which is to hold copies of what this one's trainer saves: HOST:PORT."""

    name: str
    address: str


class KeeperSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher tells its keeper once, as a line of JSON. `door_fd`: a listening TCP socket
    for other keepers, which the launcher keeps open: its address outlives the keeper. With a
    `group` of ranks, this one's among them, `peers` are those of the others, in its order, and get
    strips for their parity instead of copies. `peers_bytes_per_s`: to all of them together."""

    token: str
    door_fd: int = -1
    peers: tuple[PeerKeeper, ...] = ()
    peers_bytes_per_s: int | None = None
    rank: int = 0
    group: tuple[int, ...] = ()


class KeeperFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of everything that is said."""


# --- the trainer speaks ---------------------------------------------------------------------


class Hello(KeeperFrame, frozen=True, kw_only=True):
    """The first frame. Beside it: a pidfd of the trainer, whose forks keep the socket open."""

    version: int = VERSION
    token: str = ""
    name: str


class Lend(KeeperFrame, frozen=True, kw_only=True):
    """An arena, its descriptor beside it. A number lent before is another memory from here on."""

    arena: int
    size_bytes: int


class Drop(KeeperFrame, frozen=True, kw_only=True):
    """Let go of an arena, and of the version in it."""

    arena: int


class Write(KeeperFrame, frozen=True, kw_only=True):
    """Do this order. `stamp` is what the arena says while it holds this version. `attempt` counts
    keepers that died over it; `written`: this rank's part is on the disk, only the commit is left.
    """

    order: SaveOrder
    stamp: int
    attempt: int
    written: bool
    deadline_s: float


class Ask(KeeperFrame, frozen=True, kw_only=True):
    """What lies in your memory? Answered by Lying."""


# --- the keeper speaks ----------------------------------------------------------------------


class OlderVersion(msgspec.Struct, frozen=True, array_like=True):
    """An arena from a trainer before this one, and the version in it, if there is one."""

    arena: int
    size_bytes: int
    place: SavePoint | None


class Welcome(KeeperFrame, frozen=True, kw_only=True):
    """The answer to Hello. `peers`: how many others are sent copies, of which each order's "copied"
    tells."""

    pid: int
    peers: int
    older: list[OlderVersion]


class Outcome(KeeperFrame, frozen=True, kw_only=True):
    """What became of a save. "committed" only on rank 0, after its own "written"; "skipped" is an
    engine's word, for saves that it never ordered. "copied" comes beside all these, once, where
    there are peers: `copies` of them hold it, or their strip of it where there are `strips`, and
    `error` says what is wrong with others. It ends nothing, and no save fails by it. Beside
    "written" it says what older file was found damaged."""

    save: int
    place: SavePoint
    kind: Literal["held", "written", "committed", "failed", "skipped", "copied"]
    error: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    copies: int = 0
    strips: int = 0


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version in a keeper's memory, whatever became of its write: its trainer's, or a copy from
    another rank's keeper (an arena below zero). `manifest` has its chunks: their digests as they
    were written or sent, or as they are now where they have not been."""

    manifest: Manifest
    arena: int


class VersionParity(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper of `rank` has of its group's parity of one version, in an arena: the XOR of a
    strip of each part that `manifests` describe, of all others in the group."""

    rank: int
    group: tuple[int, ...]
    manifests: list[Manifest]
    arena: int


class Lying(KeeperFrame, frozen=True, kw_only=True):
    """`arenas`: (number, size_bytes) of each; their descriptors beside it, in this order."""

    held: list[HeldVersion]
    parities: list[VersionParity]
    arenas: list[tuple[int, int]]


KeeperMessage = Hello | Lend | Drop | Write | Ask | Welcome | Outcome | Lying
_decoder = msgspec.msgpack.Decoder(KeeperMessage)


class ReceivedFrame(NamedTuple):
    """A frame, and the descriptors that came beside it: whoever takes it owns them."""

    frame: KeeperMessage
    fds: list[int]


class KeeperStream:
    """Frames over a connected Unix stream socket. Nothing here ever blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._in = bytearray()
        self._fds: list[int] = []
        self.broken = False  # nothing can be said any more; what was heard may still be read

    @property
    def pending(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._out) and not self.broken

    def send(self, frame: KeeperMessage, fds: Sequence[int] = ()) -> None:
        """Queue a frame and send what the socket takes. `fds` stay the caller's.

        Raises WireError for what cannot be said, and StorageError where no descriptor is free.
        """
        try:
            payload = msgspec.msgpack.encode(frame)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"a {type(frame).__name__} that cannot be written: {error}") from error
        if len(payload) > FRAME_BYTES_MAX:
            raise WireError(f"a frame of {len(payload)} bytes, above {FRAME_BYTES_MAX}: not sent")
        data = _HEADER.pack(len(payload), len(fds)) + payload
        self._out.append((memoryview(data), _doubled(fds)))
        self.flush()

    def flush(self) -> None:
        try:
            while self._out and not self.broken:
                data, fds = self._out[0]
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self.sock.sendmsg([data], beside if fds else [])
                _close(fds)
                if sent < len(data):
                    self._out[0] = (data[sent:], [])
                else:
                    self._out.popleft()
        except BlockingIOError:
            return
        except OSError:  # the other end is gone: that is told by receive(), after its last words
            self.broken = True

    def receive(self) -> list[ReceivedFrame] | None:
        """The frames that are there; None when there will never be another.

        Raises WireError for what is no frame.
        """
        ended = False
        try:
            while not ended:
                room = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
                flags = socket.MSG_CMSG_CLOEXEC
                data, beside, said, _ = self.sock.recvmsg(_READ_BYTES, room, flags)
                for level, kind, raw in beside:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        self._fds += array.array("i", raw[: len(raw) // 4 * 4])
                if said & socket.MSG_CTRUNC:
                    raise WireError("more descriptors came than a frame may carry")
                self._in += data
                ended = not data
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        heard = self._parse()
        return None if ended and not heard else heard

    def close(self) -> None:
        self.broken = True
        self.sock.close()
        _close(self._fds)
        for _, fds in self._out:
            _close(fds)
        self._out.clear()

    def _parse(self) -> list[ReceivedFrame]:
        heard, at = [], 0
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
            heard.append(ReceivedFrame(frame, fds))
            at = end
        del self._in[:at]
        return heard


def _doubled(fds: Sequence[int]) -> list[int]:
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
