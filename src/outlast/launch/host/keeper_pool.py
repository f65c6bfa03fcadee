"""Keeper processes of one host: each holds and writes the saves of its rank.

With copies or parity, a keeper also receives saves of other ranks, so that these survive the loss
of the other ranks' keepers.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outlast.atomic_files import replace_file
from outlast.checkpoint.keeper.copy_readers import open_listener
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup, PeerKeeper
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper, address_of, open_door
from outlast.checkpoint.replicas.memory_copies import KEEPER_DOORS, door_of
from outlast.controller.replica_placement import ReplicaSpot, group, place
from outlast.errors import StorageError
from outlast.launch.torchrun_arguments import RunPlan

STARTS_MAX = 10  # consecutive starts of one seat's keeper that each lasted less than YOUNG_S
YOUNG_S = 600.0
REAP_S = 5.0


class KeeperSite(NamedTuple):
    """This host's address, and the nodes of a run of several: host and failure domain by rank."""

    address: str = ""
    nodes: tuple[tuple[str, str], ...] = ()


ONE_HOST = KeeperSite()


class KeeperDoors(NamedTuple):
    """Doors of keepers on several hosts. A rank's keeper writes its own into a file of `folder`, as
    HOST:PORT, whenever the rank takes its seat: other keepers and readers find it on any host.
    `address`: this host's."""

    folder: Path
    address: str


@dataclass(frozen=True)
class ReplicaPlan:
    """Redundancy of saves in memory.

    `saves`: saves follow a schedule, so that keepers start with their ranks; else each starts when
    a rank, or a search for copies, first connects to it.
    `spots`: the location of each seat. `copies`: number of keepers that hold a rank's save,
    including the rank's own. `parity`: number of ranks in a parity group; 0 for copies.
    `rate_bytes_per_s`: total rate limit of traffic between keepers; None for no limit.
    """

    spots: Sequence[ReplicaSpot]
    copies: int = 1
    parity: int = 0
    rate_bytes_per_s: int | None = None
    saves: bool = True
    doors: KeeperDoors | None = None

    @classmethod
    def of(cls, plan: RunPlan, run_dir: Path, host: str, site: KeeperSite) -> ReplicaPlan:
        """Return the plan of a run: places of ranks are those of its start."""
        nodes, share = site.nodes or ((host, ""),), plan.ranks_per_host
        return cls(
            [ReplicaSpot(*nodes[rank // share]) for rank in range(plan.world)],
            plan.copies,
            plan.parity,
            plan.peer_rate_bytes_per_s,
            saves=bool(plan.checkpoint_every or plan.snapshot_every),
            doors=KeeperDoors(run_dir / KEEPER_DOORS, site.address)
            if plan.node.total > 1 and plan.keeps_copies
            else None,
        )


class KeeperPool:
    """Keepers by seat, started with the seat's first worker or at its first connection.

    A dead keeper is restarted, and its worker shares the same memory with it again. `note`
    receives failures as text.
    """

    def __init__(
        self,
        prefix: str,
        token: str,
        lock_fds: tuple[int, ...],
        leaders: set[int],
        note: Callable[[str], None],
        replicas: ReplicaPlan,
    ) -> None:
        self._spots = spots = replicas.spots
        rate_bytes_per_s = replicas.rate_bytes_per_s
        self._prefix = prefix
        self._token = token
        self._lock_fds = lock_fds
        self._leaders = leaders
        self._note = note
        self._served: dict[int, ServedKeeper] = {}
        self._pidfds: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._started_s: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._doors: list[socket.socket] = []
        self._listeners: dict[int, socket.socket] = {}  # of keepers that start when needed
        self._is_eager = replicas.saves or replicas.copies > 1 or replicas.parity > 0
        self._rate_bytes_per_s = rate_bytes_per_s and rate_bytes_per_s // len(spots)
        self._parity = replicas.parity > 0
        if self._parity:
            self._placement = group(spots, replicas.parity)
        else:
            self._placement = place(spots, replicas.copies)
        self._far = replicas.doors
        self._own_doors: dict[int, socket.socket] = {}  # with several hosts: of ranks on this one
        if not self._far and (self._parity or replicas.copies > 1):
            self._open_doors(len(spots))

    def _open_doors(self, world: int) -> None:
        """Bind the listeners, which the launcher owns: a restarted keeper keeps its address."""
        try:
            for _ in range(world):
                self._doors.append(open_door())
        except StorageError as error:
            self._note(str(error))
            self._close_doors()
            return
        self.note_placement()

    def note_placement(self) -> None:
        """Note the losses that copies do not survive."""
        for text in self._placement.notes:
            self._note(text)

    def _close_doors(self) -> None:
        while self._doors:
            self._doors.pop().close()
        while self._own_doors:
            self._own_doors.popitem()[1].close()

    def _peers(self, seat: int) -> tuple[PeerKeeper, ...]:
        return tuple(
            PeerKeeper(
                name=f"the keeper of rank {peer}",
                address=door_of(self._far.folder, peer)
                if self._far
                else address_of(self._doors[peer]),
            )
            for peer in self._placement.peers[seat]
        )

    def _publish(self, seat: int) -> None:
        """Let other hosts find the keeper of a rank here, from now on; note a failure."""
        if self._far is None:
            return
        try:
            if seat not in self._own_doors:
                self._own_doors[seat] = open_door(self._far.address)
            place = address_of(self._own_doors[seat]).encode()
            self._far.folder.mkdir(exist_ok=True)
            replace_file(self._far.folder / str(seat), place, durable=False)
        except (OSError, StorageError) as error:
            self._note(f"copies of rank {seat} cannot be found by other hosts: {error}")
        spots = self._spots
        for peer in self._placement.peers[seat]:
            if peer in self._own_doors and spots[peer].host != spots[seat].host:
                self._note(
                    f"rank {seat} has moved to the host of rank {peer}, whose keeper holds its"
                    " copies: the loss of this host takes both"
                )

    def _group(self, seat: int) -> tuple[int, ...]:
        return tuple(sorted((seat, *self._placement.peers[seat]))) if self._parity else ()

    def addresses(self, world: int) -> list[str]:
        """Return the addresses of the keepers of seats below `world`, alive or dead."""
        return [f"{self._prefix}{seat}" for seat in range(world)]

    def start(self, seat: int) -> None:
        """Start the seat's keeper, or listen for it, if it has none; note a failure."""
        self._publish(seat)
        if self._is_eager:
            self._start(seat)
        elif seat not in self._listeners:
            try:
                self._listeners[seat] = listener = open_listener(f"{self._prefix}{seat}")
            except StorageError as error:
                self._note(f"rank {seat} has no keeper, and cannot be saved: {error}")
            else:
                self._loop.add_reader(listener, self._needed, seat)

    def _needed(self, seat: int) -> None:
        """Start a keeper that has a connection; it accepts from the listener from here on."""
        self._loop.remove_reader(self._listeners[seat])
        self._start(seat)

    def _start(self, seat: int) -> None:
        if seat in self._served:
            return
        self._starts[seat] = self._starts.get(seat, 0) + 1
        if self._starts[seat] > STARTS_MAX:
            self._note(
                f"rank {seat} has no keeper any more, and cannot be saved: {STARTS_MAX} died within"
                f" {YOUNG_S:g} s of their start; older checkpoints are kept; see to the host, then"
                " stop this run and resume it with: outlast run --run-dir RUN_DIR ..."
            )
            return
        self._started_s[seat] = self._loop.time()
        try:
            # A keeper inherits the run's lock: a new launcher must wait for its writes.
            served = ServedKeeper(
                f"{self._prefix}{seat}",
                f"rank {seat}",
                self._setup(seat),
                self._lock_fds,
                self._own_doors.get(seat) or (self._doors[seat] if self._doors else None),
                self._listeners.get(seat),
            )
        except (StorageError, OSError) as error:
            self._note(f"rank {seat} has no keeper, and cannot be saved: {error}")
            return
        pid = served.process.pid
        self._leaders.add(pid)
        self._served[seat] = served
        self._pidfds[seat] = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfds[seat], self._died, seat)

    def _setup(self, seat: int) -> KeeperSetup:
        return KeeperSetup(
            token=self._token,
            peers=self._peers(seat) if self._doors or self._far else (),
            peers_bytes_per_s=self._rate_bytes_per_s,
            rank=seat,
            group=self._group(seat) if self._doors or self._far else (),
        )

    def _died(self, seat: int) -> None:
        how = self._forget(seat).close(REAP_S)
        self._note(f"the keeper of rank {seat} {how}")
        if self._loop.time() - self._started_s[seat] >= YOUNG_S:
            self._starts[seat] = 0
        self._start(seat)

    def _forget(self, seat: int) -> ServedKeeper:
        pidfd = self._pidfds.pop(seat)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        served = self._served.pop(seat)
        self._leaders.discard(served.process.pid)
        return served

    async def close(self, timeout_s: float) -> None:
        """Let all keepers finish their writes in parallel; kill those that exceed the timeout."""
        self._close_doors()
        while self._listeners:
            _, listener = self._listeners.popitem()
            self._loop.remove_reader(listener)
            listener.close()
        seats = sorted(self._served)
        served = [self._forget(seat) for seat in seats]
        pids = {each.process.pid for each in served}
        self._leaders |= pids  # only this method may reap them
        ends = await asyncio.gather(*(asyncio.to_thread(each.close, timeout_s) for each in served))
        self._leaders -= pids
        for seat, how in zip(seats, ends, strict=True):
            if how != "ended with code 0":
                self._note(f"the keeper of rank {seat} {how}")
