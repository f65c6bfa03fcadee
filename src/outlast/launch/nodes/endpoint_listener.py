"""Listener at the endpoint of a run: it answers connections until they have shown the token.

accepted ── TLS, if the run uses it ──► Hello ──► Challenge, Reply ──► a node, for the meeting
   │                  │                   │               │
   └──────────────────┴───────────────────┴───────────────┴──► refused, and counted by reason
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable

from outlast.errors import ConfigError, WireError
from outlast.launch.nodes.node_facts import NodeIdentity, is_address, unresolved
from outlast.transport.node_link import (
    ForeignTokenError,
    NodeChallenge,
    NodeHello,
    NodeLink,
    NodeRefused,
    NodeReply,
)
from outlast.transport.socket_stream import SocketStream
from outlast.transport.stranger_table import Stranger, StrangerTable
from outlast.transport.tls import HANDSHAKE_BYTE, reason_of

BACKLOG = 1024
ACCEPTS_MAX = 64  # per turn of the loop
HELLO_BYTES_MAX = 1 << 18
STRANGERS_MAX = 64  # connections without a Hello
HELLO_S = 10.0
RETRY_S = 0.2
PAUSE_S = 1.0
NONCE_BYTES = 32
NEEDS_TLS = "this run uses TLS, and this node does not: give it --tls-cert, --tls-key and --tls-ca"


class EndpointListener:
    """Listener of the controller's node. `on_node` gets each node that has shown the token, and
    serves its connection; `note` receives refusals as text."""

    def __init__(
        self,
        identity: NodeIdentity,
        note: Callable[[str], None],
        on_node: Callable[[NodeHello, NodeLink], Awaitable[None]],
        place: str = "the endpoint",
    ) -> None:
        self._identity, self._note, self._on_node = identity, note, on_node
        self.strangers = StrangerTable(place, STRANGERS_MAX, HELLO_S, note)
        self._unopened: OSError | None = None  # why the endpoint is not open yet
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.address = ""  # this host's, at the endpoint

    async def open(self, timeout_s: float) -> None:
        """Open the endpoint. Its name may appear late, or still have the address of an earlier
        host: it is resolved anew until it leads here. Raises ConfigError for another failure."""
        host, port = self._identity.endpoint
        own = self._identity.local_addr or host
        while True:
            try:
                self._socket = await self._bind(own, port)
            except OSError as error:
                late = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
                if not late or is_address(own):
                    raise self.error(error, timeout_s) from error
                if self._unopened is None:
                    self._note(f"the endpoint's name {own!r} does not lead here yet: {error}")
                self._unopened = error
                await asyncio.sleep(RETRY_S)
            else:
                self.address = str(self._socket.getsockname()[0])
                self.listen()
                return

    def bind(self, address: str) -> tuple[str, int]:
        """Take a free port of one of this host's addresses, for `listen`; return both."""
        self._socket = socket.create_server((address, 0), backlog=BACKLOG)
        self._socket.setblocking(False)
        self.address, port = self._socket.getsockname()[:2]
        return self.address, port

    @staticmethod
    async def _bind(host: str, port: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        sock = socket.create_server(found[0][4][:2], backlog=BACKLOG)
        sock.setblocking(False)
        return sock

    def error(self, error: OSError | None, timeout_s: float) -> ConfigError:
        """Return the error for an endpoint that cannot be opened."""
        error = error or self._unopened
        host, port = self._identity.endpoint
        if isinstance(error, socket.gaierror):
            return unresolved(self._identity.endpoint, timeout_s, error)
        reason = error.strerror if error else "no answer of the resolver"
        why = (
            "its address is not one of this host"
            if error and error.errno == errno.EADDRNOTAVAIL
            else "another run or program has it"
        )
        return ConfigError(
            f"the endpoint {host}:{port} cannot be opened ({reason}): {why}; nothing was started;"
            " choose another port, or correct --rdzv-endpoint"
        )

    def stop_listening(self) -> None:
        """Accept no further connections."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """End the connections of strangers, and all serving."""
        self.strangers.close("the meeting is over")
        for task in self._tasks:
            task.cancel()

    # --- one connection -------------------------------------------------------------------

    def listen(self) -> None:
        """Accept connections."""
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._accept, self._socket)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # no free descriptor
                    self._loop.remove_reader(listener)
                    self._loop.call_later(PAUSE_S, self.listen)
                return  # or the peer closed the connection before accept
            task = asyncio.create_task(self._serve(SocketStream(sock), str(peer[0])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: SocketStream, address: str) -> None:
        why: list[str] = []

        def close(reason: str) -> None:
            why.append(reason)
            stream.abort()

        stranger = Stranger(address, close)
        self.strangers.add(stranger)
        link = NodeLink(stream, self._identity.key)
        try:
            if wrong := await self._secure(stream):
                hello = None
            else:
                hello, wrong = await self._hello(link)
        except ssl.SSLError as error:
            await stream.linger()  # the peer reads why; it counts as a stranger until then
            self.strangers.refuse(stranger, why[0] if why else reason_of(error))
            return
        except BaseException:
            stream.abort()
            raise
        if hello is None:
            self.strangers.refuse(stranger, why[0] if why else wrong)
            link.send(NodeRefused(reason=wrong))
        else:
            self.strangers.admit(stranger)
            await self._on_node(hello, link)
        await link.close()

    async def _secure(self, stream: SocketStream) -> str:
        """Shake hands if the run uses TLS; return why that has not begun. Raises ssl.SSLError."""
        if self._identity.tls is None:
            return ""
        try:
            first = await stream.peek()
            if first == HANDSHAKE_BYTE:
                await stream.secure(self._identity.tls.server, is_server=True)
                return ""
        except ssl.SSLError:
            raise
        except OSError:
            first = b""
        return NEEDS_TLS if first else "it ended without a message"

    async def _hello(self, link: NodeLink) -> tuple[NodeHello | None, str]:
        """Return a node's Hello, or why it is a stranger."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            hello = await link.receive(HELLO_BYTES_MAX)
            if not isinstance(hello, NodeHello):
                return (
                    None,
                    "its first message is no Hello" if hello else "it ended without a message",
                )
            link.send(NodeChallenge(nonce=nonce))
            reply = await link.receive(HELLO_BYTES_MAX)
        except ForeignTokenError:
            return None, "its token is not that of this run"
        except WireError as error:
            return None, str(error)
        if reply != NodeReply(nonce=nonce):
            return None, "its Hello is not of this connection"
        return hello, ""
