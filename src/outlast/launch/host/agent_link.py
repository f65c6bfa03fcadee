"""Connection of the agent to the controller, with reconnects and a queue of unsent frames."""

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
    """Reconnecting link to the controller.

    `on_connected` is called on each new connection, before queued frames are sent. Frames that the
    kernel accepted before a connection broke may be lost; `on_connected` must resend the state.
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
        """Send a frame, or queue it until connected; beyond WAITING_MAX, drop the oldest."""
        if self._channel is None or not self._channel.send(envelope):
            self._waiting.append(envelope)

    async def keep(self) -> None:
        """Connect and reconnect until cancelled; the agent's lease limits the outage."""
        while True:
            try:
                sock = await asyncio.wait_for(self._connect(), CONNECT_S)
            except OSError:  # includes TimeoutError
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
