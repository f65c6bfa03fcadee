"""Connection between a node and the controller's node of a run, before the node takes part in it.

| sender             | message       | when                                                      |
|--------------------|---------------|-----------------------------------------------------------|
| node               | NodeHello     | first                                                     |
| controller's node  | NodeChallenge | then: a random number for this connection                 |
| node               | NodeReply     | with that number, so that a recorded Hello is of no use   |
| controller's node  | NodeAccepted  | all nodes are there and agree; then the agent connects,   |
|                    |               | and this connection ends                                  |
| controller's node  | NodeRefused   | the node does not fit; the connection ends                |

The ranks of a script that does not call `outlast.init()` are a group. Its nodes have no agents:
this connection stays, keyed with the run's token from NodeAccepted on.

| sender             | message       | when                                                      |
|--------------------|---------------|-----------------------------------------------------------|
| controller's node  | StartRanks    | an attempt begins, with the port of the group's store     |
| node               | RankFailed    | a rank has failed, in the order of failures               |
| controller's node  | EndRanks      | a rank has failed, or a launcher got a signal             |
| node               | RanksEnded    | all ranks of an attempt have ended                        |
| node               | SignalTaken   | its launcher got a signal                                 |
| controller's node  | GroupEnded    | the run has ended, or the node leaves it after a signal;  |
|                    |               | the connection ends                                       |
| both               | NodeBeat      | four times a lease                                        |

With TLS, all of it is inside TLS, but for the refusal of a node that does not use it. A frame is
`magic(4) | length(4, big endian) | tag(16) | payload(length)` as in `channel`, with another magic;
its tag is keyed with the users' token.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import struct

import msgspec

from outlast.errors import WireError
from outlast.events import Fault
from outlast.transport.socket_stream import SocketStream
from outlast.transport.tls import reason_of

MAGIC = b"OLN2"
HEADER = struct.Struct(">4sI16s")
FRAME_BYTES_MAX = 1 << 20


class NodeMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base class of all messages."""


class NodeHello(NodeMessage, frozen=True):
    """Request of a node to take part in a run."""

    host: str
    node_rank: int  # -1: any
    facts: dict[str, str]  # must be equal on all nodes
    directory: str  # content of a file in the run directory, "" without one
    nonce: bytes
    domain: str = ""  # what fails together with the host, the largest part first
    folders: tuple[str, ...] = ()  # contents of that file in each directory of --durable
    run: str = ""  # run of its run directory, "" for a fresh one
    neighbours: tuple[str, ...] = ()  # other hosts that use its run directory


class NodeChallenge(NodeMessage, frozen=True):
    """Question of the controller's node, to see that the Hello was sent on this connection."""

    nonce: bytes


class NodeReply(NodeMessage, frozen=True):
    """Answer to NodeChallenge, with its number."""

    nonce: bytes


class NodeAccepted(NodeMessage, frozen=True):
    """Place of a node in the run."""

    hosts: tuple[str, ...]  # of all nodes, by node rank
    domains: tuple[str, ...]  # failure domains of these hosts, "" where unknown
    run: str
    term: int
    address: tuple[str, int]  # of the controller's listener
    master_addr: str
    master_port: int
    hello_nonce: bytes  # of the node's Hello
    run_nonce: bytes  # from which the run's token is made
    incarnation: int = 1  # of the node's agent: above 1 where the host had one in this term
    home: str = ""  # shared directory of a run whose hosts have run directories of their own


class NodeRefused(NodeMessage, frozen=True):
    """Refusal of a node."""

    reason: str


class StartRanks(NodeMessage, frozen=True):
    """Start of all ranks of a node, whose store is at `port` of MASTER_ADDR."""

    attempt: int
    port: int


class RankFailed(NodeMessage, frozen=True):
    """Failure of a rank."""

    attempt: int
    fault: Fault


class RanksEnded(NodeMessage, frozen=True):
    """End of all ranks of a node."""

    attempt: int


class EndRanks(NodeMessage, frozen=True):
    """Request to end all ranks of a node by a signal."""

    attempt: int
    signal: int


class SignalTaken(NodeMessage, frozen=True):
    """Signal to a node's launcher."""

    signal: int


class GroupEnded(NodeMessage, frozen=True):
    """End of a run, or of a node's part in it, in words."""

    outcome: str
    exit_code: int
    note: str


class NodeBeat(NodeMessage, frozen=True):
    """Sign of life. `still_s`: how long all ranks of the node have stood still, in seconds."""

    still_s: float


MeetingMessage = NodeHello | NodeChallenge | NodeReply | NodeAccepted | NodeRefused
GroupMessage = StartRanks | RankFailed | RanksEnded | EndRanks | SignalTaken | GroupEnded | NodeBeat
AnyNodeMessage = MeetingMessage | GroupMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyNodeMessage] = msgspec.msgpack.Decoder(AnyNodeMessage)


class ForeignTokenError(WireError):
    """A frame is keyed with another token."""


def users_key(token: str) -> bytes:
    """Return the key of frames between nodes."""
    return hashlib.blake2b(token.encode(), digest_size=32).digest()


def run_token(key: bytes, run_nonce: bytes) -> bytes:
    """Return the token of one run: it is never sent, and a later run has another one."""
    return hashlib.blake2b(run_nonce, key=key, digest_size=32).digest()


class TlsError(WireError):
    """A connection ended for a reason of TLS."""


class NodeLink:
    """One end of a connection between nodes."""

    def __init__(self, stream: SocketStream, key: bytes) -> None:
        self._stream, self._key = stream, key
        self.address = str(stream.socket.getsockname()[0])  # of this host, on the way to the peer

    async def receive(self, bytes_max: int = FRAME_BYTES_MAX) -> AnyNodeMessage | None:
        """Return the next message, or None at the end of the connection.

        Raises WireError for a frame of another program, ForeignTokenError for one of another token,
        TlsError where TLS has ended the connection.
        """
        try:
            magic, length, tag = HEADER.unpack(await self._stream.read_exactly(HEADER.size))
            if magic != MAGIC or length > bytes_max:
                raise WireError(f"not a frame of an Outlast node (starts with {magic!r})")
            payload = await self._stream.read_exactly(length)
        except ssl.SSLError as error:
            raise TlsError(reason_of(error)) from error
        except (EOFError, OSError):
            return None
        if not hmac.compare_digest(tag, _tag(self._key, payload)):
            raise ForeignTokenError("a frame is keyed with another token")
        try:
            return _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise WireError(f"a frame cannot be read: {error}") from error

    def send(self, message: AnyNodeMessage) -> None:
        """Send a message, or drop it if the connection has ended."""
        payload = _encoder.encode(message)
        head = HEADER.pack(MAGIC, len(payload), _tag(self._key, payload))
        self._stream.write(head + payload)

    def use_key(self, key: bytes) -> None:
        """Key all later frames, in both directions, with another token."""
        self._key = key

    async def close(self, within_s: float = 5.0) -> None:
        """Send what is queued, for at most `within_s`, and close the connection."""
        await self._stream.close(within_s)


def _tag(key: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, key=key, digest_size=16).digest()
