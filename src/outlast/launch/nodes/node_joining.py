"""Way of a node into a run: it connects to the endpoint, and asks the meeting for its place."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast.errors import ConfigError, RunDirError, WireError
from outlast.launch.nodes.endpoint_listener import RETRY_S
from outlast.launch.nodes.node_facts import NodeIdentity, unresolved
from outlast.launch.nodes.node_meeting import PROOF
from outlast.transport.node_link import (
    AnyNodeMessage,
    ForeignTokenError,
    NodeAccepted,
    NodeChallenge,
    NodeHello,
    NodeLink,
    NodeRefused,
    NodeReply,
    TlsError,
)
from outlast.transport.socket_stream import SocketStream
from outlast.transport.tls import reason_of

CONNECT_S = 5.0  # of one attempt: an address without a host gives no answer


async def join(
    identity: NodeIdentity,
    run_dir: Path,
    timeout_s: float,
    note: Callable[[str], None],
    folders: Sequence[Path] = (),
) -> tuple[str, NodeAccepted]:
    """Take part in the meeting; return this host's address and this node's place in the run.
    `folders`: see NodeMeeting.

    Raises ConfigError or RunDirError that names what is wrong on this node; nothing was started.
    """
    host, port = identity.endpoint
    attempts = _Attempts(identity, note)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                link = await attempts.connect()
                hello = identity.hello(_read_proof(run_dir))
                _check_shared(identity.host, hello.directory, folders)
                if answer := await _ask(link, hello):
                    break
                await attempts.closed(link)
    except TimeoutError:
        if isinstance(attempts.error, socket.gaierror):
            raise unresolved(identity.endpoint, timeout_s, attempts.error) from None
        raise ConfigError(
            f"{identity.host}: the endpoint {host}:{port} gave no answer within {timeout_s:g} s:"
            f" {attempts.error or 'it waits for other nodes'}; nothing was started"
        ) from None
    except TlsError as error:
        raise ConfigError(
            f"{identity.host}: no connection to the endpoint {host}:{port} by TLS: {error}; nothing"
            " was started; give all nodes certificates of one authority (--tls-cert, --tls-key,"
            " --tls-ca), or none"
        ) from None
    except ForeignTokenError:
        raise ConfigError(
            f"{identity.host}: the token is not that of the controller's node at {host}:{port};"
            " nothing was started; give the same token to all nodes"
        ) from None
    except WireError as error:
        raise ConfigError(
            f"{identity.host}: the endpoint {host}:{port} is another program's ({error}); nothing"
            " was started; choose another port"
        ) from None
    address = link.address
    await link.close()
    if isinstance(answer, NodeAccepted) and answer.hello_nonce == hello.nonce:
        return address, answer
    if isinstance(answer, NodeRefused):
        kind = RunDirError if "run directory" in answer.reason else ConfigError
        raise kind(
            f"{identity.host} was refused by the run at {host}:{port}: {answer.reason}; nothing"
            " was started on this node"
        )
    raise ConfigError(
        f"{identity.host}: the answer of the endpoint {host}:{port} is not to this node's request;"
        " nothing was started"
    )


async def _ask(link: NodeLink, hello: NodeHello) -> AnyNodeMessage | None:
    """Return the answer to a Hello; close the connection if there is none."""
    link.send(hello)
    try:
        answer = await link.receive()
        if isinstance(answer, NodeChallenge):
            link.send(NodeReply(nonce=answer.nonce))
            answer = await link.receive()
        return answer
    except BaseException:
        await link.close()
        raise


class _Attempts:
    """Attempts to connect to the endpoint, which may open later, as its name may appear later, or
    change its address: it is resolved anew each time."""

    def __init__(self, identity: NodeIdentity, note: Callable[[str], None]) -> None:
        self._identity, self._note = identity, note
        self._is_noted = False
        self.error: OSError | None = None  # of the last attempt, if it failed

    async def closed(self, link: NodeLink) -> None:
        """Wait after a connection that ended without an answer: others crowded it out, the
        controller's node starts again, or the endpoint is another program's."""
        await link.close()
        await self._wait(ConnectionResetError("it closes connections without an answer"))

    async def _wait(self, error: OSError) -> None:
        if not self._is_noted:
            self._is_noted = True
            host, port = self._identity.endpoint
            reason = str(error) or f"no answer within {CONNECT_S:g} s"
            self._note(f"waiting for the endpoint {host}:{port}: {reason}")
        self.error = error
        await asyncio.sleep(RETRY_S)

    async def connect(self) -> NodeLink:
        """Return a connection to the endpoint."""
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    stream = await self._connect()
            except ssl.SSLError as error:  # a certificate or a program that does not fit
                raise TlsError(reason_of(error)) from error
            except OSError as error:
                await self._wait(error)
                continue
            self.error = None
            return NodeLink(stream, self._identity.key)

    async def _connect(self) -> SocketStream:
        """Return a connection, by TLS if the run uses it. Raises OSError, also ssl.SSLError."""
        loop, local = asyncio.get_running_loop(), self._identity.local_addr
        found = await loop.getaddrinfo(
            *self._identity.endpoint, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
        stream = SocketStream(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            sock = stream.socket
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if local:
                sock.bind((local, 0))
            await loop.sock_connect(sock, found[0][4])
            if tls := self._identity.endpoint_tls:
                tls.check(await stream.secure(tls.node.client, is_server=False))
        except BaseException:
            stream.abort()
            raise
        return stream


def _read_proof(directory: Path) -> str:
    try:
        return (directory / PROOF).read_text(errors="replace")[:64]
    except OSError:
        return ""


def _check_shared(host: str, proof: str, others: Sequence[Path]) -> None:
    """Raise ConfigError for a directory of durable storage that is not the one of the controller's
    node. Without the `proof` of the run directory, that node refuses this one."""
    for directory in others:
        if proof and _read_proof(directory) != proof:
            raise ConfigError(
                f"{host}: --durable {directory} is not the directory of the controller's node, but"
                " one of this host alone; nothing was started on this node; name a directory that"
                " all nodes share, or a bucket"
            )
