"""Listener of the controller, and the connections of agents."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import NamedTuple, Protocol

from outlast.controller import inputs
from outlast.launch.terms.run_identity import RunningJob
from outlast.transport import messages
from outlast.transport.channel import Channel
from outlast.transport.socket_stream import SocketStream
from outlast.transport.stranger_table import Stranger, StrangerTable
from outlast.transport.tls import PeerTls, reason_of

STRANGERS_MAX = 64  # or the number of nodes
STRANGER_S = 5.0
BACKLOG = 1024
ACCEPTS_MAX = 64  # per turn of the loop
PAUSE_S = 1.0


class NodeListener(NamedTuple):
    """Address of the controller's listener, and the hosts of a run of several nodes by rank, with
    their failure domains. `host`: this one. `before`: the host of the controller from which this
    one takes over, which has not answered for `silent_s`."""

    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    host: str = ""
    before: str = ""
    silent_s: float = 0.0
    tls: PeerTls | None = None


LOOPBACK = NodeListener()


class AgentPeer(NamedTuple):
    """Current connection of an agent."""

    channel: Channel
    incarnation: int


class AgentObserver(Protocol):
    """Part of the controller that hears agents."""

    def on_frame(self, frame: messages.MessageEnvelope) -> None:
        """Handle an authentic frame of this run."""

    def on_agent_lost(self, agent: str, incarnation: int) -> None:
        """Handle the end of an agent's connection."""

    def note(self, text: str) -> None:
        """Note refused connections."""


class AgentListener:
    """Listener of one controller. A connection is a stranger's until its first authentic frame."""

    def __init__(
        self, job: RunningJob, nodes: NodeListener, token: bytes, observer: AgentObserver
    ) -> None:
        self._job, self._token, self._observer = job, token, observer
        self._tls = nodes.tls
        self._handshakes: set[asyncio.Task[None]] = set()
        self._peers: dict[str, AgentPeer] = {}
        self._seqs: dict[str, int] = {}
        most = max(STRANGERS_MAX, len(nodes.hosts))
        self._table = StrangerTable("the controller", most, STRANGER_S, observer.note)
        self._strangers: dict[Channel, Stranger] = {}
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._socket = socket.create_server(
            (nodes.address, 0), backlog=max(BACKLOG, len(nodes.hosts))
        )
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    @property
    def agents(self) -> list[str]:
        """Return the connected agents."""
        return list(self._peers)

    def listen(self) -> None:
        """Accept connections."""
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Close the listener and all connections."""
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._table.close("the controller ends")
        for handshake in self._handshakes:
            handshake.cancel()
        for channel in [peer.channel for peer in self._peers.values()]:
            channel.close("the controller ends")

    def send(self, action: inputs.Send) -> None:
        """Send a message; drop it if its agent is not connected: its lease ends then."""
        peer = self._peers.get(action.agent)
        if peer is None:
            return
        seq = self._seqs[action.agent] = self._seqs.get(action.agent, 0) + 1
        peer.channel.send(
            messages.MessageEnvelope(
                run=self._job.run,
                term=self._job.term,
                agent=action.agent,
                incarnation=peer.incarnation,
                to=action.workers,
                seq=seq,
                body=action.body,
            )
        )

    # --- connections ----------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                sock, peer = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._pause()
                return  # or the peer closed the connection before accept
            self._welcome(sock, peer[0])

    def _pause(self) -> None:
        """Accept nothing for a while: this process has no free descriptor."""
        self._loop.remove_reader(self._socket)
        self._loop.call_later(PAUSE_S, self.listen)

    def _welcome(self, sock: socket.socket, address: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            self._open(sock, address)
            return
        task = asyncio.create_task(self._secure(SocketStream(sock), address, self._tls))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _secure(self, stream: SocketStream, address: str, tls: PeerTls) -> None:
        """Shake hands with a stranger."""
        why: list[str] = []

        def close(reason: str) -> None:
            why.append(reason)
            stream.abort()

        stranger = Stranger(address, close)
        self._table.add(stranger)
        try:
            sock = await stream.secure(tls.node.server, is_server=True)
        except OSError as error:
            await stream.linger()  # the peer reads why
            if not self._closed:
                self._table.refuse(stranger, why[0] if why else reason_of(error))
        except BaseException:
            stream.abort()
            raise
        else:
            self._table.admit(stranger)
            self._open(sock, address)

    def _open(self, sock: socket.socket, address: str) -> None:
        channel = Channel(
            sock,
            self._token,
            lambda frame: self._on_frame(channel, frame),
            lambda reason: self._on_closed(channel, reason),
            stranger=True,
        )
        self._strangers[channel] = stranger = Stranger(address, channel.close)
        self._table.add(stranger)

    def _on_frame(self, channel: Channel, frame: messages.MessageEnvelope) -> None:
        if frame.run != self._job.run:
            channel.close(f"it speaks of run {frame.run}, this is {self._job.run}")
            return
        if channel in self._strangers:
            self._table.admit(self._strangers.pop(channel))
            old = self._peers.get(frame.agent)
            self._peers[frame.agent] = AgentPeer(channel, frame.incarnation)
            if old:
                old.channel.close(f"agent {frame.agent} came back on another connection")
        elif isinstance(frame.body, messages.AgentHello):
            self._peers[frame.agent] = AgentPeer(channel, frame.incarnation)
            self._seqs[frame.agent] = 0  # a new incarnation starts at 0
        self._observer.on_frame(frame)

    def _on_closed(self, channel: Channel, reason: str) -> None:
        if stranger := self._strangers.pop(channel, None):
            if not self._closed:
                self._table.refuse(stranger, reason)
            return
        for agent, peer in list(self._peers.items()):
            if peer.channel is channel:
                del self._peers[agent]
                self._observer.on_agent_lost(agent, peer.incarnation)
