"""Connection of the agent to the controller, with reconnects and a queue of unsent frames."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from outlast.transport import messages
from outlast.transport.channel import Channel
from outlast.transport.socket_stream import SocketStream
from outlast.transport.tls import PeerTls, reason_of

CONNECT_S = 2.0
RETRY_S = 0.1
WAITING_MAX = 10_000


class AgentEntry(NamedTuple):
    """Entry of an agent into a run: its first incarnation, the failure domain of its node, and what
    it checks the controller with."""

    incarnation: int = 1
    domain: str = ""
    tls: PeerTls | None = None


AT_START = AgentEntry()


class AgentLink:
    """Reconnecting link to the controller.

    `on_connected` is called on each new connection, before queued frames are sent. Frames that the
    kernel accepted before a connection broke may be lost; `on_connected` must resend the state.
    `note` gets the reason for which TLS fails, once.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        on_frame: Callable[[messages.MessageEnvelope], None],
        on_connected: Callable[[], None],
        tls: PeerTls | None = None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._address = address
        self._token = token
        self._on_frame = on_frame
        self._on_connected = on_connected
        self._tls, self._note = tls, note
        self._refusal = ""  # the newest that was noted
        self._channel: Channel | None = None
        self._dialing: asyncio.Task[socket.socket] | None = None
        self._waiting: deque[messages.MessageEnvelope] = deque(maxlen=WAITING_MAX)

    @property
    def connected(self) -> bool:
        """Return whether the link to the controller is up."""
        return self._channel is not None

    def send(self, envelope: messages.MessageEnvelope) -> None:
        """Send a frame, or queue it until connected; beyond WAITING_MAX, drop the oldest."""
        if self._channel is None or not self._channel.send(envelope):
            self._waiting.append(envelope)

    def holds(self, worker: str, seq: int) -> bool:
        """Return whether a worker's frame of this number is queued."""
        return any(one.worker == worker and one.seq == seq for one in self._waiting)

    def redirect(self, host: str, address: tuple[str, int], term: int) -> None:
        """Connect to a newer term's controller, on `host`; queued frames become frames of that
        term."""
        self._address = address
        self._tls = self._tls.also_of(host) if self._tls else None
        self._waiting = deque((replace(one, term=term) for one in self._waiting), WAITING_MAX)
        if self._channel is not None:
            self._channel.close("a newer term began")
        elif self._dialing is not None:
            self._dialing.cancel()  # the old address may give no answer for long

    async def keep(self) -> None:
        """Connect and reconnect until cancelled; the agent's lease limits the outage."""
        while True:
            dialing = self._dialing = asyncio.create_task(self._connect())
            try:
                await asyncio.wait({dialing}, timeout=CONNECT_S)
            finally:
                dialing.cancel()  # of no effect on one that has ended
            if dialing.done() and not dialing.cancelled():
                error = dialing.exception()
                if error is None:
                    await self._speak(dialing.result())
                elif not isinstance(error, OSError):
                    raise error
                elif isinstance(error, ssl.SSLError):
                    self._refused(reason_of(error))
            await asyncio.sleep(RETRY_S)

    def _refused(self, reason: str) -> None:
        if reason != self._refusal:
            self._refusal = reason
            host, port = self._address
            self._note(f"no connection to the controller at {host}:{port} by TLS: {reason}")

    async def _speak(self, sock: socket.socket) -> None:
        """Serve one connection until it breaks."""
        broken = asyncio.Event()
        channel = Channel(sock, self._token, self._on_frame, lambda _reason: broken.set())
        self._channel = channel
        try:
            self._on_connected()
            while self._waiting and channel.send(self._waiting[0]):
                self._waiting.popleft()
            await broken.wait()
        finally:
            self._channel = None
            channel.close()

    async def _connect(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        sock = socket.socket(family)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(sock, self._address)
        except BaseException:
            sock.close()
            raise
        return sock if self._tls is None else await self._secure(sock, self._tls)

    @staticmethod
    async def _secure(sock: socket.socket, tls: PeerTls) -> socket.socket:
        stream = SocketStream(sock)
        try:
            secure = await stream.secure(tls.node.client, is_server=False)
            tls.check(secure)
        except BaseException:
            stream.abort()
            raise
        return secure
