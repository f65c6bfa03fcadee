"""Relay between forked ranks, each with its own stable groups, over socket pairs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed as dist

from outlast.transport import messages
from outlast.transport.rendezvous_messages import MeetingRelay
from outlast.worker.groups import GroupRegistry, register
from outlast.worker.groups.rendezvous import Mailbox

DEADLINE_S = 120.0
PUBLISHED: Any = messages.Put | messages.Meet
ANSWERS: Any = messages.RendezvousValue | messages.Met


class Line:
    """Messages of msgpack over a stream socket; safe to write from any thread."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._lock = threading.Lock()

    def write(self, *message: Any) -> None:
        data = msgspec.msgpack.encode(message)
        with self._lock, contextlib.suppress(OSError):
            self.stream.sendall(struct.pack(">I", len(data)) + data)

    def read(self) -> list[Any] | None:
        head = self._exactly(4)
        body = head and self._exactly(struct.unpack(">I", head)[0])
        return msgspec.msgpack.decode(body) if body else None

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                part = self.stream.recv(count - len(data))
            except OSError:
                return None
            if not part:
                return None
            data += part
        return data


class Member:
    """A rank's groups and its connection to the relay."""

    def __init__(self, line: Line, rank: int, world: int, timeout_s: float = DEADLINE_S) -> None:
        torch.set_num_threads(1)
        self.line, self.rank, self.world = line, rank, world
        self.severing = (
            threading.Lock()
        )  # a rank that a sever wakes must not exit before it is said
        self.troubles: list[BaseException] = []
        self.collectives: list[str] = []
        self.on_collective: Callable[[str], None] = self.collectives.append
        self._connecting: queue.Queue[int] = queue.Queue()
        self.told: queue.Queue[Any] = queue.Queue()
        self.groups = GroupRegistry(
            mailbox=Mailbox(lambda body: line.write("put", msgspec.to_builtins(body))),
            on_trouble=self.troubles.append,
            on_collective=lambda op: self.on_collective(op),
            timeout_s=timeout_s,
            copy_s=timeout_s,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while (message := self.line.read()) is not None:
            match message:
                case ["got", value]:
                    self.groups.deliver(msgspec.convert(value, ANSWERS))
                case ["connect", generation]:
                    self._connecting.put(generation)
                case ["sever", generation]:
                    with self.severing:
                        self.groups.sever(generation)
                        self.line.write("severed", generation)
                case ["tell", value]:
                    self.told.put(value)

    def await_others(self) -> None:
        """Wait until all ranks are here; no group takes part."""
        self.line.write("ready", 0)
        assert self._connecting.get(timeout=DEADLINE_S) == 0

    def say(self, word: str) -> None:
        self.line.write("say", word)

    def connect(
        self,
        generation: int = 1,
        timeout_s: float = 30.0,
        copies: Sequence[tuple[int, int]] = (),
        absent: Sequence[int] = (),
        units: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.line.write("ready", generation)
        assert self._connecting.get(timeout=DEADLINE_S) == generation
        if self.rank not in absent:
            self.groups.connect(generation, timeout_s, copies, absent=absent, units=units)

    def init(self, backend: str = "outlast", store: str = "") -> None:
        """Start the first generation, or the same job on plain gloo, or without a seat."""
        if backend != "outlast":
            files = dist.FileStore(store, self.world)
            name = "outlast" if backend == "seatless" else backend
            dist.init_process_group(name, store=files, rank=self.rank, world_size=self.world)
            return
        register(self.groups)
        self.groups.take_seat(self.rank, self.world, dry=False)
        self.connect()
        self.join()

    def init_dry(self, rank: int | None = None, world: int | None = None) -> None:
        register(self.groups)
        self.rank = self.rank if rank is None else rank
        self.world = world or self.world
        self.groups.take_seat(self.rank, self.world, dry=True)
        self.join()

    def join(self) -> None:
        dist.init_process_group(
            "outlast", store=self.groups.job_store(), rank=self.rank, world_size=self.world
        )


class Cluster:
    """Starts ranks, relays their messages, and collects their results."""

    line = Line

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.pids: list[int] = []
        self.results: dict[int, Any] = {}
        self.codes: dict[int, int] = {}
        self._words: queue.Queue[tuple[int, str]] = queue.Queue()
        self._ready: dict[int, set[int]] = {}
        self._meetings = MeetingRelay()
        self._ended = threading.Semaphore(0)
        self._severed = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.mute: set[int] = set()  # generations whose rendezvous values are withheld

    def fork(self, world: int, body: Callable[..., Any], *args: Any) -> None:
        pairs = [socket.socketpair() for _ in range(world)]
        for rank in range(world):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # only our relay has threads
                pid = os.fork()
            if pid == 0:
                _run_rank(pairs, rank, world, body, args)
            self.pids.append(pid)
        for ours, theirs in pairs:
            theirs.close()
            self.lines.append(Line(ours))
        for rank in range(world):
            threading.Thread(target=self._relay, args=(rank,), daemon=True).start()

    def _relay(self, rank: int) -> None:
        while (message := self.lines[rank].read()) is not None:
            match message:
                case ["put", {"generation": generation} as value]:
                    if generation not in self.mute:
                        self._pass_on(rank, msgspec.convert(value, PUBLISHED))
                case ["ready", generation]:
                    self._is_ready(rank, generation)
                case ["say", word]:
                    self._words.put((rank, word))
                case ["severed", _]:
                    self._severed.release()
                case ["result", value]:
                    self.results[rank] = value
        self._ended.release()

    def _pass_on(self, rank: int, body: messages.Put | messages.Meet) -> None:
        for other, answer in self._meetings.relay(rank, body):
            self.lines[other].write("got", msgspec.to_builtins(answer))

    def _is_ready(self, rank: int, generation: int) -> None:
        with self._lock:
            found = self._ready.setdefault(generation, set())
            found.add(rank)
            if len(found) == len(self.lines):
                for line in self.lines:
                    line.write("connect", generation)

    def expect(self, word: str, count: int) -> None:
        """Wait until `count` ranks have sent `word`."""
        for _ in range(count):
            rank, said = self._words.get(timeout=DEADLINE_S)
            assert said == word, f"rank {rank} said {said!r}, not {word!r}"

    def sever(self, generation: int, ranks: list[int] | None = None) -> None:
        chosen = range(len(self.lines)) if ranks is None else ranks
        for rank in chosen:
            self.lines[rank].write("sever", generation)
        for _ in chosen:
            assert self._severed.acquire(timeout=DEADLINE_S)

    def tell(self, value: Any, ranks: list[int] | None = None) -> None:
        for rank in range(len(self.lines)) if ranks is None else ranks:
            self.lines[rank].write("tell", value)

    def join(self, timeout_s: float = DEADLINE_S) -> list[Any]:
        """Return the results of all ranks; fail if one raised, died, or does not end."""
        deadline_s = time.monotonic() + timeout_s
        for _ in self.lines:
            assert self._ended.acquire(timeout=max(0.1, deadline_s - time.monotonic())), (
                f"ranks {sorted(set(range(len(self.lines))) - set(self.results))} did not end"
            )
        for rank, pid in enumerate(self.pids):
            self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.pids = []
        for rank, result in sorted(self.results.items()):
            assert not (isinstance(result, dict) and "failed" in result), (
                f"rank {rank}:\n{result['failed']}"
            )
        assert len(self.results) == len(self.lines), f"no answer from some: {self.codes}"
        return [self.results[rank] for rank in range(len(self.lines))]

    def run(self, world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        self.fork(world, body, *args)
        return self.join()

    def close(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for line in self.lines:
            line.stream.close()


def _run_rank(
    pairs: list[tuple[socket.socket, socket.socket]],
    rank: int,
    world: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run a rank; exit as an interpreter does, without pytest's exit handlers."""
    line = Line(pairs[rank][1])
    for other, (ours, theirs) in enumerate(pairs):
        ours.close()
        if other != rank:
            theirs.close()
    code = 0
    try:
        faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)
        signal.alarm(int(DEADLINE_S))
        member = Member(line, rank, world)
        result = body(member, *args)
        member.groups.shutdown()
        with member.severing:
            line.write("result", result)
    except BaseException:  # noqa: BLE001 - everything goes to the test
        line.write("result", {"failed": traceback.format_exc()})
        code = 1
    finally:
        os._exit(code)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[], Cluster]]:
    made: list[Cluster] = []

    def make() -> Cluster:
        made.append(Cluster())
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def cluster(clusters: Callable[[], Cluster]) -> Cluster:
    return clusters()
