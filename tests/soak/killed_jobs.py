"""Job of save_kills.py: two ranks forked from a process that has imported torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings

WORLD = 2
EVERY = 3  # steps between saves to the disk
SAVE_S = 30.0
_SIZE = struct.Struct("<I")


def content(place: SavePoint, rank: int, elements: int) -> dict[str, torch.Tensor]:
    """Return this rank's content: different bytes at each step, in each life."""
    begin = hash((place.step, place.attempt)) & 0xFFFFFF
    replica = np.arange(begin, begin + elements, dtype=np.int64)
    mine = np.arange(begin + rank, begin + rank + elements // 10, dtype=np.int64)
    return {
        "weight": torch.from_numpy(replica),
        "small": torch.tensor(begin),
        f"own.{rank}": torch.from_numpy(mine),
    }


class Job(NamedTuple):
    """Parameters of a life.

    `begun`: the loaded step. `elements`: of the largest tensor. Without `addresses` ranks start
    keepers of their own.
    """

    life: int
    root: Path
    begun: int
    elements: int
    addresses: list[str]
    token: str


class Life:
    """Both ranks from their start to the end of the last, from outside."""

    def __init__(self, job: Job) -> None:
        self.addresses = job.addresses
        self.begun = self.told = job.begun
        self.ended = False
        self._unhurt = True  # no rank was killed: every save must end well
        self._text = ""
        self._reading, writing = os.pipe()
        links = socket.socketpair()
        self._ranks = []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                os.close(self._reading)
                links[1 - rank].close()
                _be_rank(rank, job, links[rank], writing)
            self._ranks.append(pid)
        os.close(writing)
        for link in links:
            link.close()

    def listen_until(self, true: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
            assert not self.ended, f"a rank ended before {what}"
            self._listen(0.1)

    def listen_for(self, seconds: float) -> None:
        """Read the messages of ranks for this time, at least those already sent."""
        end = time.monotonic() + seconds
        while True:
            more = self._listen(max(0.0, end - time.monotonic()))
            if not more and time.monotonic() >= end:
                return

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._unhurt = False
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank], signal.SIGKILL)

    def kill_keeper(self, rank: int) -> None:
        """Kill the keeper that the rank started; it may have ended, or not started yet."""
        for task in Path(f"/proc/{self._ranks[rank]}/task").iterdir():
            # Threads and keepers may end between the listing and the look.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for pid in (task / "children").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)

    def end(self, timeout_s: float) -> None:
        """Kill the live ranks, and reap all; keepers finish their orders."""
        self.kill(range(WORLD))
        for pid in self._ranks:
            os.waitpid(pid, 0)
        self.listen_until(lambda: self.ended, timeout_s, "the end of what ranks say")
        os.close(self._reading)

    def _listen(self, timeout_s: float) -> bool:
        """Return whether a new message was read."""
        if self.ended or not select.select([self._reading], [], [], timeout_s)[0]:
            return False
        data = os.read(self._reading, 1 << 16)
        self.ended = not data
        self._text += data.decode()
        *lines, self._text = self._text.split("\n")
        for line in lines:
            kind, _, said = line.partition(" ")
            if kind == "committed":
                self.told = max(self.told, int(said))
            else:
                assert not self._unhurt, line
        return bool(data)


def _be_rank(rank: int, job: Job, link: socket.socket, told_fd: int) -> None:
    """Save at every step until killed; the process ends here."""

    def exchange(message: bytes) -> list[bytes]:
        link.sendall(_SIZE.pack(len(message)) + message)
        answer = _read(link, _SIZE.unpack(_read(link, _SIZE.size))[0])
        return [message, answer] if rank == 0 else [answer, message]

    def tell(line: str) -> None:
        os.write(told_fd, f"{line}\n".encode())

    try:
        link.settimeout(SAVE_S)
        name = f"rank {rank}"
        reach = job.addresses and KeeperClient.connect(job.addresses[rank], job.token, name)
        settings = SaveSettings(root=job.root, rank=rank, world=WORLD, job="soak", save_s=SAVE_S)
        engine = SaveEngine(settings, exchange, reach or KeeperClient.start(name))
        step = job.begun
        while True:
            step += 1
            place = SavePoint(step, step, f"l{job.life}")
            request = SaveRequest(
                place, content(place, rank, job.elements), shared=place.directory.encode(),
                own=f"{rank} {place.directory}".encode(), to_disk=step % EVERY == 0,
            )  # fmt: skip
            engine.save(request)
            exchange(b"a step, in which ranks meet")
            for outcome in engine.outcomes():
                if outcome.kind == "committed":
                    tell(f"committed {outcome.place.step}")
                elif outcome.kind in ("failed", "skipped"):
                    tell(f"{outcome.kind} {rank}: {outcome.error}")
    except OSError:
        os._exit(0)  # the other rank is gone
    except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
        tell(f"broken {rank}: {traceback.format_exc()!r}")
        sys.stderr.flush()
    os._exit(1)


def _read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data
