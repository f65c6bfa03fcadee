"""Delivery of messages to one target: a thread, a bounded queue, and attempts with deadlines."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections import deque
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from outlast import __version__
from outlast.errors import UsageError
from outlast.launch.notify.notify_targets import NotifyTarget
from outlast.text_formatting import plural, short_error

QUEUED_MAX = 100
RETRY_AFTER_MAX_S = 30.0
_AGAIN = (408, 429)  # statuses below 500 that may be tried again


class AttemptPacing(NamedTuple):
    """Deadline of an attempt, and the waits before the second and each later one."""

    within_s: float = 10.0
    waits_s: tuple[float, ...] = (1.0, 4.0)


class _Failure(NamedTuple):
    text: str
    retry_s: float | None = 0.0  # wait at least so long; None: another attempt cannot help


class NotifySender:
    """Thread that delivers messages to a target.

    State, under `_changed`: `_waiting` bodies; `_unsent` counts what was dropped, overflowed or in
    flight when `close` gave up; `_news` is a text for the run's owner. The thread alone connects.
    """

    def __init__(self, target: NotifyTarget, attempts: AttemptPacing | None = None) -> None:
        self.target = target
        self._attempts = attempts or AttemptPacing()
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._in_flight = 0
        self._unsent = 0
        self._has_failed = False
        self._news = ""
        self._is_closing = self._is_abandoned = False
        self._proxy = _proxy_of(target)
        self._thread = threading.Thread(target=self._deliver, name="notify", daemon=True)
        self._thread.start()

    def put(self, bodies: list[bytes], *, is_last: bool = False) -> None:
        """Queue the bodies of a message, `is_last` before all others; never blocks."""
        with self._changed:
            while self._waiting and len(self._waiting) + len(bodies) > QUEUED_MAX:
                self._waiting.popleft()
                self._lose("the queue was full")
            if is_last:
                self._waiting.extendleft(reversed(bodies))
            else:
                self._waiting.extend(bodies)
            self._changed.notify_all()

    def news(self) -> str:
        """Return the text about the first message that was lost, once; "" otherwise."""
        with self._changed:
            text, self._news = self._news, ""
            return text

    def begin_close(self) -> None:
        """End the thread as soon as its queue is empty."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def close(self, until_s: float) -> str:
        """Give up what is not sent at a time of the monotonic clock; return a text about all
        messages that were lost, or ""."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()
            lost = self._unsent + self._in_flight + len(self._waiting)
            news, self._news = self._news, ""
        if not lost:
            return ""
        cause = news or f"notifications to {self.target.label}"
        return f"{cause}; not sent in all: {plural(lost, 'message')}"

    # --- the thread ---

    def _deliver(self) -> None:
        while body := self._next():
            failure = self._send(body)
            with self._changed:
                self._in_flight = 0
                if self._is_abandoned:
                    return
                if failure:
                    self._lose(failure.text)

    def _next(self) -> bytes:
        """Wait for a body; return b"" at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting or self._is_abandoned:
                return b""
            self._in_flight = 1
            return self._waiting.popleft()

    def _send(self, body: bytes) -> _Failure | None:
        """Try a message until the server takes it; return the last failure."""
        failure = self._attempt(body)
        for wait_s in self._attempts.waits_s:
            if failure is None or failure.retry_s is None:
                return failure
            with self._changed:
                wait_s = max(wait_s, failure.retry_s)
                if self._changed.wait_for(lambda: self._is_abandoned, wait_s):
                    return failure
            failure = self._attempt(body)
        return failure

    def _attempt(self, body: bytes) -> _Failure | None:
        within_s = self._attempts.within_s
        connection, path, headers = self._connection(within_s)
        end = threading.Timer(within_s, _cut, [connection])
        end.daemon = True
        end_s = time.monotonic() + within_s
        end.start()
        try:
            connection.request("POST", path, body, headers)
            result = _judge(connection.getresponse())
        except (OSError, HTTPException, ValueError) as error:  # ValueError: cut amid TLS
            result = _Failure(short_error(str(error) or type(error).__name__))
        finally:
            end.cancel()
            connection.close()
        if time.monotonic() >= end_s:  # a head that was cut can look whole
            return _Failure(f"no answer within {within_s:g} s")
        return result

    def _connection(self, within_s: float) -> tuple[HTTPConnection, str, dict[str, str]]:
        target = self.target
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"outlast/{__version__}",
            "Host": target.authority,
            "Connection": "close",
        }
        if target.bearer:
            headers["Authorization"] = f"Bearer {target.bearer}"
        host, port = self._proxy or (target.host, target.port)
        if target.scheme == "http":
            path = f"http://{target.authority}{target.path}" if self._proxy else target.path
            return HTTPConnection(host, port, timeout=within_s), path, headers
        connection = HTTPSConnection(host, port, timeout=within_s)
        if self._proxy:
            connection.set_tunnel(target.host, target.port)
        return connection, target.path, headers

    def _lose(self, cause: str) -> None:
        """Count a message as lost; the caller has the lock."""
        self._unsent += 1
        if not self._has_failed:
            self._has_failed = True
            self._news = f"a notification to {self.target.label} was not sent: {cause}"


def _judge(response: HTTPResponse) -> _Failure | None:
    status = response.status
    if 200 <= status < 300:
        return None
    text = f"the server answered {status} {short_error(response.reason)}".rstrip()
    if status < 500 and status not in _AGAIN:
        return _Failure(text, None)
    after = response.headers.get("Retry-After", "")
    seconds = float(after) if after.isascii() and after.isdigit() else 0.0
    return _Failure(text, min(seconds, RETRY_AFTER_MAX_S))


def _cut(connection: HTTPConnection) -> None:
    """Wake the thread that waits for an answer, whatever drips in."""
    if (sock := connection.sock) is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS, which would take part


def _proxy_of(target: NotifyTarget) -> tuple[str, int] | None:
    """Return the proxy of the environment for a target. Raises UsageError where it cannot be."""
    address = urllib.request.getproxies().get(target.scheme, "")
    if not address or urllib.request.proxy_bypass(target.host):
        return None
    try:
        url = urlsplit(address if "://" in address else f"http://{address}")
        if url.scheme == "http" and url.hostname and "@" not in url.netloc:
            return url.hostname, url.port or 80
    except ValueError:
        pass
    raise UsageError(
        f"--notify: {target.scheme.upper()}_PROXY is no proxy of the form http://HOST:PORT without"
        " a password; nothing was started; correct it, or name the host in NO_PROXY"
    )
