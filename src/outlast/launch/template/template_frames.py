"""Messages between launcher, template and forked workers.

Launcher and template share a Unix SOCK_SEQPACKET socket; each packet is one message as JSON.
`ForkRequest` carries one descriptor: a second such socket, the worker's *gate*, which the worker
shares with the launcher. `Identity` carries the descriptors of `IDENTITY_DESCRIPTORS`.

| from     | to       | message                                                                  |
|----------|----------|--------------------------------------------------------------------------|
| template | launcher | TemplateReady, once; or TemplateRefused, then the template exits         |
| launcher | template | ForkRequest                                                              |
| template | launcher | Forked (the worker is now a child of the launcher), or ForkRefused       |
| launcher | worker   | Identity on the gate; without it the worker exits                        |
| worker   | launcher | Restarted on the gate, before the worker executes its command            |
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from outlast import config
from outlast.errors import WireError

PACKET_BYTES_MAX = 64 << 10
ENVIRONMENT_BYTES_MAX = 16 << 20
# Variables that differ between workers. A template has none of them, and refuses modules that
# read one at import.
PER_WORKER = (
    "RANK",
    "ROLE_RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    config.WORKER_VARIABLE,
    config.TOP_VARIABLE,
)
GATE_S = 30.0  # a forked worker's timeout for its Identity
# Order of the descriptors of an Identity.
IDENTITY_DESCRIPTORS = ("stdout", "stderr", "control", "page", "environment")
M = TypeVar("M")


class TemplateMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base class of all messages."""


class TemplateReady(TemplateMessage, frozen=True, kw_only=True):
    """Report of a loaded template, with the descriptors of its workers' control socket and page."""

    control_fd: int
    page_fd: int
    home: str  # path of its outlast package
    modules: int
    size_bytes: int


class TemplateRefused(TemplateMessage, frozen=True, kw_only=True):
    """Refusal of a template whose forked workers would differ from spawned workers."""

    reason: str


class ForkRequest(TemplateMessage, frozen=True, kw_only=True):
    """Request to fork one worker."""


class Forked(TemplateMessage, frozen=True, kw_only=True):
    """Report of a forked worker."""

    pid: int


class Identity(TemplateMessage, frozen=True, kw_only=True):
    """Order to a forked worker to start. `mark`: its family mark."""

    mark: str


class ForkRefused(TemplateMessage, frozen=True, kw_only=True):
    """Refusal to fork: a spawned worker would import other modules than the template has."""

    reason: str


class Restarted(TemplateMessage, frozen=True, kw_only=True):
    """Notice of a worker's restart from its command: the script changed inputs of imports."""

    reason: str


FromTemplate = TemplateReady | TemplateRefused | Forked | ForkRefused
_answers: msgspec.json.Decoder[FromTemplate] = msgspec.json.Decoder(FromTemplate)


class Packet(NamedTuple):
    """Received packet and its descriptors, owned by the receiver; `data` is empty at EOF."""

    data: bytes
    fds: list[int]


def send(sock: socket.socket, message: TemplateMessage, fds: Sequence[int] = ()) -> None:
    """Send one message; raises OSError if the peer has closed or does not read."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([msgspec.json.encode(message)], rights)


def receive(sock: socket.socket) -> Packet:
    """Return the next packet; raises OSError, including TimeoutError."""
    space = socket.CMSG_SPACE(len(IDENTITY_DESCRIPTORS) * 4)
    data, ancillary, _, _ = sock.recvmsg(PACKET_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, raw in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array.array("i", raw[: len(raw) // 4 * 4])
    return Packet(data, fds)


def parse(data: bytes, of: type[M]) -> M:
    """Decode a packet as a message of type `of`; raises WireError."""
    return _decoded(data, msgspec.json.Decoder(of))


def parse_answer(data: bytes) -> FromTemplate:
    """Decode a packet from the template; raises WireError."""
    return _decoded(data, _answers)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[M]) -> M:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WireError(f"a packet of the template process cannot be read: {error}") from error


def environment_file(environment: dict[str, str]) -> int:
    """Return the descriptor of a memory file with the environment, which may exceed a packet.

    Raises OSError, and WireError above ENVIRONMENT_BYTES_MAX.
    """
    pairs = {_raw(name): _raw(value) for name, value in environment.items()}
    data = b"".join(name + b"=" + value + b"\0" for name, value in pairs.items())
    if len(data) > ENVIRONMENT_BYTES_MAX:
        raise WireError(f"an environment of {len(data)} bytes, above {ENVIRONMENT_BYTES_MAX}")
    fd = os.memfd_create("outlast-environment", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, len(data))
        os.pwrite(fd, data, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_environment(fd: int) -> dict[str, str]:
    """Return the environment of a memory file."""
    size = os.fstat(fd).st_size
    data = b""
    while len(data) < size and (part := os.pread(fd, size - len(data), len(data))):
        data += part
    entries = (entry.partition(b"=") for entry in data.split(b"\0")[:-1])
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}


def _raw(text: str) -> bytes:
    return os.fsencode(text)
