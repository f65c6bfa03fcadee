"""Start of a keeper as a child, or connection to the launcher's by its address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from outlast.checkpoint.keeper.keeper_frames import Hello, KeeperSetup, KeeperStream, PeerKeeper
from outlast.errors import StorageError

_PROGRAM = Path(__file__).with_name("__main__.py")
_WORDS_BYTES_MAX = 2000
_PAUSE_S = 0.02
_BACKLOG = 64


class ChildProcess:
    """A keeper's process, or another `program`, in a session of its own.

    Signals to the trainer's group do not reach it. Its stderr goes to memory: it must keep none of
    the trainer's files open, or a reader of the trainer's output would wait for the keeper. Raises
    StorageError.
    """

    def __init__(
        self,
        arguments: list[str],
        name: str,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        pass_fds: tuple[int, ...] = (),
        program: Path = _PROGRAM,
    ) -> None:
        self._words_fd = os.memfd_create("outlast-keeper-words", os.MFD_CLOEXEC)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(program), *arguments, name],
                stdin=stdin,
                stdout=stdout,
                stderr=self._words_fd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._words_fd)
            raise StorageError(
                f"the {program.parent.name} of {name} cannot be started ({error.strerror}); nothing"
                " was saved"
            ) from error
        self.pid = self._popen.pid

    def kill(self) -> None:
        """Kill the process."""
        self._popen.kill()

    def reap(self, timeout_s: float) -> str | None:
        """Return the exit in words; None when the process still runs after `timeout_s`."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        size_bytes = os.fstat(self._words_fd).st_size
        words = os.pread(
            self._words_fd, _WORDS_BYTES_MAX, max(0, size_bytes - _WORDS_BYTES_MAX)
        ).decode(errors="replace")
        return f"{how}: {words.strip()}" if words.strip() else how

    def close(self) -> None:
        """Release its stderr, after `reap`."""
        os.close(self._words_fd)


class TrainerEnd:
    """The trainer's end of a connection, and the keeper's process where that is its child."""

    def __init__(self, sock: socket.socket, process: ChildProcess | None, hello: Hello) -> None:
        self.stream = KeeperStream(sock)
        self.process = process
        pidfd = os.pidfd_open(os.getpid())
        try:
            self.stream.send(hello, [pidfd])
        finally:
            os.close(pidfd)

    def lost(self, timeout_s: float) -> str | None:
        """Return why the other end ended, in words, once it cannot read arenas any more.

        None when a child process has not died after `timeout_s`.
        """
        self.stream.close()
        if not self.process:
            return "closed the connection"
        self.process.kill()
        how = self.process.reap(timeout_s)
        if how is not None:
            self.process.close()
        return how


def start_keeper(name: str, pass_fds: tuple[int, ...] = ()) -> TrainerEnd:
    """Start a keeper of this process's own, which keeps `pass_fds` open.

    Raises StorageError when that fails.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with theirs:
            arguments = ["--socket", str(theirs.fileno())]
            process = ChildProcess(arguments, name, pass_fds=(theirs.fileno(), *pass_fds))
    except StorageError:
        ours.close()
        raise
    return TrainerEnd(ours, process, Hello(name=name))


def reach_keeper(address: str, token: str, name: str, timeout_s: float) -> TrainerEnd:
    """Connect to the launcher's keeper. Raises StorageError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    where = f"\0{address[1:]}" if address.startswith("@") else address
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            sock.connect(where)
            return TrainerEnd(sock, None, Hello(name=name, token=token))
        except OSError as error:
            sock.close()
            if time.monotonic() + _PAUSE_S > deadline:
                raise StorageError(
                    f"the keeper of {name} at {address} cannot be reached within {timeout_s:g} s"
                    f" ({error.strerror or error}); nothing was saved"
                ) from error
            time.sleep(_PAUSE_S)  # the launcher may be starting it: there is nothing to wait on


def open_door(host: str = "127.0.0.1") -> socket.socket:
    """Open a listening socket for other keepers; successive keepers can use it.

    Raises StorageError.
    """
    try:
        door = socket.create_server((host, 0), backlog=_BACKLOG)
    except OSError as error:
        raise StorageError(
            f"no port on {host} for copies in memory ({error.strerror}); none are made"
        ) from error
    door.setblocking(False)
    return door


def address_of(door: socket.socket) -> str:
    """Return HOST:PORT of a listening socket."""
    host, port = door.getsockname()[:2]
    return f"{host}:{port}"


class ServedKeeper:
    """The launcher's handle on a keeper that outlives trainers, and ends with the launcher."""

    def __init__(
        self,
        address: str,
        token: str,
        name: str,
        pass_fds: tuple[int, ...] = (),
        *,
        door: socket.socket | None = None,
        peers: tuple[PeerKeeper, ...] = (),
        peers_bytes_per_s: int | None = None,
        rank: int = 0,
        group: tuple[int, ...] = (),
    ) -> None:
        """Start the keeper.

        Trainers connect with `KeeperClient.connect`, other keepers through the `door`; this one
        sends to `peers`, to all together at most at the given rate, and strips where they are the
        others of its rank's `group`. Raises StorageError.
        """
        door_fd = door.fileno() if door else -1
        setup = KeeperSetup(
            token=token,
            door_fd=door_fd,
            peers=peers,
            peers_bytes_per_s=peers_bytes_per_s,
            rank=rank,
            group=group,
        )
        pass_fds = (*pass_fds, door_fd) if door else pass_fds
        reading, self._control_fd = os.pipe2(os.O_CLOEXEC)
        try:
            self.process = ChildProcess(
                ["--listen", address], name, stdin=reading, pass_fds=pass_fds
            )
        except StorageError:
            os.close(self._control_fd)
            raise
        finally:
            os.close(reading)
        os.write(self._control_fd, msgspec.json.encode(setup) + b"\n")

    def close(self, timeout_s: float) -> str:
        """Let it finish pending orders; return its exit in words. Kills it after `timeout_s`."""
        os.close(self._control_fd)
        how = self.process.reap(timeout_s)
        if how is None:
            self.process.kill()
            how = f"did not end within {timeout_s:g} s and {self.process.reap(timeout_s)}"
        self.process.close()
        return how
