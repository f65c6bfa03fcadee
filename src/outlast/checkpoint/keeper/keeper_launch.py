"""Start of a keeper as a child process, or connection to the launcher's keeper."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from outlast.checkpoint.keeper.keeper_frames import Hello, KeeperSetup, KeeperStream
from outlast.errors import StorageError

_PROGRAM = Path(__file__).with_name("__main__.py")
_STDERR_BYTES_MAX = 2000
_PAUSE_S = 0.02
_BACKLOG = 64


class ChildProcess:
    """A keeper's process, or another `program`, in a session of its own.

    Signals to the trainer's process group do not reach it. Its stderr is a memory file: with the
    trainer's own, a reader of the trainer's output would wait for the keeper, too. Raises
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
        self._stderr_fd = os.memfd_create("outlast-keeper-words", os.MFD_CLOEXEC)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(program), *arguments, name],
                stdin=stdin,
                stdout=stdout,
                stderr=self._stderr_fd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._stderr_fd)
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
        size_bytes = os.fstat(self._stderr_fd).st_size
        words = os.pread(
            self._stderr_fd, _STDERR_BYTES_MAX, max(0, size_bytes - _STDERR_BYTES_MAX)
        ).decode(errors="replace")
        return f"{how}: {words.strip()}" if words.strip() else how

    def close(self) -> None:
        """Release its stderr, after `reap`."""
        os.close(self._stderr_fd)


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

    def close_and_reap(self, timeout_s: float) -> str | None:
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
            time.sleep(_PAUSE_S)  # the launcher may be starting it


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
    """The launcher's handle on a keeper that outlives its trainers and ends with the launcher."""

    def __init__(
        self,
        address: str,
        name: str,
        setup: KeeperSetup,
        pass_fds: tuple[int, ...] = (),
        door: socket.socket | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Start the keeper.

        Trainers connect with `KeeperClient.connect`, other keepers through the `door`. The keeper
        accepts trainers from the `listener`, or binds one to the address. Raises StorageError.
        """
        if door:
            setup = msgspec.structs.replace(setup, door_fd=door.fileno())
            pass_fds = (*pass_fds, door.fileno())
        arguments = ["--listen", address]
        if listener:
            arguments = ["--listener", str(listener.fileno())]
            pass_fds = (*pass_fds, listener.fileno())
        reading, self._control_fd = os.pipe2(os.O_CLOEXEC)
        try:
            self.process = ChildProcess(arguments, name, stdin=reading, pass_fds=pass_fds)
        except StorageError:
            os.close(self._control_fd)
            raise
        finally:
            os.close(reading)
        os.write(self._control_fd, msgspec.json.encode(setup) + b"\n")

    def close(self, timeout_s: float) -> str:
        """Wait for pending orders; return a description of its exit. Kills it after `timeout_s`."""
        os.close(self._control_fd)
        how = self.process.reap(timeout_s)
        if how is None:
            self.process.kill()
            how = f"did not end within {timeout_s:g} s and {self.process.reap(timeout_s)}"
        self.process.close()
        return how
