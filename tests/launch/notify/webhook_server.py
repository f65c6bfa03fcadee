"""A server on this machine that gets notifications, and can misbehave in five ways."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

DEADLINE_S = 30.0
Server = TypeVar("Server", bound="WebhookServer")


class WebhookServer(ThreadingHTTPServer):
    """Keeps requests. `answers`: of the next requests, a status, "hang", "drip" or "close"; 200
    when there are none."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hook)
        self.answers: list[int | str] = []
        self.headers: dict[str, str] = {}
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.arrived = threading.Condition()
        self.ends = threading.Event()

    def decode(self, path: str, body: bytes) -> Any:
        return json.loads(body)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait(self, count: int) -> list[Any]:
        """Wait for requests; return their bodies."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.bodies) >= count, DEADLINE_S), self.bodies
            return list(self.bodies)


class _Hook(BaseHTTPRequestHandler):
    server: WebhookServer

    def do_POST(self) -> None:
        hook = self.server
        body = hook.decode(self.path, self.rfile.read(int(self.headers["Content-Length"])))
        with hook.arrived:
            answer = hook.answers.pop(0) if hook.answers else 200
            hook.bodies.append(body)
            hook.paths.append(self.path)
            hook.headers = dict(self.headers)
            hook.arrived.notify_all()
        if answer == "hang":
            hook.ends.wait(DEADLINE_S)
        elif answer == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not hook.ends.wait(0.05):
                try:
                    self.wfile.write(b"X-Drip: 1\r\n")
                except OSError:
                    return
        elif isinstance(answer, int):
            self.send_response(answer)
            if answer in (301, 307):
                self.send_header("Location", f"{hook.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(kind: type[Server] = WebhookServer) -> Iterator[Server]:
    with kind() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()
            thread.join()
