"""Control channel of a worker: link to its agent, stand-in without launcher, shared values."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from outlast.checkpoint.format import codec
from outlast.config import Limits, WorkerSettings
from outlast.errors import GaveUpError, WireError
from outlast.transport import channel, messages

_SEND_TIMEOUT_S = 30
SharedAnswer: TypeAlias = messages.SharedValueReply | messages.SharedValueMake


class ControllerLink:
    """Connection to the agent that sends bodies to the controller. It passes received ones to
    `on_body` on the reader thread, and calls `on_gone` once when the connection has ended."""

    def __init__(
        self,
        settings: WorkerSettings,
        on_body: Callable[[messages.AnyBody], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self.term = settings.term  # the newest that this worker has met: it obeys no older one
        self._token = bytes.fromhex(settings.token)
        self._on_body, self._on_gone = on_body, on_gone
        self._socket = socket.socket(fileno=os.dup(settings.control_fd))
        # Only sends have a time-out: the reader waits as long as the run lasts.
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_TIMEOUT_S, 0)
        )
        self._lock = threading.Lock()
        self._seq = 0
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="outlast-link", daemon=True)
        self._thread.start()

    def send(self, body: messages.WorkerBody) -> None:
        """Queue a frame in the socket. Raises WireError when the agent does not accept it."""
        with self._lock:
            self._seq += 1
            frame = channel.encode_frame(
                messages.MessageEnvelope(
                    run=self._settings.run,
                    term=self.term,
                    agent=self._settings.agent,
                    incarnation=self._settings.incarnation,
                    worker=self._settings.worker,
                    seq=self._seq,
                    body=body,
                ),
                self._token,
            )
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise WireError(f"lost the agent of worker {self._settings.worker}") from error

    def try_send(self, body: messages.WorkerBody) -> None:
        """Send without an error if the agent is missing."""
        with contextlib.suppress(WireError):
            self.send(body)

    def close(self) -> None:
        """Close the socket and end the reader thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(_SEND_TIMEOUT_S)
        self._socket.close()

    def _read(self) -> None:
        decoder = channel.FrameDecoder(self._token)
        reason = "the agent closed the control channel"
        try:
            while data := self._socket.recv(1 << 16):
                for envelope in decoder.feed(data):
                    if envelope.run == self._settings.run and envelope.term >= self.term:
                        self.term = envelope.term
                        self._on_body(envelope.body)
        except (OSError, WireError) as error:
            reason = str(error)
        if not self._closed:
            self._on_gone(reason)


def end_process(reason: str) -> None:
    """End this worker at once, since it must not run without its agent."""
    sys.stderr.write(f"outlast: {reason}; this worker ends\n")
    os._exit(1)


class SharedValueClient:
    """Client for values that one rank makes for all, requested from the controller by name."""

    def __init__(self, send: Callable[[messages.WorkerBody], None], limits: Limits) -> None:
        self._send, self._limits = send, limits
        self._answers: queue.Queue[SharedAnswer] = queue.Queue(maxsize=64)
        self.known: dict[str, bytes] = {}  # a repeated request gets the same answer

    def deliver(self, answer: SharedAnswer) -> None:
        """Store an answer of the controller (on the reader thread)."""
        self._answers.put(answer)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the value of this name; call `make` if the controller chooses this rank.

        Raises GaveUpError where no answer arrives in time.
        """
        patience_s = 2 * self._limits.join_s  # several ranks may make it in turn
        until_s = time.monotonic() + patience_s
        self._send(messages.SharedValueRequest(name=name))
        while time.monotonic() < until_s:
            try:
                answer = self._answers.get(timeout=self._limits.shared_s)
            except queue.Empty:
                self._send(messages.SharedValueRequest(name=name))  # a frame may have been lost
                continue
            if answer.name != name:
                continue
            if isinstance(answer, messages.SharedValueReply):
                self.known[name] = answer.value
                return codec.decode(answer.value)
            if name not in self.known:
                self.known[name] = codec.encode(make())
                until_s = time.monotonic() + patience_s
            self._send(messages.SharedValueMade(name=name, value=self.known[name]))
        raise GaveUpError(f"no answer for the shared value {name!r} after {patience_s:.0f} s")


class StandaloneControl:
    """Stand-in for the controller in a job of one rank, within the process."""

    term = 0

    def __init__(self, on_body: Callable[[messages.AnyBody], None]) -> None:
        self._on_body = on_body

    def send(self, body: messages.WorkerBody) -> None:
        """Answer a message as a controller would."""
        match body:
            case messages.WorkerHello():
                self._on_body(messages.Seat(generation=1, seat=0, world=1, n=0, first=True))
            case messages.WorkerReady():
                self._on_body(
                    messages.Connect(
                        generation=body.generation,
                        n=body.n,
                        transfers=(),
                        timeout_s=30.0,
                    )
                )
            case messages.Joined():
                self._on_body(messages.Open(generation=body.generation, n=0))
            case messages.SharedValueRequest():
                self._on_body(messages.SharedValueMake(name=body.name))
            case messages.SharedValueMade():
                self._on_body(messages.SharedValueReply(name=body.name, value=body.value))
            case messages.Finished():
                self._on_body(messages.Stop(ok=True, reason="done"))
            case _:
                pass

    try_send = send

    def close(self) -> None:
        """Do nothing: there is no connection."""
