"""An S3 server on loopback (localbucket), with its bucket in a folder."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

BUCKET = "bucket"
_START_S = 20.0
_SERVE = """
import os, sys, threading
from localbucket import main

def end_with_the_tests():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=end_with_the_tests, daemon=True).start()
main()
"""


class BucketServer:
    """Server that starts at once; a restart keeps the port and the objects."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bucket = root / BUCKET
        self.bucket.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._log = root.with_suffix(".log")
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", _SERVE, str(self.root), "--port", str(self.port)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log)
        pause, waited_s = threading.Event(), 0.0
        while waited_s < _START_S:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            pause.wait(0.02)
            waited_s += 0.02
        raise AssertionError(self._log.read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def requests(self, method: str, name: str = "") -> list[tuple[str, int]]:
        """Return (path, status) of each request of this method whose path contains `name`."""
        lines = re.findall(rf'"{method} (\S+) HTTP/1.1" (\d+)', self._log.read_text())
        return [(path, int(status)) for path, status in lines if name in path]

    def into(self, environment: pytest.MonkeyPatch, port: int | None = None) -> None:
        """Direct `s3://bucket/...` to this server, or to a proxy at `port`."""
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port or self.port}")
        environment.setenv("AWS_REGION", "us-east-1")
        environment.setenv("AWS_ACCESS_KEY_ID", "any")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "any")
        environment.delenv("AWS_DISABLE_BULK_DELETE", raising=False)  # as users have it


class SlowProxy:
    """Proxy to a port with a limited upload rate, in bytes a second."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._to = port
        self._rate = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._end = threading.Event()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._open):
            one.close()

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._open += [near, far]
            for source, target, rate in ((near, far, self._rate), (far, near, 0.0)):
                arguments = (source, target, rate)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, rate: float) -> None:
        buffer = bytearray(1 << 18)
        with suppress(OSError):  # one of the two ends is gone: so is the other
            while count := source.recv_into(buffer):
                if rate and self._end.wait(count / rate):
                    break
                target.sendall(memoryview(buffer)[:count])
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
