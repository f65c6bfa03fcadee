"""The keeper's process: it takes orders from a trainer and finishes them if the trainer dies."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from outlast.checkpoint.format.manifests import Manifest, digest_of
from outlast.checkpoint.keeper import keeper_frames
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.keeper_frames import (
    HeldVersion,
    KeeperSetup,
    KeeperStream,
    Outcome,
    ReceivedFrame,
)
from outlast.checkpoint.keeper.writer_threads import CommitThread, PartWriter, SaveWork
from outlast.checkpoint.replicas.group_parity import HeldParities
from outlast.checkpoint.replicas.replica_receiver import ReplicaReceiver
from outlast.checkpoint.replicas.replica_sender import ReplicaSender, SentVersion
from outlast.errors import StorageError, WireError

HELLO_S = 10.0  # a connection that has not shown its token by then is closed
GRACE_S = 10.0  # beyond the last deadline: then a write that hangs is left behind
_FINISHING_S = 0.05
_SETUP_BYTES_MAX = 1 << 16
_PRIORITY = 5
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_BEST_EFFORT_LAST = 2 << 13 | 7


class _TrainerLink(msgspec.Struct, eq=False):
    stream: KeeperStream
    said_hello: bool = False
    pidfd: int = -1
    since: float = 0.0


class _KeptVersion(msgspec.Struct, eq=False):
    """The version in an arena.

    `stamp`: the arena's stamp while that version is in it; `full`: the manifest with chunks, once
    its write has succeeded.
    """

    manifest: Manifest
    stamp: int
    full: Manifest | None = None


class KeeperProcess:
    """One loop over sockets; two other threads do the saving, and one a peer the sending.

    With a `listener` it waits for the next trainer after each one, until `control` ends; else it
    ends after the first. Either way all pending orders are finished, or fail, before.
    """

    def __init__(self, listener: socket.socket | None, control_fd: int, setup: KeeperSetup) -> None:
        self._listener = listener
        self._control_fd = control_fd
        self._token = setup.token
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outcomes: deque[tuple[KeeperStream, Outcome, bool]] = deque()
        self._pending_ends: Counter[KeeperStream] = Counter()  # orders whose end has not been told
        self._arenas: dict[int, Arena] = {}
        self._refused: dict[int, str] = {}
        self._versions: dict[int, _KeptVersion] = {}
        self._trainer: _TrainerLink | None = None
        self._leaving: list[KeeperStream] = []
        self._finishing = False
        self._last_due = 0.0
        self._committer = CommitThread()
        self._writer = PartWriter(self._committer)
        self._peers = len(setup.peers)
        self._sender = ReplicaSender(
            setup.peers, setup.token, setup.rank, setup.group, setup.peers_bytes_per_s
        )
        self._parities = HeldParities(setup.rank, setup.group) if setup.group else None
        self._receiver = ReplicaReceiver(setup.token, self._parities)
        self._door = socket.socket(fileno=setup.door_fd) if setup.door_fd >= 0 else None
        self._watch(self._wake_fd, self._woken)
        if self._door:
            self._watch(self._door, self._admit)
        if listener:
            self._watch(listener, self._accept)
            self._watch(control_fd, self._released)

    def run(self, sock: socket.socket | None = None) -> None:
        """Serve until there are no trainers and no pending work any more."""
        if sock:
            self._meet(sock)
        while True:
            # Read before outcomes are sent: all that ended by now is reported below.
            idle = self._writer.idle and self._committer.idle
            self._tell()
            self._see_off()
            if self._finishing and not self._listener and self._writer.idle:
                for number in list(self._arenas):  # no reader is left: only commits are pending
                    self._drop(number)
            late = time.monotonic() > self._last_due + GRACE_S
            if self._finishing and (late or (idle and not self._leaving)):
                return
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            self._expect_hello()

    def _see_off(self) -> None:
        """Close connections without pending outcomes."""
        for stream in [each for each in self._leaving if not each.pending]:
            if stream.broken or not self._pending_ends[stream]:
                self._leaving.remove(stream)
                self._pending_ends.pop(stream, None)
                stream.close()

    def _pause_s(self) -> float | None:
        if self._finishing or self._leaving:
            return _FINISHING_S
        return HELLO_S if self._trainer and not self._trainer.said_hello else None

    # --- connections ------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener
        if self._finishing:
            return  # it ended in the same moment
        with contextlib.suppress(OSError):  # the peer closed already
            sock, _ = self._listener.accept()
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid, _ = struct.unpack("3i", peer)
            if uid in (0, os.getuid()):
                self._meet(sock)
            else:
                sock.close()

    def _admit(self) -> None:
        """Accept another keeper, or a stranger: the receiver authenticates it."""
        assert self._door
        with contextlib.suppress(OSError):  # the peer closed already
            self._receiver.meet(self._door.accept()[0])

    def _meet(self, sock: socket.socket) -> None:
        """Serve one trainer at a time: the next waits in the listener's queue."""
        stream = KeeperStream(sock)
        self._trainer = _TrainerLink(stream, since=time.monotonic())
        self._watch(sock, self._read_trainer)
        if self._listener:
            self._selector.unregister(self._listener)

    def _expect_hello(self) -> None:
        trainer = self._trainer
        if trainer and not trainer.said_hello and time.monotonic() > trainer.since + HELLO_S:
            self._detach_trainer()

    def _died(self) -> None:
        """Read the last frames of a dead trainer, whose forks may hold the socket open."""
        self._read_trainer()
        self._detach_trainer()

    def _detach_trainer(self) -> None:
        """Stop reading from the trainer; it may still receive outcomes of its saves."""
        trainer, self._trainer = self._trainer, None
        if not trainer:
            return
        self._selector.unregister(trainer.stream.sock)
        if trainer.pidfd >= 0:
            self._selector.unregister(trainer.pidfd)
            os.close(trainer.pidfd)
        self._leaving.append(trainer.stream)
        for number in self._arenas.keys() - self._versions.keys():
            self._drop(number)  # it holds no version, and the next trainer has its own
        if self._listener and not self._finishing:
            self._watch(self._listener, self._accept)
        else:
            self._finish()

    def _released(self) -> None:
        """Finish after the launcher closed its end, or died: no trainer will come any more."""
        with contextlib.suppress(OSError):
            if os.read(self._control_fd, 1):
                return
        self._selector.unregister(self._control_fd)
        if self._listener and not self._trainer:
            self._selector.unregister(self._listener)
        self._finish()

    def _finish(self) -> None:
        self._finishing = True
        self._committer.hurry()
        self._sender.stop()

    # --- frames -----------------------------------------------------------------------------

    def _read_trainer(self) -> None:
        trainer = self._trainer
        if not trainer:
            return
        trainer.stream.flush()
        try:
            frames = trainer.stream.receive()
            for one in frames or ():
                self._take(trainer, one)
        except WireError as error:
            sys.stderr.write(f"a trainer is not understood, and cut off: {error}\n")
            frames = None
        if frames is None:
            self._detach_trainer()

    def _take(self, trainer: _TrainerLink, received: ReceivedFrame) -> None:
        frame, fds = received
        if isinstance(frame, keeper_frames.Hello):
            if (
                frame.token != self._token
                or frame.version != keeper_frames.VERSION
                or len(fds) != 1
            ):
                raise WireError(f"a wrong token, or version {frame.version}")
            trainer.said_hello, trainer.pidfd = True, fds[0]
            self._watch(trainer.pidfd, self._died)
            trainer.stream.send(
                keeper_frames.Welcome(pid=os.getpid(), peers=self._peers, older=self._older())
            )
        elif not trainer.said_hello:
            raise WireError("something was said before Hello")
        elif isinstance(frame, keeper_frames.Lend):
            self._drop(frame.arena)
            try:
                self._arenas[frame.arena] = Arena.attach(fds[0], frame.size_bytes)
            except StorageError as error:
                self._refused[frame.arena] = str(error)
        elif isinstance(frame, keeper_frames.Drop):
            self._drop(frame.arena)
        elif isinstance(frame, keeper_frames.Write):
            self._write(trainer.stream, frame)
        elif isinstance(frame, keeper_frames.Ask):
            self._say_held(trainer.stream)

    def _older(self) -> list[keeper_frames.OlderVersion]:
        places = {number: version.manifest.place for number, version in self._versions.items()}
        return [
            keeper_frames.OlderVersion(number, arena.size_bytes, places.get(number))
            for number, arena in sorted(self._arenas.items())
        ]

    def _drop(self, arena: int) -> None:
        self._versions.pop(arena, None)
        self._refused.pop(arena, None)
        if known := self._arenas.pop(arena, None):
            known.close()  # a write in progress continues: its view keeps the memory

    def _write(self, stream: KeeperStream, frame: keeper_frames.Write) -> None:
        order = frame.order
        manifest = order.manifest
        shard = memoryview(b"")
        kept = _KeptVersion(manifest, frame.stamp)

        def tell(outcome: Outcome) -> None:
            ended = outcome.kind in ("committed", "failed")
            ended |= outcome.kind == "written" and not order.commit
            self._outcomes.append((stream, outcome, ended))
            os.eventfd_write(self._wake_fd, 1)

        def on_digested(full: Manifest) -> None:
            kept.full = full

        if not frame.written:
            memory = self._arenas.get(order.arena)
            if not memory or manifest.size_bytes > memory.size_bytes:
                why = self._refused.get(order.arena, f"arena {order.arena} is not here, or small")
                place = manifest.place
                stream.send(Outcome(save=order.save, place=place, kind="failed", error=why))
                if self._peers:
                    stream.send(Outcome(save=order.save, place=place, kind="copied"))
                return
            self._versions[order.arena] = kept
            shard = memory.view[: manifest.size_bytes]
            if self._peers:
                self._sender.add(SentVersion(order, memory, frame.stamp, tell, on_digested))
            if not order.to_disk:
                stream.send(Outcome(save=order.save, place=manifest.place, kind="held"))
                return
        due = time.monotonic() + frame.deadline_s
        self._last_due = max(self._last_due, due)
        self._pending_ends[stream] += 1
        self._writer.add(
            SaveWork(order, shard, frame.attempt, frame.written, due, tell, on_digested)
        )

    def _say_held(self, stream: KeeperStream) -> None:
        versions: list[HeldVersion] = []
        for number, version in self._versions.items():
            arena = self._arenas[number]
            if arena.stamp == version.stamp and not version.full:
                version.full = _digested(version.manifest, arena)
            if arena.stamp == version.stamp and version.full:  # else a copy over it has begun
                versions.append(HeldVersion(manifest=version.full, arena=number))
        parities: list[keeper_frames.VersionParity] = []
        with contextlib.ExitStack() as looking:
            looking.enter_context(self._receiver.change)
            copies = self._receiver.copies
            arenas = self._arenas | {copy.number: copy.arena for copy in copies}
            versions += [
                HeldVersion(manifest=c.manifest, arena=c.number) for c in copies if c.manifest
            ]
            if self._parities:
                looking.enter_context(self._parities.change)
                for parity, arena in self._parities.complete:
                    parities.append(parity)
                    arenas[parity.arena] = arena
            sizes = [(number, arena.size_bytes) for number, arena in arenas.items()]
            fds = [arena.fd for arena in arenas.values()]
            stream.send(keeper_frames.Lying(held=versions, parities=parities, arenas=sizes), fds)

    def _tell(self) -> None:
        while self._outcomes:
            stream, outcome, ended = self._outcomes.popleft()
            self._pending_ends[stream] -= ended
            if not stream.broken:
                stream.send(outcome)
        trainer = self._trainer
        for stream in [*self._leaving, *([trainer.stream] if trainer else [])]:
            stream.flush()
        if trainer:
            events = selectors.EVENT_WRITE if trainer.stream.pending else 0
            self._selector.modify(
                trainer.stream.sock, selectors.EVENT_READ | events, self._read_trainer
            )

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _watch(self, what: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, call)


def _digested(manifest: Manifest, arena: Arena) -> Manifest:
    shard = arena.view[: manifest.size_bytes]
    chunks = tuple(
        digest_of(shard[at : at + manifest.chunk_bytes])
        for at in range(0, manifest.size_bytes, manifest.chunk_bytes)
    )
    return msgspec.structs.replace(manifest, chunks=chunks)


def main(arguments: list[str]) -> int:
    """Run a keeper; return its exit code.

    `--socket FD NAME`: serve the trainer at the other end, then end. `--listen ADDRESS NAME`: serve
    one trainer after the other; the first line of the standard input is the KeeperSetup, and its
    end ends the keeper. An address that begins with @ is in the abstract namespace.
    """
    step_back()
    how, where, _ = arguments
    if how == "--socket":
        sock = socket.socket(fileno=int(where))
        KeeperProcess(None, -1, KeeperSetup(token="")).run(sock)
        return 0
    line = b""
    while not line.endswith(b"\n") and len(line) < _SETUP_BYTES_MAX:
        if not (byte := os.read(0, 1)):
            return 0  # the launcher died already
        line += byte
    setup = msgspec.json.decode(line, type=KeeperSetup)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{where[1:]}" if where.startswith("@") else where)
    listener.listen(8)
    listener.setblocking(False)
    KeeperProcess(listener, 0, setup).run()
    return 0


def step_back() -> None:
    """Lower the priority of processor and disk; ignore the terminal's signals."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # They are meant for the trainer; the keeper ends after it, with all saves finished.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _PRIORITY)
    if number := _IOPRIO_SET.get(os.uname().machine):
        ctypes.CDLL(None).syscall(number, 1, 0, _IO_BEST_EFFORT_LAST)
