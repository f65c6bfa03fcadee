"""The agent's connection to the controller: reconnected when it breaks; frames wait meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from outlast.transport import messages
from outlast.transport.channel import Channel

CONNECT_S = 2.0
RETRY_S = 0.1
WAITING_MAX = 10_000


class AgentLink:
    """`on_connected` is called on each new connection, before any frame that waited is sent.

    Frames that the kernel had accepted when a connection broke may be lost: the sender repeats
    what matters in `on_connected`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        on_frame: Callable[[messages.MessageEnvelope], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._address = address
        self._token = token
        self._on_frame = on_frame
        self._on_connected = on_connected
        self._channel: Channel | None = None
        self._waiting: deque[messages.MessageEnvelope] = deque(maxlen=WAITING_MAX)

    @property
    def connected(self) -> bool:
        """Return whether the link to the controller is up."""
        return self._channel is not None

    def send(self, envelope: messages.MessageEnvelope) -> None:
        """Send now, or as soon as there is a connection; at most WAITING_MAX frames wait."""
        if self._channel is None or not self._channel.send(envelope):
            self._waiting.append(envelope)

    async def keep(self) -> None:
        """Keep a connection until cancelled; the lease decides when it is too late."""
        while True:
            try:
                sock = await asyncio.wait_for(self._connect(), CONNECT_S)
            except OSError:  # TimeoutError is one
                await asyncio.sleep(RETRY_S)
                continue
            await self._speak(sock)
            await asyncio.sleep(RETRY_S)

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
        return sock
