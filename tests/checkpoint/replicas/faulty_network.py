"""Network between keepers that flips bits, stalls, and records traffic."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_BYTES = 16 << 10


@dataclass
class Network:
    """Forwards connections to `address`, with faults.

    `flip`: the sent byte of each connection that loses a bit. `pause`: the total of bytes after
    which forwarding stops until `go` is set.
    """

    address: str
    flip: int = -1
    pause: int = -1
    on_pause: Callable[[], None] = lambda: None
    seen: bytearray = field(default_factory=bytearray)
    go: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BYTES)
        host, port = self._listener.getsockname()[:2]
        self.here = f"{host}:{port}"
        self._socks: list[socket.socket] = [self._listener]
        self._sent = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def pause_after(self, count: int, then: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            self.go.clear()
            self.paused.clear()
            self._sent, self.pause, self.on_pause = 0, count, then

    def close(self) -> None:
        self.go.set()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                host, port = self.address.split(":")
                far = socket.create_connection((host, int(port)))
                self._socks += [near, far]
                threading.Thread(target=self._there, args=(near, far), daemon=True).start()
                threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _there(self, near: socket.socket, far: socket.socket) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(near.recv(_BYTES)):
                if at <= self.flip < at + len(data):
                    data[self.flip - at] ^= 16
                at += len(data)
                self._count(len(data))
                self.seen += data
                far.sendall(data)
        _end(far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(_BYTES):
                self.seen += data
                near.sendall(data)
        _end(near)

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._sent += size_bytes
            now = 0 <= self.pause <= self._sent
            if now:
                self.pause = -1
                self.on_pause()
                self.paused.set()
            waits = self.paused.is_set() and not self.go.is_set()
        if waits:
            self.go.wait()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
