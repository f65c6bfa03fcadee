"""The gloo device of a process: its listener's address, and its connections.

All inner groups of a process share this device. Each gloo connection therefore has either this
listener as its local address (accepted) or a peer's listener as its remote address (outgoing). This
identifies gloo's sockets exactly and leaves the script's own connections alone.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from outlast.errors import ConfigError
from outlast.transport.channel import end_when_unreachable
from outlast.transport.connection_errors import host_of

_DESCRIPTORS = Path("/proc/self/fd")
_ATTEMPTS = 3
_RELEASE_S = 1.0
SILENCE_S = 5  # without an acknowledgement of another host; then its connections end
_LOOK_S = 0.05
_CONNECTIONS = Path("/proc/self/net/tcp")
_CONNECTING = "02"  # SYN_SENT there
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH)
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
            # Another thread opened a listener at the same time: create a new device and retry.
        raise ConfigError(
            f"gloo's listening socket on {interface or 'loopback'} was not distinguishable from"
            f" others opened at the same time, {_ATTEMPTS} times; open servers after outlast.init()"
        )

    def open(self, store: Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
        """Return a connected gloo backend on this device."""
        # torch's only way to share a device; its stubs do not know it
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [self.gloo]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        return dist.ProcessGroupGloo(store, rank, size, options)

    def abort(self, backend: dist.ProcessGroupGloo) -> None:
        """Do nothing: gloo's abort wakes no operation; `cut` has woken all of them."""

    def end_attempts(self, peers: Collection[str]) -> None:
        """End connections to these listeners that nobody has answered; TCP would wait for minutes.
        gloo tries each a few times."""
        unanswered = _unanswered(peers)
        for connection in _internet_sockets() if unanswered else ():
            if os.fstat(connection.fileno()).st_ino in unanswered:
                with suppress(OSError):  # answered meanwhile, and closed
                    connection.shutdown(socket.SHUT_RDWR)

    def release(self, tickets: Sequence[int]) -> None:
        """Free a group under construction that waits for lost peers: connect in their place, then
        close. `tickets`: gloo's sequence number of each peer's connection. gloo offers no other way
        to end that wait before the group's time-out."""
        host, _, port = self.address.rpartition(":")
        for ticket in tickets:
            try:
                address = (host.strip("[]"), int(port))
                with socket.create_connection(address, timeout=_RELEASE_S) as stranger:
                    stranger.sendall(_TICKET.pack(ticket))
            except OSError:
                continue  # the listener is closing, which ends the wait

    def cut(self, peers: Collection[str]) -> int:
        """Shut down every connection between this device and `peers` ("host:port" of their
        listeners); both ends wake at once. Return the number of connections shut down. Thread-safe.
        """
        count = 0
        for connection, _ in self._connections(peers):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed meanwhile by its owner or its peer
            count += 1
        return count

    def watch(self, peers: Collection[str]) -> None:
        """Let connections to other hosts end after SILENCE_S without an acknowledgement. gloo sets
        no keepalive: it would wait for ever for a host that a cut network hides. Not before the
        first phase: a connection that ends in a script's set-up ends the run."""
        for connection, remote in self._connections(peers):
            if host_of(remote) != host_of(self.address):
                end_when_unreachable(connection, SILENCE_S)

    def unreachable(
        self, peers: Collection[str], within_s: float, is_over: Callable[[], bool]
    ) -> set[str]:
        """Return the `peers` on other hosts that answer no connection within a time; none where
        `is_over` ends the search. A refused connection is an answer."""
        probes = {
            peer: _begin_connection(peer)
            for peer in peers
            if host_of(peer) != host_of(self.address)
        }
        waiting = set(probes)
        until_s = time.monotonic() + within_s
        try:
            while waiting and time.monotonic() < until_s and not is_over():
                ended = select.poll()
                for peer in waiting:
                    ended.register(probes[peer], select.POLLOUT)
                ready = {descriptor for descriptor, _ in ended.poll(_LOOK_S * 1000)}
                for peer in tuple(waiting):
                    if probes[peer].fileno() in ready and _is_answered(probes[peer]):
                        waiting.remove(peer)
                if ready and all(probes[peer].fileno() in ready for peer in waiting):
                    break  # the kernel has given up on all of them
        finally:
            for probe in probes.values():
                probe.close()
        return set() if is_over() else waiting

    def _connections(self, peers: Collection[str]) -> Iterator[tuple[socket.socket, str]]:
        """Yield gloo's connections to these listeners, each with its remote address."""
        for connection in _internet_sockets():
            local, remote = _addresses(connection)
            if remote and (local == self.address or remote in peers):
                yield connection, remote


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
    """Yield a duplicate of every TCP socket of this process, then close it. A duplicate stays valid
    when the process closes and reuses a descriptor."""
    for entry in list(_DESCRIPTORS.iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            continue  # closed after the directory was listed
        with duplicate:
            if duplicate.family in _INTERNET and duplicate.type == socket.SOCK_STREAM:
                yield duplicate


def _listeners() -> Iterator[str]:
    for connection in _internet_sockets():
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield _text(connection.getsockname())


def _addresses(connection: socket.socket) -> tuple[str, str]:
    """Return the local and the remote address; both "" without a connection."""
    try:
        return _text(connection.getsockname()), _text(connection.getpeername())
    except OSError:
        return "", ""


def _begin_connection(peer: str) -> socket.socket:
    host, _, port = peer.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setblocking(False)
    probe.connect_ex((host.strip("[]"), int(port)))
    return probe


def _is_answered(probe: socket.socket) -> bool:
    """Return whether a connection was accepted or refused by its peer's host."""
    return probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _NO_ANSWER


def _unanswered(peers: Collection[str]) -> set[int]:
    """Return the inodes of sockets that try to connect to these listeners (IPv4)."""
    found: set[int] = set()
    with _CONNECTIONS.open() as lines:
        for line in islice(lines, 1, None):
            _, _, remote, state, *rest = line.split()
            if state == _CONNECTING:
                address, _, port = remote.partition(":")
                host = socket.inet_ntoa(struct.pack("=I", int(address, 16)))
                if f"{host}:{int(port, 16)}" in peers:
                    found.add(int(rest[5]))
    return found


def _text(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
