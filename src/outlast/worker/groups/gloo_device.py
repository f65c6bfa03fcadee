"""The gloo device of a process: its listener's address, and its connections.

All inner groups of a process share this device, so each gloo connection either has our listener
as its local address (accepted) or a peer's listener as its remote address (outgoing). That finds
the sockets exactly, at any time, and leaves the script's own connections alone.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from outlast.errors import ConfigError

_DESCRIPTORS = Path("/proc/self/fd")
_ATTEMPTS = 3
_RELEASE_S = 1.0
_TICKET = struct.Struct("=q")
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class GlooDevice:
    """A gloo device without lazy connections: the `DeviceDriver` of CPU tensors. `address` is its
    listener's "host:port"."""

    name = "gloo"
    device = torch.device("cpu")
    kind = dist.ProcessGroup.BackendType.GLOO

    def __init__(self, interface: str | None) -> None:
        """`interface`: a network interface's name; "" means loopback, None torch's choice.
        Raises ConfigError when gloo cannot listen there."""
        for _ in range(_ATTEMPTS):
            before = set(_listeners())
            self.gloo = _create(interface)
            fresh = set(_listeners()) - before
            if len(fresh) == 1:
                self.address = fresh.pop()
                return
            # Another thread opened a listener in the same moment: make a new device, look again.
        raise ConfigError(
            f"gloo's listening socket on {interface or 'loopback'} could not be told from others"
            f" that opened in the same moment, {_ATTEMPTS} times; open servers after outlast.init()"
        )

    def open(self, store: Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
        """Return a connected gloo backend on this device."""
        # torch's only way to share a device; its stubs do not know it
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [self.gloo]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        return dist.ProcessGroupGloo(store, rank, size, options)

    def abort(self, backend: dist.ProcessGroupGloo) -> None:
        """Do nothing: gloo's abort wakes nobody, and `cut` has woken all."""

    def release(self, tickets: Sequence[int]) -> None:
        """Free a building group that waits for peers which will never connect: take their place,
        one connection for each ticket (gloo's sequence number of that peer's connection), and hang
        up. gloo has no other way to leave that wait before the group's time-out."""
        host, _, port = self.address.rpartition(":")
        for ticket in tickets:
            try:
                address = (host.strip("[]"), int(port))
                with socket.create_connection(address, timeout=_RELEASE_S) as stranger:
                    stranger.sendall(_TICKET.pack(ticket))
            except OSError:
                continue  # the listener is going away, and the wait with it

    def cut(self, peers: Collection[str]) -> int:
        """Shut down every connection between this device and `peers` ("host:port" of their
        listeners); both ends wake at once. Answers how many were cut. Any thread."""
        count = 0
        for connection in _internet_sockets():
            local, remote = _addresses(connection)
            if remote and (local == self.address or remote in peers):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # closed by its owner or its peer since: as cut as can be
                count += 1
        return count


def _create(interface: str | None) -> dist.ProcessGroupGloo.Device:
    try:
        if interface is None:
            return dist.ProcessGroupGloo.create_default_device(lazy_init=False)
        if interface:
            return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)
    except RuntimeError as error:
        raise ConfigError(
            f"gloo cannot listen on interface {interface or 'lo'!r}: {error}; nothing was started;"
            " set GLOO_SOCKET_IFNAME to an interface of this host (see `ip address`)"
        ) from error


def _internet_sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket of this process, closed again after its turn. Working on
    duplicates makes it harmless when a number is closed and reused meanwhile."""
    for entry in list(_DESCRIPTORS.iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # closed between listing and looking
        with duplicate:
            if duplicate.family in _INTERNET and duplicate.type == socket.SOCK_STREAM:
                yield duplicate


def _listeners() -> Iterator[str]:
    for found in _internet_sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield _text(found.getsockname())


def _addresses(connection: socket.socket) -> tuple[str, str]:
    """(local, remote), the remote one "" while nothing is connected."""
    try:
        return _text(connection.getsockname()), _text(connection.getpeername())
    except OSError:
        return "", ""


def _text(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
