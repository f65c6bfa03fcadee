"""Listening sockets of a keeper: of its trainers, and of readers of its copies meanwhile."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from outlast.checkpoint.keeper import keeper_frames
from outlast.checkpoint.keeper.keeper_frames import KeeperStream
from outlast.errors import StorageError, WireError

SUFFIX = "-copies"  # of the listener's name, beside that for trainers
_READERS_MAX = 256
_TRAINERS_MAX = 8  # that wait: one trainer after the other is served


def accept_own(listener: socket.socket) -> socket.socket | None:
    """Accept a connection of this user or of root; None if it is another's, or closed already."""
    with contextlib.suppress(OSError):
        sock, _ = listener.accept()
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", peer)
        if uid in (0, os.getuid()):
            return sock
        sock.close()
    return None


def open_listener(address: str) -> socket.socket:
    """Open the listening socket of a keeper's trainers, in the abstract namespace if the
    address begins with @. Raises StorageError.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        listener.listen(_TRAINERS_MAX)
    except OSError as error:
        listener.close()
        raise StorageError(f"no keeper can listen at {address} ({error.strerror})") from error
    return listener


class CopyReaders:
    """Readers of a keeper's copies, each of which sends Hello and ContentsRequest.

    `welcome` returns the answer to Hello, `send_contents` sends the answer to ContentsRequest.
    """

    def __init__(
        self,
        beside: socket.socket,
        token: str,
        selector: selectors.BaseSelector,
        welcome: Callable[[], keeper_frames.Welcome],
        send_contents: Callable[[KeeperStream], None],
    ) -> None:
        self._token, self._selector = token, selector
        self._welcome, self._send_contents = welcome, send_contents
        self._readers: dict[KeeperStream, bool] = {}  # whether it is authenticated
        name = beside.getsockname()
        address = name + SUFFIX.encode() if isinstance(name, bytes) else f"{name}{SUFFIX}"
        if isinstance(address, str):
            Path(address).unlink(missing_ok=True)  # of a keeper that has died
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        sock = accept_own(self._listener)
        if sock is None:
            return
        if len(self._readers) >= _READERS_MAX:
            sock.close()
            return
        stream = KeeperStream(sock)
        self._readers[stream] = False
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._serve(stream))

    def _serve(self, stream: KeeperStream) -> None:
        try:
            stream.flush()
            frames = stream.receive()
            for frame, fds in frames or ():
                self._answer(stream, frame, fds)
        except WireError as error:
            sys.stderr.write(f"invalid frame of a reader, whose connection is closed: {error}\n")
            frames = None
        if frames is None or stream.broken:
            self._selector.unregister(stream.sock)
            del self._readers[stream]
            stream.close()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.pending else 0)
        self._selector.modify(stream.sock, events, lambda: self._serve(stream))

    def _answer(self, stream: KeeperStream, frame: object, fds: list[int]) -> None:
        for fd in fds:  # a trainer's pidfd, of no use here
            os.close(fd)
        if isinstance(frame, keeper_frames.Hello):
            if (frame.token, frame.version) != (self._token, keeper_frames.VERSION):
                raise WireError(f"wrong token, or unsupported version {frame.version}")
            self._readers[stream] = True
            stream.send(self._welcome())
        elif not self._readers[stream]:
            raise WireError(f"{type(frame).__name__} before Hello")
        elif isinstance(frame, keeper_frames.ContentsRequest):
            self._send_contents(stream)
        else:
            raise WireError(f"{type(frame).__name__} of a reader")
