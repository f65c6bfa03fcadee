"""The keeper's process, which executes a trainer's orders even if the trainer dies."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from outlast.checkpoint.format.manifests import Manifest
from outlast.checkpoint.keeper import keeper_frames
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.copy_readers import CopyReaders, accept_own, open_listener
from outlast.checkpoint.keeper.keeper_frames import (
    KeeperSetup,
    KeeperStream,
    Outcome,
    ReceivedFrame,
)
from outlast.checkpoint.keeper.memory_listing import KeptVersion, MemoryListing
from outlast.checkpoint.keeper.writer_threads import CommitThread, PartWriter, SaveWork
from outlast.checkpoint.replicas.group_parity import HeldParities
from outlast.checkpoint.replicas.replica_receiver import ReplicaReceiver
from outlast.checkpoint.replicas.replica_sender import ReplicaSender, SentVersion
from outlast.errors import StorageError, WireError

HELLO_S = 10.0  # a connection without a valid Hello after this time is closed
GRACE_S = 10.0  # after the last deadline the process ends, even if a write hangs
_FINISHING_S = 0.05
_SETUP_BYTES_MAX = 1 << 16
_PRIORITY = 5
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_BEST_EFFORT_LAST = 2 << 13 | 7


class _TrainerLink(msgspec.Struct, eq=False):
    stream: KeeperStream
    is_authenticated: bool = False
    pidfd: int = -1
    since: float = 0.0


class KeeperProcess:
    """The keeper's main loop, over sockets.

    Two other threads write and commit saves, and one thread a peer sends copies. With a `listener`
    it serves one trainer after the other, until `control_fd` reaches its end; else it ends after
    the first. Before it ends, all pending orders have succeeded or failed.
    """

    def __init__(self, listener: socket.socket | None, control_fd: int, setup: KeeperSetup) -> None:
        self._listener = listener
        self._control_fd = control_fd
        self._token = setup.token
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outcomes: deque[tuple[KeeperStream, Outcome, bool]] = deque()
        self._pending_ends: Counter[KeeperStream] = Counter()  # orders without a final outcome yet
        self._arenas: dict[int, Arena] = {}
        self._attach_errors: dict[int, str] = {}
        self._versions: dict[int, KeptVersion] = {}
        self._trainer: _TrainerLink | None = None
        self._detached: list[KeeperStream] = []
        self._finishing = False
        self._last_due = 0.0
        self._committer = CommitThread()
        self._writer = PartWriter(self._committer)
        self._peers, self._rank = len(setup.peers), setup.rank
        self._sender = ReplicaSender(
            setup.peers, setup.token, setup.rank, setup.group, setup.peers_bytes_per_s
        )
        self._parities = HeldParities(setup.rank, setup.group) if setup.group else None
        self._listing = MemoryListing(self._arenas, self._versions, self._parities, self._wake_fd)
        self._receiver = ReplicaReceiver(setup.token, self._parities, self._listing.ask)
        self._listing.receiver = self._receiver
        self._peer_listener = socket.socket(fileno=setup.door_fd) if setup.door_fd >= 0 else None
        self._watch(self._wake_fd, self._clear_wake_up)
        if self._peer_listener:
            self._watch(self._peer_listener, self._accept_keeper)
        if listener:
            self._watch(listener, self._accept_trainer)
            self._watch(control_fd, self._on_control_closed)
            CopyReaders(listener, self._token, self._selector, self._welcome, self._send_contents)

    def run(self, sock: socket.socket | None = None) -> None:
        """Serve until there are no trainers and no pending work any more."""
        if sock:
            self._serve_trainer(sock)
        while True:
            # Read before outcomes are sent, so that every outcome before `idle` is reported below.
            idle = self._writer.idle and self._committer.idle
            self._send_outcomes()
            self._close_detached()
            if self._finishing and not self._listener and self._writer.idle:
                for number in list(self._arenas):  # no reader is left: only commits are pending
                    self._drop(number)
            late = time.monotonic() > self._last_due + GRACE_S
            if self._finishing and (late or (idle and not self._detached)):
                return
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            self._check_hello_deadline()

    def _close_detached(self) -> None:
        """Close connections without pending outcomes."""
        for stream in [each for each in self._detached if not each.pending]:
            if stream.broken or not self._pending_ends[stream]:
                self._detached.remove(stream)
                self._pending_ends.pop(stream, None)
                stream.close()

    def _pause_s(self) -> float | None:
        if self._finishing or self._detached:
            return _FINISHING_S
        return HELLO_S if self._trainer and not self._trainer.is_authenticated else None

    # --- connections ------------------------------------------------------------------------

    def _accept_trainer(self) -> None:
        assert self._listener
        if self._finishing:
            return  # `control_fd` was closed in the same round
        if sock := accept_own(self._listener):
            self._serve_trainer(sock)

    def _accept_keeper(self) -> None:
        """Accept a connection to the peers' listener; the receiver authenticates it."""
        assert self._peer_listener
        with contextlib.suppress(OSError):  # the peer closed already
            self._receiver.accept(self._peer_listener.accept()[0])

    def _serve_trainer(self, sock: socket.socket) -> None:
        """Attach a trainer. The next one waits in the listener's queue until it is detached."""
        stream = KeeperStream(sock)
        self._trainer = _TrainerLink(stream, since=time.monotonic())
        self._watch(sock, self._read_trainer)
        if self._listener:
            self._selector.unregister(self._listener)

    def _check_hello_deadline(self) -> None:
        trainer = self._trainer
        if trainer and not trainer.is_authenticated and time.monotonic() > trainer.since + HELLO_S:
            self._detach_trainer()

    def _on_trainer_died(self) -> None:
        """Read the remaining frames of a dead trainer. Its forks may hold the socket open."""
        self._read_trainer()
        self._detach_trainer()

    def _detach_trainer(self) -> None:
        """Stop reading from the trainer; outcomes of its saves are still sent."""
        trainer, self._trainer = self._trainer, None
        if not trainer:
            return
        self._selector.unregister(trainer.stream.sock)
        if trainer.pidfd >= 0:
            self._selector.unregister(trainer.pidfd)
            os.close(trainer.pidfd)
        self._detached.append(trainer.stream)
        for number in self._arenas.keys() - self._versions.keys():
            self._drop(number)  # without a version; the next trainer lends its own arenas
        if self._listener and not self._finishing:
            self._watch(self._listener, self._accept_trainer)
        else:
            self._finish()

    def _on_control_closed(self) -> None:
        """Finish after the launcher closed its end, or died: no other trainer can connect."""
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
            for frame in frames or ():
                self._handle_frame(trainer, frame)
        except WireError as error:
            sys.stderr.write(f"invalid frame of a trainer, whose connection is closed: {error}\n")
            frames = None
        if frames is None:
            self._detach_trainer()

    def _handle_frame(self, trainer: _TrainerLink, received: ReceivedFrame) -> None:
        frame, fds = received
        if isinstance(frame, keeper_frames.Hello):
            expected = (self._token, keeper_frames.VERSION, 1)
            if (frame.token, frame.version, len(fds)) != expected:
                raise WireError(f"wrong token, or unsupported version {frame.version}")
            trainer.is_authenticated = True
            trainer.pidfd = fds[0]
            self._watch(trainer.pidfd, self._on_trainer_died)
            trainer.stream.send(self._welcome())
        elif not trainer.is_authenticated:
            raise WireError(f"{type(frame).__name__} before Hello")
        elif isinstance(frame, keeper_frames.Lend):
            self._drop(frame.arena)
            try:
                self._arenas[frame.arena] = Arena.attach(fds[0], frame.size_bytes)
            except StorageError as error:
                self._attach_errors[frame.arena] = str(error)
        elif isinstance(frame, keeper_frames.Drop):
            self._drop(frame.arena)
        elif isinstance(frame, keeper_frames.Write):
            self._write(trainer.stream, frame)
        elif isinstance(frame, keeper_frames.ContentsRequest):
            self._send_contents(trainer.stream)

    def _welcome(self) -> keeper_frames.Welcome:
        older = self._older_versions()
        return keeper_frames.Welcome(pid=os.getpid(), peers=self._peers, older=older)

    def _older_versions(self) -> list[keeper_frames.OlderVersion]:
        places = {number: version.manifest.place for number, version in self._versions.items()}
        return [
            keeper_frames.OlderVersion(number, arena.size_bytes, places.get(number))
            for number, arena in sorted(self._arenas.items())
        ]

    def _drop(self, arena: int) -> None:
        self._versions.pop(arena, None)
        self._attach_errors.pop(arena, None)
        if known := self._arenas.pop(arena, None):
            known.close()  # the view of a write in progress keeps the memory mapped

    def _write(self, stream: KeeperStream, frame: keeper_frames.Write) -> None:
        order = frame.order
        manifest = order.manifest
        shard = memoryview(b"")
        kept = KeptVersion(manifest, frame.stamp)

        def report(outcome: Outcome) -> None:
            ended = outcome.kind in ("committed", "failed")
            ended |= outcome.kind == "written" and not order.commit
            self._outcomes.append((stream, outcome, ended))
            os.eventfd_write(self._wake_fd, 1)

        def on_digested(full: Manifest) -> None:
            kept.full = full

        if not frame.written:
            memory = self._arenas.get(order.arena)
            if not memory or manifest.size_bytes > memory.size_bytes:
                why = self._attach_errors.get(
                    order.arena, f"arena {order.arena} is missing or too small"
                )
                place = manifest.place
                stream.send(Outcome(save=order.save, place=place, kind="failed", error=why))
                if self._peers:
                    stream.send(Outcome(save=order.save, place=place, kind="copied"))
                return
            self._versions[order.arena] = kept
            shard = memory.view[: manifest.size_bytes]
            if self._peers and self._parities and manifest.rank != self._rank:
                why = f"rank {manifest.rank} is absent, so that its part has no parity"
                place = manifest.place
                stream.send(Outcome(save=order.save, place=place, kind="copied", error=why))
            elif self._peers:
                self._sender.add(SentVersion(order, memory, frame.stamp, report, on_digested))
            if not order.to_disk:
                stream.send(Outcome(save=order.save, place=manifest.place, kind="held"))
                return
        due = time.monotonic() + frame.deadline_s
        self._last_due = max(self._last_due, due)
        self._pending_ends[stream] += 1
        self._writer.add(
            SaveWork(order, shard, frame.attempt, frame.written, due, report, on_digested)
        )

    def _send_contents(self, stream: KeeperStream) -> None:
        with self._listing.entries() as (versions, parities, arenas):
            sizes = [(number, arena.size_bytes) for number, arena in arenas.items()]
            stream.send(
                keeper_frames.KeeperContents(versions=versions, parities=parities, arenas=sizes),
                [arena.fd for arena in arenas.values()],
            )

    def _send_outcomes(self) -> None:
        while self._outcomes:
            stream, outcome, ended = self._outcomes.popleft()
            self._pending_ends[stream] -= ended
            if not stream.broken:
                stream.send(outcome)
        trainer = self._trainer
        for stream in [*self._detached, *([trainer.stream] if trainer else [])]:
            stream.flush()
        if trainer:
            events = selectors.EVENT_READ
            events |= selectors.EVENT_WRITE if trainer.stream.pending else 0
            self._selector.modify(trainer.stream.sock, events, self._read_trainer)

    def _clear_wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._listing.answer()

    def _watch(self, what: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, call)


def main(arguments: list[str]) -> int:
    """Run a keeper; return its exit code.

    `--socket FD NAME`: serve the trainer at the other end, then end. `--listen ADDRESS NAME` or
    `--listener FD NAME`: serve one trainer after the other; the first line of the standard input is
    the KeeperSetup, and its end ends the keeper.
    """
    lower_priority()
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
    listener = open_listener(where) if how == "--listen" else socket.socket(fileno=int(where))
    listener.setblocking(False)
    KeeperProcess(listener, 0, setup).run()
    return 0


def lower_priority() -> None:
    """Lower the priority of processor and disk; ignore the terminal's signals."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # These are for the trainer; the keeper ends after it, once its saves have ended.
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _PRIORITY)
    if number := _IOPRIO_SET.get(os.uname().machine):
        ctypes.CDLL(None).syscall(number, 1, 0, _IO_BEST_EFFORT_LAST)
