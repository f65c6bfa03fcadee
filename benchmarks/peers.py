"""Copies to another keeper's memory over loopback, beside a memcpy and bare sockets.

Everything takes turns; medians. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from harness import median, table, verdict

from outlast.checkpoint.format.manifests import CHUNK_BYTES, Blob, Manifest, SavePoint, shard_name
from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup, PeerKeeper, SaveOrder
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper, address_of, open_door
from outlast.checkpoint.replicas.keeper_links import SLICE_BYTES

LANES = 2
TIMEOUT_S = 120.0
S_PER_GB_MAX = 0.25


class Keepers:
    """Two of them, and the first one's trainer with an arena."""

    def __init__(self, size_bytes: int) -> None:
        door = open_door()
        name = f"@outlast-benchmark-{os.getpid()}"
        to = PeerKeeper(name="the other", address=address_of(door))
        self._served = [
            ServedKeeper(f"{name}-1", "the other", KeeperSetup(token="token"), door=door),
            ServedKeeper(f"{name}-0", "the one", KeeperSetup(token="token", peers=(to,))),
        ]
        door.close()
        self._keeper = KeeperClient.connect(f"{name}-0", "token")
        self.arena = Arena.create(size_bytes)
        self._number = self._keeper.lend(self.arena)
        self._saves = 0

    def copy(self) -> float:
        """Seconds for one version, from its order until the other keeper holds it, verified."""
        self._saves += 1
        size_bytes = self.arena.size_bytes
        self._keeper.reuse(self._number)
        manifest = Manifest(
            job="benchmark",
            place=SavePoint(self._saves, self._saves, "a"),
            rank=0,
            world=1,
            shard=shard_name(0),
            size_bytes=size_bytes,
            chunk_bytes=CHUNK_BYTES,
            chunks=(),
            plan="",
            tensors={},
            pieces=(),
            blobs=(Blob("own", 0, size_bytes),),
        )
        order = SaveOrder(
            save=self._saves,
            arena=self._number,
            root="",
            manifest=manifest,
            deadline_s=TIMEOUT_S,
            to_disk=False,
        )
        begun = time.perf_counter()
        self._keeper.order(order)
        while self._keeper.copying:
            assert time.perf_counter() - begun < TIMEOUT_S
            time.sleep(0.001)
        took_s = time.perf_counter() - begun
        told = [outcome for outcome in self._keeper.outcomes() if outcome.kind == "copied"]
        if told[0].copies != 1:
            raise SystemExit(f"the copy failed: {told[0].error}")
        return took_s

    def close(self) -> None:
        self._keeper.close(TIMEOUT_S)
        for served in self._served:
            served.close(TIMEOUT_S)
        self.arena.close()


class Bare:
    """The same bytes over two connections to a process that does nothing but receive them."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        door = socket.create_server(("127.0.0.1", 0))
        door.set_inheritable(True)
        command = [sys.executable, __file__, "--receive", str(door.fileno())]
        command.append(f"--mb={arena.size_bytes / 1e6}")
        self._process = subprocess.Popen(command, pass_fds=(door.fileno(),))
        address = door.getsockname()
        self._socks = [socket.create_connection(address) for _ in range(LANES)]
        door.close()

    def copy(self) -> float:
        begun = time.perf_counter()
        both(self._send)
        return time.perf_counter() - begun

    def _send(self, lane: int) -> None:
        half = self._arena.size_bytes // LANES
        for at in range(lane * half, (lane + 1) * half, SLICE_BYTES):
            end = min(at + SLICE_BYTES, (lane + 1) * half)
            self._socks[lane].sendall(self._arena.view[at:end])
        self._socks[lane].recv(1)

    def close(self) -> None:
        for sock in self._socks:
            sock.close()
        self._process.wait(TIMEOUT_S)


def receive(fd: int, size_bytes: int) -> None:
    """What `Bare` speaks to: memory that is there already, filled again and again."""
    arena = Arena.create(size_bytes)
    door = socket.socket(fileno=fd)
    socks = [door.accept()[0] for _ in range(LANES)]
    half = size_bytes // LANES

    def fill(lane: int) -> None:
        while True:
            at = lane * half
            while at < (lane + 1) * half:
                count = socks[lane].recv_into(arena.view[at : (lane + 1) * half])
                if not count:
                    return
                at += count
            socks[lane].sendall(b"k")

    both(fill)


def both(do: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=do, args=(lane,)) for lane in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(size_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds, by way."""
    keepers = Keepers(size_bytes)
    bare = Bare(keepers.arena)
    there = memoryview(bytearray(size_bytes))
    there[:] = keepers.arena.view  # so that its pages are there

    def memcpy() -> float:
        begun = time.perf_counter()
        there[:] = keepers.arena.view
        return time.perf_counter() - begun

    ways = {"memcpy": memcpy, "bare sockets": bare.copy, "keeper to keeper": keepers.copy}
    for _ in range(2):  # the receiver has two arenas to make
        keepers.copy()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            times[name].append(way())
    bare.close()
    keepers.close()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=1024.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    size_bytes = int(asked.mb * 1e6) // (1 << 21) * (1 << 21)
    if asked.receive is not None:
        receive(asked.receive, size_bytes)
        return 0
    times = measure(size_bytes, asked.repeats)
    speeds = {name: size_bytes / median(taken) / 1e9 for name, taken in times.items()}
    best = {name: size_bytes / min(taken) / 1e9 for name, taken in times.items()}
    table(
        ("way", "GB/s", "best"),
        [(name, f"{speeds[name]:.2f}", f"{best[name]:.2f}") for name in times],
    )
    bars = {"seconds for a GB, keeper to keeper": (1 / speeds["keeper to keeper"], S_PER_GB_MAX)}
    figures = {"size_bytes": size_bytes, "gb_per_s": speeds, "best_gb_per_s": best}
    return verdict("peers", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
