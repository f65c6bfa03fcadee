"""Faults of hosts, networks, clocks and disks, and the places of a run where they strike.

Each fault of `FAULTS` is combined with each place of `PLACES`. A run has ranks on n1, which has the
controller, and on n2; n3 has none. A fault strikes n2, or the controller's node:

```
reach the place ─► begin the fault ─► leave the place ─► wait ─► end the fault
```

A place is held open until the fault has begun: a regroup by the new worker's script, which waits
for a file; a transfer by a slow link; a takeover by the former controller, which stands still. A
save is struck between its phase and its commit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.cluster.cluster import Cluster
from tests.cluster.takeover_strikes import kill_launcher, owner_of, stop_launcher, wake_launcher
from tests.end_to_end.conftest import wait_for

from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Decided,
    FaultKind,
    GenerationOpened,
    JoinerReady,
    Note,
    Noticed,
    PhaseDone,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
)

SHORT_S = 1.0  # well below the lease
HOUR_S = 3600
SLOW = "4mbit"  # a transfer of all state takes some 5 s
SOME_BYTES = 1 << 18
FIRST_STEP = 20
LEASE_S = 4.0
CLOCK = Path(__file__).with_name("stepped_clock.c")
TAKES_OVER = "takes over as controller"
LONG_S = 7.0  # above the lease
pause = threading.Event().wait


def in_step(event: AnyEvent) -> bool:
    return isinstance(event, PhaseDone) and event.step >= FIRST_STEP


def in_save(event: AnyEvent) -> bool:
    return isinstance(event, CheckpointSaved) and event.step >= FIRST_STEP


def is_decided(event: AnyEvent) -> bool:
    return isinstance(event, Decided)


def has_joiner(event: AnyEvent) -> bool:
    return isinstance(event, JoinerReady)


def trains_on(event: AnyEvent) -> bool:
    """Return whether all ranks train, in a new generation or in one that is adopted."""
    adopted = isinstance(event, Note) and "train on in generation" in event.text
    return adopted or isinstance(event, GenerationOpened)


class Target:
    """A run, and the host that a fault strikes."""

    def __init__(self, cluster: Cluster, etcd: subprocess.Popen[bytes] | None) -> None:
        self.cluster, self.hosts, self.etcd = cluster, cluster.hosts, etcd
        self.host = "n2"
        self.controller = "n1"
        self.without_launcher: set[str] = set()
        self.ballast = cluster.disk / "ballast"
        self.begun = 0  # events that were there when the fault began
        self.is_stopped = False  # all of that host
        self.ranks: set[int] = set()  # of that host when the fault begins

    def workers(self, host: str) -> dict[int, WorkerSpawned]:
        """Return the workers with ranks on a host, by rank, as the events show them."""
        events = self.cluster.events()
        spawned = {one.worker: one for one in events if isinstance(one, WorkerSpawned)}
        ranks = {one.worker: one.seat for one in spawned.values() if one.seat >= 0}
        ranks |= {one.worker: one.seat for one in events if isinstance(one, WorkerSeated)}
        for one in events:
            if isinstance(one, WorkerLost):
                ranks.pop(one.worker, None)
        return {seat: spawned[name] for name, seat in ranks.items() if spawned[name].host == host}

    def kill_worker(self, host: str) -> None:
        """Kill the worker of the lowest rank of a host."""
        _, worker = min(self.workers(host).items())
        self.hosts.run(host, "kill", "-KILL", str(worker.pid))

    def set_clock(self, host: str, ahead_s: int) -> None:
        """Step the wall clock of a host; CLOCK_MONOTONIC and CLOCK_BOOTTIME go on."""
        with clock_of(self.cluster.folder, host).open("r+b") as file:
            file.write((ahead_s * 10**9).to_bytes(8, sys.byteorder, signed=True))

    @property
    def is_over(self) -> bool:
        """True when the launchers of all hosts that are not struck have ended."""
        others = set(self.hosts.up) - {self.host}
        return all(self.cluster.launchers[name].poll() is not None for name in others)

    def wait_for_loss(self) -> None:
        """Wait until the host's ranks train elsewhere, or the run is over."""

        def is_lost(event: AnyEvent) -> bool:
            if isinstance(event, Note):
                return self.host == self.controller and TAKES_OVER in event.text
            if not isinstance(event, Noticed):
                return False
            return event.fault.kind == "agent_lost" and event.fault.host == self.host

        def is_there() -> bool:
            events = self.cluster.events()[self.begun :]
            lost = [at for at, one in enumerate(events) if is_lost(one)]
            after = events[lost[0] :] if lost else []
            return any(map(trains_on, after)) or self.is_over

        wait_for(is_there, f"the ranks of {self.host} on other hosts", 90.0)


def clock_of(folder: Path, host: str) -> Path:
    """Return the file that says by how many ns a host's wall clock is ahead."""
    return folder / f"clock-{host}"


def stepped_clock(folder: Path, host: str) -> dict[str, str]:
    """Return the environment of processes of a host whose wall clock can be stepped."""
    library = folder / "stepped_clock.so"
    if not library.exists():
        words = ("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK))
        subprocess.run(words, check=True)
    clock_of(folder, host).write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(clock_of(folder, host))}


# --- faults -------------------------------------------------------------------------------


def nothing(_target: Target) -> None:
    """Heal nothing: the host is not used again, or is whole."""


def silent(target: Target, on: bool) -> None:
    target.hosts.set_silent(target.host, silent=on)


def mute(target: Target, on: bool) -> None:
    target.hosts.set_mute(target.host, mute=on)


def deaf(target: Target, on: bool) -> None:
    target.hosts.set_deaf(target.host, deaf=on)


def unplugged(target: Target, on: bool) -> None:
    target.hosts.set_link(target.host, up=not on)


def stopped(target: Target, on: bool) -> None:
    (target.hosts.stop if on else target.hosts.resume)(target.host)
    target.is_stopped = on


def still_disk(target: Target, on: bool) -> None:
    subprocess.run(["fsfreeze", "-f" if on else "-u", str(target.cluster.disk)], check=True)


def full_disk(target: Target, on: bool) -> None:
    if not on:
        target.ballast.unlink()
        return
    with target.ballast.open("wb") as file:
        size = 64 << 20
        while size >= 4096:
            at = file.tell()
            try:
                os.posix_fallocate(file.fileno(), at, size)
                file.seek(at + size)
            except OSError:
                size //= 2


def away_store(target: Target, on: bool) -> None:
    assert target.etcd is not None
    target.etcd.send_signal(signal.SIGSTOP if on else signal.SIGCONT)


def stopped_launcher(target: Target, on: bool) -> None:
    (stop_launcher if on else wake_launcher)(target.cluster, target.controller)


def killed_launcher(target: Target) -> None:
    target.without_launcher.add(target.controller)
    kill_launcher(target.cluster, target.controller)


def stepped(target: Target) -> None:
    target.set_clock("n2", HOUR_S)
    target.set_clock("n1", -HOUR_S)


def stepped_back(target: Target) -> None:
    """Step the clocks the other way, and then right."""
    for sign in (-1, 0):
        target.set_clock("n2", sign * HOUR_S)
        target.set_clock("n1", -sign * HOUR_S)
        pause(SHORT_S)


def blink_all(target: Target) -> None:
    """Heal, and break for less than a lease in each other way."""
    silent(target, False)
    for toggle in (mute, deaf, unplugged, stopped):
        pause(SHORT_S)
        toggle(target, True)
        pause(SHORT_S)
        toggle(target, False)


def stutter(target: Target) -> None:
    """Let the disk stand still for most of the next seconds."""
    for _ in range(8):
        still_disk(target, False)
        pause(0.1)
        still_disk(target, True)
        pause(0.6)
    still_disk(target, False)


class HostFault(NamedTuple):
    """A fault. `cause` of its incident; "": it costs no rank, and is no incident.

    `lasts_s`: until it ends; 0: until the host's ranks train elsewhere.
    """

    begin: Callable[[Target], None]
    end: Callable[[Target], None] = nothing
    cause: FaultKind | str = "agent_lost"
    lasts_s: float = 0.0
    lease_s: float = 0.0  # the lease is at least that
    of_controller: bool = False


def while_on(toggle: Callable[[Target, bool], None], **other: object) -> HostFault:
    """Return the fault that a switch begins and ends."""
    return HostFault(lambda one: toggle(one, True), lambda one: toggle(one, False), **other)  # type: ignore[arg-type]


FAULTS = {
    "killed process": HostFault(lambda one: one.kill_worker(one.host), cause="killed"),
    "crash": HostFault(lambda one: one.hosts.crash(one.host)),
    "power loss": HostFault(lambda one: one.hosts.power_off(one.host)),
    "silent": while_on(silent),
    "mute": while_on(mute),
    "deaf": while_on(deaf),
    "cable out and back": while_on(unplugged, cause="", lasts_s=SHORT_S),
    "short cuts": HostFault(lambda one: silent(one, True), blink_all, "", SHORT_S, lease_s=8.0),
    "frozen": while_on(stopped),
    "stepped clocks": HostFault(stepped, stepped_back, "", SHORT_S),
    "slow disk": HostFault(lambda one: still_disk(one, True), stutter, "", SHORT_S),
    "disk stands still": while_on(still_disk, cause="", lasts_s=LONG_S),
    "full disk": while_on(full_disk, cause="", lasts_s=LONG_S),
    "store away": while_on(away_store, cause="", lasts_s=LONG_S),
    "killed controller": HostFault(killed_launcher, of_controller=True),
    "frozen controller": while_on(stopped_launcher, of_controller=True),
}


# --- places -------------------------------------------------------------------------------


def reach_step(target: Target) -> None:
    target.cluster.wait_for_event(in_step, "a step")


def reach_save(target: Target) -> None:
    """Wait until a save has begun that is not complete."""

    def is_there() -> bool:
        events = target.cluster.events()
        phases = [one for one in events if isinstance(one, PhaseDone) and one.kind == "checkpoint"]
        saved = max((one.n for one in events if isinstance(one, CheckpointSaved)), default=0)
        return any(one.step >= FIRST_STEP and one.n > saved for one in phases)

    wait_for(is_there, "a save", 60.0)


def reach_regroup(target: Target) -> None:
    """Kill a worker of n1; another one takes its rank, and its script waits."""
    reach_step(target)
    target.cluster.gate.touch()
    target.kill_worker("n1")
    target.cluster.wait_for_event(is_decided, "a decision")


def leave_regroup(target: Target) -> None:
    target.cluster.gate.unlink()


def reach_transfer(target: Target) -> None:
    """Kill a worker of n1, and wait until some of the state has reached another one, on n3."""
    reach_step(target)
    target.hosts.slow_down("n3", SLOW)
    target.kill_worker("n1")
    target.cluster.wait_for_event(has_joiner, "a new worker")
    before = target.hosts.received_bytes("n3")
    wait_for(lambda: target.hosts.received_bytes("n3") > before + SOME_BYTES, "a transfer", LEASE_S)


def leave_transfer(target: Target) -> None:
    target.hosts.slow_down("n3", "")


def reach_takeover(target: Target) -> None:
    """Stop the launchers of the hosts with ranks until n3 takes over: it waits for them."""
    reach_step(target)
    for host in ("n1", "n2"):
        stop_launcher(target.cluster, host)
    target.controller = owner_of(target.cluster, 2)


def leave_takeover(target: Target) -> None:
    for host in ("n1", "n2"):
        if host in target.hosts.up and not (host == target.host and target.is_stopped):
            wake_launcher(target.cluster, host)


class Place(NamedTuple):
    """A place of a run. `causes`: of its own incidents."""

    reach: Callable[[Target], None]
    leave: Callable[[Target], None] = nothing
    causes: tuple[str, ...] = ()
    lease_s: float = LEASE_S
    flags: tuple[str, ...] = ()


PLACES = {
    "step": Place(reach_step),
    "regroup": Place(reach_regroup, leave_regroup, ("killed",)),
    "transfer": Place(reach_transfer, leave_transfer, ("killed",)),
    "save": Place(reach_save, flags=("--checkpoint-every=1",)),
    "takeover": Place(reach_takeover, leave_takeover, lease_s=6.0),
}


def strike(target: Target, fault: HostFault, place: Place) -> None:
    """Break the run at a place, and heal it where it can be healed."""
    place.reach(target)
    opened = target.cluster.generations()
    if fault.of_controller:
        target.host = target.controller
    target.ranks = set(target.workers(target.host))
    target.begun = len(target.cluster.events())
    began = time.monotonic()
    fault.begin(target)
    assert target.cluster.generations() == opened, "the place was left before the fault began"
    place.leave(target)
    if fault.lasts_s:
        pause(max(0.0, began + fault.lasts_s - time.monotonic()))
    elif fault.cause == "agent_lost":
        target.wait_for_loss()
    fault.end(target)
