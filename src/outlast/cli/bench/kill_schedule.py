"""Published schedule of kills, and the thread that carries it out on a running job."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Literal

import msgspec

from outlast.cli.rank_hosts import RankHosts
from outlast.errors import ConfigError
from outlast.events import AnyEvent, PhaseDone, WorkerLost, WorkerSeated, WorkerSpawned
from outlast.launch.notices import drain_requests
from outlast.launch.notices.drain_requests import DrainRequest
from outlast.telemetry.event_store import EventReader

FIRST_S = 3.0  # before the first kill
KILLS_MAX = 100_000
# Steps of all ranks at the end, without kills: a rank that has ended its script cannot be replaced.
LAST_STEPS = 10
_POLL_S = 0.02

Fate = Literal["killed", "moved", "no-worker", "ended"]


class PlannedKill(msgspec.Struct, frozen=True, kw_only=True):
    """SIGKILL of the worker of a rank, in seconds after all ranks have completed the first step."""

    at_s: float
    rank: int


class KillSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Kills in order: exponential gaps of `every_s` on the average, each of a random rank."""

    version: int = 1
    seed: int
    every_s: float
    world: int
    kills: tuple[PlannedKill, ...]


class KillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A kill of the schedule in one run. `fate`: killed; moved (its worker had left in time);
    no-worker (none had the rank); ended (the run had ended, or was about to)."""

    at_s: float
    rank: int
    worker: str
    fate: Fate


def draw_schedule(seed: int, every_s: float, world: int, until_s: float) -> KillSchedule:
    """Return the schedule of a seed. A longer one begins with the same kills."""
    dice = random.Random(f"bench {seed}")
    at_s = FIRST_S + dice.expovariate(1 / every_s)
    kills: list[PlannedKill] = []
    while at_s < until_s and len(kills) < KILLS_MAX:
        kills.append(PlannedKill(at_s=round(at_s, 3), rank=dice.randrange(world)))
        at_s += dice.expovariate(1 / every_s)
    return KillSchedule(seed=seed, every_s=every_s, world=world, kills=tuple(kills))


def read_schedule(path: Path, world: int) -> KillSchedule:
    """Read a published schedule. Raises ConfigError for a file that is none for this world."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=KillSchedule)
    except OSError as error:
        raise ConfigError(f"--schedule {path}: {error.strerror}; nothing was started") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--schedule {path} is no schedule of kills ({error}); nothing was started"
        ) from error
    times_s = [kill.at_s for kill in found.kills]
    ranks = [kill.rank for kill in found.kills]
    if found.version != 1 or times_s != sorted(times_s) or (times_s and not times_s[0] >= 0):
        raise ConfigError(
            f"--schedule {path}: it is not of version 1, or its kills are not in order of time;"
            " nothing was started"
        )
    if found.world != world or any(not 0 <= rank < world for rank in ranks):
        raise ConfigError(
            f"--schedule {path} is for {found.world} ranks, and the job has {world}; nothing was"
            " started"
        )
    return found


class KillInjector(threading.Thread):
    """Kills workers of a running job by its schedule. `notice_s`: time before each kill at which
    its rank is asked to move; 0: no notices. `world`, `steps`: of the job."""

    def __init__(
        self,
        run_dir: Path,
        kills: tuple[PlannedKill, ...],
        world: int,
        steps: int,
        notice_s: float,
    ) -> None:
        super().__init__(name="outlast-bench-kills", daemon=True)
        self.records: list[KillRecord] = []
        self._run_dir, self._kills, self._notice_s = run_dir, kills, notice_s
        self._steps = steps - LAST_STEPS
        self._end = threading.Event()
        self._reader = EventReader(run_dir, lambda _damage: None)
        self._hosts = RankHosts()
        self._pids: dict[str, int] = {}
        self._starting: dict[int, str] = {}  # rank -> the newest worker that was started for it
        self._first_ns: dict[int, int] = {}  # rank -> end of its first step
        self._done: set[tuple[int, int]] = set()  # ranks and steps
        self._world = world
        self._noticed: dict[int, str] = {}  # number of the kill -> worker that was asked to move

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._end.set()
        self.join(10.0)

    def run(self) -> None:
        """Carry out the schedule until it or the job has ended."""
        done = 0
        while done < len(self._kills) and not self._end.wait(_POLL_S):
            for event in self._reader.poll():
                self._take(event)
            if len(self._first_ns) < self._world:
                continue
            passed_s = (time.time_ns() - max(self._first_ns.values())) / 1e9
            for number in range(done, len(self._kills)):
                if self._notice_s and passed_s >= self._kills[number].at_s - self._notice_s:
                    self._notify(number)
            while done < len(self._kills) and passed_s >= self._kills[done].at_s:
                self._strike(done)
                done += 1

    def _take(self, event: AnyEvent) -> None:
        self._hosts.take(event)
        match event:
            case WorkerSpawned():
                self._pids[event.worker] = event.pid
                if event.seat >= 0:
                    self._starting[event.seat] = event.worker
            case WorkerSeated():
                self._starting[event.seat] = event.worker
            case WorkerLost():
                self._pids.pop(event.worker, None)
            case PhaseDone(kind="step"):
                self._first_ns.setdefault(event.seat, event.t_ns)
                self._done.add((event.seat, event.step))
            case _:
                pass

    def _notify(self, number: int) -> None:
        rank = self._kills[number].rank
        worker = self._hosts.ranks.get(rank, "")
        if number in self._noticed or not worker:
            return
        self._noticed[number] = worker
        request = DrainRequest(
            name=drain_requests.fresh_name(),
            host=self._hosts.hosts[worker],
            worker=worker,
            rank=rank,
            reason=f"outlast bench: a kill in {self._notice_s:g} s",
        )
        drain_requests.write(self._run_dir, request)

    def _strike(self, number: int) -> None:
        kill = self._kills[number]
        worker = self._noticed.get(number) or self._starting.get(kill.rank, "")
        pid = self._pids.get(worker, 0)
        fate: Fate = "killed"
        if len(self._done) >= self._steps * self._world:
            fate = "ended"
        elif not pid:
            fate = "moved" if number in self._noticed else "no-worker"
        else:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is no event yet
                os.kill(pid, signal.SIGKILL)
        self.records.append(KillRecord(at_s=kill.at_s, rank=kill.rank, worker=worker, fate=fate))
