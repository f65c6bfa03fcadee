"""Messages between launcher, template and the workers that it forks.

Launcher and template share a Unix socket that keeps packets apart; a packet is the JSON of one
message. `ForkRequest` comes with the six descriptors of `FORK_DESCRIPTORS`. Each forked worker
shares a *gate* with the launcher, a second such socket.

| from     | to       | message                                                                  |
|----------|----------|--------------------------------------------------------------------------|
| template | launcher | TemplateReady, once, or TemplateRefused, and it ends                     |
| launcher | template | ForkRequest                                                              |
| template | launcher | Forked (the worker is the launcher's child by now), or ForkRefused       |
| launcher | worker   | GO on the gate; without it the worker ends                               |
| worker   | launcher | Restarted on the gate, before it executes its command as a spawned one   |
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
GO = b"go"
# Variables that differ between workers: a template has none of them, and a module that reads one
# while it loads is not for the template.
PER_WORKER = (
    "RANK",
    "ROLE_RANK",
    "LOCAL_RANK",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE",
    config.WORKER_VARIABLE,
)
GATE_S = 30.0  # a forked worker waits this long for GO
# Order of the descriptors of a ForkRequest.
FORK_DESCRIPTORS = ("stdout", "stderr", "control", "page", "gate", "environment")
M = TypeVar("M")


class TemplateMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all messages."""


class TemplateReady(TemplateMessage, frozen=True, kw_only=True):
    """The template has loaded. Its workers have their control socket and page at these numbers."""

    control_fd: int
    page_fd: int
    home: str  # path of its outlast package
    modules: int
    size_bytes: int


class TemplateRefused(TemplateMessage, frozen=True, kw_only=True):
    """Forked workers would not equal spawned ones, for this reason."""

    reason: str


class ForkRequest(TemplateMessage, frozen=True, kw_only=True):
    """Fork one worker. `mark`: of its family; `gate` and `environment` are descriptors."""

    mark: str


class Forked(TemplateMessage, frozen=True, kw_only=True):
    """The worker's pid."""

    pid: int


class ForkRefused(TemplateMessage, frozen=True, kw_only=True):
    """The template's modules are no longer those that a spawned worker would import."""

    reason: str


class Restarted(TemplateMessage, frozen=True, kw_only=True):
    """The worker starts again from its command: the script had changed what imports depend on."""

    reason: str


FromTemplate = TemplateReady | TemplateRefused | Forked | ForkRefused
_answers: msgspec.json.Decoder[FromTemplate] = msgspec.json.Decoder(FromTemplate)


class Packet(NamedTuple):
    """A received packet and its descriptors, which the receiver owns. No data: the peer is gone."""

    data: bytes
    fds: list[int]


def send(sock: socket.socket, message: TemplateMessage, fds: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError where the peer is gone or does not read."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([msgspec.json.encode(message)], rights)


def receive(sock: socket.socket) -> Packet:
    """Return the next packet. Raises OSError, of which TimeoutError is a kind."""
    space = socket.CMSG_SPACE(len(FORK_DESCRIPTORS) * 4)
    data, ancillary, _, _ = sock.recvmsg(PACKET_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, raw in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array.array("i", raw[: len(raw) // 4 * 4])
    return Packet(data, fds)


def parse(data: bytes, of: type[M]) -> M:
    """Return the message of a packet, of this type. Raises WireError."""
    return _decoded(data, msgspec.json.Decoder(of))


def parse_answer(data: bytes) -> FromTemplate:
    """Return the template's message in a packet. Raises WireError."""
    return _decoded(data, _answers)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[M]) -> M:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WireError(f"a packet of the template process cannot be read: {error}") from error


def environment_file(environment: dict[str, str]) -> int:
    """Return the descriptor of a memory file with the environment, which has no limit of packets.

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
