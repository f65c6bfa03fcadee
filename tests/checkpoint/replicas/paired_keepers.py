"""Keepers with each other's copies or parity, their trainers, and the network between."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tests.checkpoint.keeper_orders import (
    SIZE_BYTES,
    TIMEOUT_S,
    filled,
    manifest_of,
    order_of,
    until,
)
from tests.checkpoint.replicas.faulty_network import Network

from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup, Outcome, PeerKeeper
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper, address_of, open_door
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.checkpoint.stores import catalog

TOKEN = "the token of a run"
LARGE_BYTES = 24 << 20  # does not fit into what the kernel keeps on its way
_numbers = itertools.count()


class Memory:
    """Bytes with the interface of an arena."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, at: int, into: memoryview) -> None:
        assert at + len(into) <= len(self.data)
        into[:] = self.data[at : at + len(into)]


class Seat:
    """A keeper with a listener, and its trainer with two filled arenas."""

    def __init__(
        self,
        rank: int,
        world: int,
        door: socket.socket,
        to: tuple[str, ...],
        group: tuple[int, ...] = (),
        bytes_per_s: int | None = None,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self.rank, self.world, self.door, self.group = rank, world, door, group
        self.address = f"@outlast-peers-{os.getpid()}-{next(_numbers)}"
        self._peers = tuple(PeerKeeper(name="its peer", address=address) for address in to)
        self.served = self._serve()
        self.alive = True
        self.keeper = KeeperClient.connect(self.address, TOKEN)
        self.arenas: list[Arena] = []
        self.lend(SIZE_BYTES)

    def lend(self, size_bytes: int) -> None:
        """Lend two arenas of this size for the following saves."""
        self.size_bytes = size_bytes
        self.arenas += [filled(size_bytes), filled(size_bytes)]
        self.numbers = [self.keeper.lend(arena) for arena in self.arenas[-2:]]

    def arena(self, step: int) -> Arena:
        return self.arenas[-2:][step % 2]

    def _serve(self) -> ServedKeeper:
        name = f"rank {self.rank}"
        setup = KeeperSetup(
            token=TOKEN, peers=self._peers, rank=self.rank, group=self.group,
            peers_bytes_per_s=self._bytes_per_s,
        )  # fmt: skip
        return ServedKeeper(self.address, name, setup, door=self.door)

    def save(self, step: int, root: Path | None = None) -> Outcome:
        """Save in memory, or on the disk as well; return the outcome of the copies."""
        self.order(step, root)
        return self.copied(step)

    def order(self, step: int, root: Path | None = None) -> None:
        number = self.numbers[step % 2]
        self.keeper.reuse(number)
        manifest = manifest_of(step, self.rank, self.world, self.size_bytes)
        order = order_of(
            step, root or Path(), arena=number, rank=self.rank, world=self.world, manifest=manifest
        )
        if not root:
            order = msgspec.structs.replace(order, to_disk=False, commit=None)
        self.keeper.order(order)

    def copied(self, step: int) -> Outcome:
        found: list[Outcome] = []

        def come() -> bool:
            found.extend(told for told in self.keeper.outcomes() if told.kind == "copied")
            return bool(found)

        until(come, f"the copies of step {step}")
        assert [told.save for told in found] == [step]
        return found[0]

    def kill(self) -> None:
        """Kill the keeper; its memory is lost."""
        self.served.process.kill()
        self.served.close(TIMEOUT_S)
        self.alive = False

    def again(self) -> None:
        self.served = self._serve()
        self.alive = True

    def leave(self) -> None:
        self.keeper.close(TIMEOUT_S)

    def close(self) -> None:
        self.keeper.close(TIMEOUT_S)
        if self.alive:
            self.served.close(TIMEOUT_S)
        for arena in self.arenas:
            arena.close()


def held(seat: Seat) -> dict[tuple[int, int], bytes]:
    """Return the copies of a keeper by rank and step."""
    keeper = KeeperClient.connect(seat.address, TOKEN)
    found = {}
    for version in keeper.held_versions():
        manifest, arena = version.manifest, keeper.take(version.arena)
        data = bytearray(manifest.size_bytes)
        arena.read(0, memoryview(data))
        found[manifest.rank, manifest.place.step] = bytes(data)
        arena.close()
    keeper.close(TIMEOUT_S)
    return found


def shard(seat: Seat, step: int) -> bytes:
    return bytes(seat.arena(step).view[: seat.size_bytes])


def held_after(seat: Seat) -> set[tuple[int, int]]:
    """Return the copies that a keeper lists to its own trainer; bytes are compared elsewhere."""
    return {(each.manifest.rank, each.manifest.place.step) for each in seat.keeper.held_versions()}


def newest_of(*seats: Seat) -> tuple[int | None, list[str]]:
    """Return the newest complete step, every byte verified, and the steps that were skipped."""
    source = MemoryCopies.reach([seat.address for seat in seats], TOKEN, "a test")
    notes: list[str] = []
    found = catalog.newest_checkpoint(source, notes.append, verify=True)
    source.close()
    return (found.place.step if found else None), notes


@contextlib.contextmanager
def paired(network: Network) -> Iterator[tuple[Seat, Seat]]:
    """Pair ranks 0 and 1; copies of rank 0 pass through the network."""
    doors = [open_door(), open_door()]
    network.address = address_of(doors[1])
    pair = (
        Seat(0, 2, doors[0], (network.here,)),
        Seat(1, 2, doors[1], (address_of(doors[0]),)),
    )
    yield pair
    for seat, door in zip(pair, doors, strict=True):
        seat.close()
        door.close()


@contextlib.contextmanager
def grouped(count: int, network: Network) -> Iterator[list[Seat]]:
    """Form a parity group; copies from the first rank to the second pass through the network."""
    doors = [open_door() for _ in range(count)]
    addresses = [address_of(door) for door in doors]
    network.address = addresses[1]
    seats: list[Seat] = []
    for rank, door in enumerate(doors):
        to = [network.here if rank == 0 and n == 1 else each for n, each in enumerate(addresses)]
        peers = tuple(address for n, address in enumerate(to) if n != rank)
        seats.append(Seat(rank, count, door, peers, tuple(range(count))))
    yield seats
    for seat, door in zip(seats, doors, strict=True):
        seat.close()
        door.close()
