"""Byte stream on a socket, plain or by TLS, for a few messages or a handshake.

A TLS socket may have to read in order to write, and the other way round. asyncio's streams are not
used for it: they do not send the reason of a failed handshake to the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

_READ_BYTES = 64 << 10
_WANTS_READ = (BlockingIOError, ssl.SSLWantReadError)
LINGER_S = 1.0


class SocketStream:
    """Stream on a connected socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_closed = False

    @property
    def socket(self) -> socket.socket:
        """Return the socket; the stream must not be used beside it."""
        return self._sock

    async def peek(self) -> bytes:
        """Return the first byte, which stays unread; b"" at the end. Raises OSError."""
        while True:
            try:
                return self._sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def secure(self, context: ssl.SSLContext, *, is_server: bool) -> ssl.SSLSocket:
        """Shake hands, and use TLS from now on. Raises OSError, also ssl.SSLError."""
        secure = context.wrap_socket(
            self._sock, server_side=is_server, do_handshake_on_connect=False
        )
        self._sock = secure
        while True:
            try:
                secure.do_handshake()
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            else:
                return secure

    async def read_exactly(self, count: int) -> bytes:
        """Return the next bytes. Raises EOFError at the end, OSError."""
        while len(self._received) < count:
            try:
                data = self._sock.recv(_READ_BYTES)
            except _WANTS_READ:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            if not data:
                raise EOFError
            self._received += data
        found = bytes(self._received[:count])
        del self._received[:count]
        return found

    def write(self, data: bytes) -> None:
        """Send data, later if the kernel takes no more now; drop it if the connection has ended."""
        if not self._is_closed:
            self._unsent += data
            self._is_sent.clear()
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                del self._unsent[:sent]
        except (*_WANTS_READ, ssl.SSLWantWriteError):
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self._sock)
        self._is_sent.set()

    async def close(self, within_s: float) -> None:
        """Send what is queued, for at most `within_s`, and close the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_sent.wait()
        self.abort()

    async def linger(self) -> None:
        """End the connection after the peer has read what was sent, or after LINGER_S: unread data
        of the peer would take the reason of a refusal with it."""
        with contextlib.suppress(OSError, EOFError):  # includes TimeoutError
            async with asyncio.timeout(LINGER_S):
                await self._is_sent.wait()
                socket.socket.shutdown(self._sock, socket.SHUT_WR)
                while await self._discard():
                    pass
        self.abort()

    async def _discard(self) -> bool:
        try:
            return bool(socket.socket.recv(self._sock, _READ_BYTES))
        except BlockingIOError:
            await self._ready(self._loop.add_reader, self._loop.remove_reader)
            return True

    def abort(self) -> None:
        """Close the connection at once; waiting calls raise ConnectionAbortedError."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._is_sent.set()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionAbortedError("closed here"))

    async def _ready(
        self, add: Callable[..., object], remove: Callable[[socket.socket], object]
    ) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("closed here")
        waiting = self._loop.create_future()
        self._waiting.add(waiting)
        add(self._sock, lambda: waiting.done() or waiting.set_result(None))
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)
            if not self._is_closed:
                remove(self._sock)
