"""Maintenance train of `outlast roll`: hosts leave a run and come back, one after the other."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.cli.rank_hosts import RankHosts
from outlast.controller.planned_migration import NO_SPARE, ROLL
from outlast.errors import OutlastError, UsageError
from outlast.events import AnyEvent, GenerationOpened, Note
from outlast.launch.nodes.node_joining import open_ledger
from outlast.launch.notices import drain_requests, roll_record
from outlast.launch.notices.drain_requests import DrainRequest
from outlast.launch.notices.roll_record import RollingHost, RollRecord
from outlast.launch.terms.run_identity import RunningJob
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import POLL_S, EventReader
from outlast.text_formatting import duration, plural

_STATES = ("pending", "leaving", "away", "back")


class RollAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `outcome`: done | stopped (the same command goes on) | ended (the run) |
    cancelled."""

    outcome: Literal["done", "stopped", "ended", "cancelled"]
    text: str
    hosts: tuple[RollingHost, ...] = ()


class _StoppedError(Exception):
    """End of the command before the roll is done."""

    def __init__(self, outcome: Literal["stopped", "ended", "cancelled"], text: str) -> None:
        super().__init__(text)
        self.outcome: Literal["stopped", "ended", "cancelled"] = outcome


class MaintenanceTrain:
    """Roll of one run, driven by this process. `show` gets a line on each step."""

    def __init__(
        self,
        run_dir: Path,
        plan: RunPlan,
        job: RunningJob,
        timeout_s: float,
        show: Callable[[str], None],
    ) -> None:
        self._run_dir, self._plan, self._job = run_dir, plan, job
        self._timeout_s, self._show = timeout_s, show
        self._reader, self._places = EventReader(run_dir), RankHosts()
        self._driver = f"pid {os.getpid()} on {socket.gethostname()}"
        self._request = self._leaving = ""  # name and host of the newest request
        self._refusal = ""  # of the controller, for that request
        self._moved_n = -1
        self._pause = threading.Event()
        self._record: RollRecord

    def begin(self, hosts: str, *, every: bool) -> None:
        """Read the record of an earlier command, or make one. Raises RunDirError, UsageError."""
        self._look()
        self._places.must_run(self._run_dir)
        before = roll_record.read(self._run_dir)
        if before is not None and before.run != self._job.run:
            before = None  # of a run that was in this directory before
        if before is not None:
            self._record = replace(before, driver=self._driver)
            known = [each.host for each in before.hosts]
            given = known if every else self._checked(hosts)
            if before.is_all != every or given != known:
                flag = "--all" if before.is_all else f"--hosts {','.join(known)}"
                raise UsageError(
                    f"{self._run_dir}: a roll with {flag} has not ended ({self._situation()});"
                    " nothing was requested; give the same to go on, or --cancel"
                )
            self._show(f"going on with a roll: {self._situation()}")
        else:
            roll_record.remove(self._run_dir)
            names = self._all() if every else self._given(hosts)
            entries = tuple(RollingHost(host=name) for name in names)
            self._record = RollRecord(
                run=self._job.run, driver=self._driver, is_all=every, hosts=entries
            )
            self._must_have_spares(names)
        drain_requests.withdraw_leaves(self._run_dir, "")
        roll_record.adopt(self._run_dir, self._record)

    def _all(self) -> list[str]:
        names = sorted(set(self._places.alive().values()))
        if len(names) < 2:
            raise UsageError(
                f"--all: only {', '.join(names) or 'no host'} has workers, and no other host can"
                " take its ranks; nothing was requested"
            )
        return names

    def _given(self, hosts: str) -> list[str]:
        names = self._checked(hosts)
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(
                f"--hosts {hosts}: {twice.pop()} is there twice; nothing was requested"
            )
        alive = set(self._places.alive().values())
        if absent := [name for name in names if name not in alive]:
            raise UsageError(
                f"--hosts {hosts}: {absent[0]} has no workers now (hosts with workers:"
                f" {', '.join(sorted(alive))}); nothing was requested"
            )
        return names

    def _checked(self, hosts: str) -> list[str]:
        return [self._places.check_host(name, "--hosts") for name in _names(hosts)]

    def _must_have_spares(self, names: list[str]) -> None:
        """Raise UsageError if a host has more ranks than there are spares on the others."""
        for name in names:
            ranks = len(self._places.workers_on(name))
            count = sum(self._places.spares_beside(name))
            if count < ranks:
                raise UsageError(
                    f"{name} has {plural(ranks, 'rank')}, and the other hosts have"
                    f" {plural(count, 'spare')}: its ranks have no place; nothing was requested;"
                    " start the run with a spare node (--nnodes 2:3) or with --spares"
                )

    def run(self, pause_s: float) -> RollAnswer:
        """Let the hosts leave and come back in turn."""
        try:
            while (entry := self._next()) is not None:
                is_first = not self._record.names("back")
                if entry.state == "pending" and not is_first:
                    self._sit(pause_s)
                self._leave_and_return(entry)
        except _StoppedError as stop:
            self.withdraw()
            hosts = self._record.hosts
            if stop.outcome == "cancelled":
                roll_record.remove(self._run_dir)
                text = f"cancelled{rest_of(self._record.names('away'))}"
                return RollAnswer(outcome=stop.outcome, text=text, hosts=hosts)
            return RollAnswer(outcome=stop.outcome, text=f"{stop}; {self.stand()}", hosts=hosts)
        roll_record.remove(self._run_dir)
        count = plural(len(self._record.hosts), "host")
        text = f"{count} left the run and came back"
        return RollAnswer(outcome="done", text=text, hosts=self._record.hosts)

    def _next(self) -> RollingHost | None:
        """Return the host whose turn it is: one that is on its way; with --all, first those without
        ranks, and last that of the controller."""
        rest = [each for each in self._record.hosts if each.state != "back"]
        begun = [each for each in rest if each.state != "pending"]
        if begun or not rest or not self._record.is_all:
            return (begun or rest or [None])[0]
        leader = self._leader()
        return min(
            rest, key=lambda one: (one.host == leader, bool(self._places.workers_on(one.host)))
        )

    def _leader(self) -> str:
        """Return the host of the newest term's owner; "" if it cannot be read now."""
        with contextlib.suppress(OutlastError, OSError, msgspec.DecodeError):
            ledger = open_ledger(self._plan, self._job.run, self._job.home)
            newest = ledger.newest(max(0, self._job.term - 2))
            return newest.host if newest else ""
        return ""

    def _leave_and_return(self, entry: RollingHost) -> None:
        """Take a host from where it stands until a host has joined in its place."""
        host = entry.host
        if entry.state == "leaving" and self._places.releases[host] > entry.releases:
            entry = self._keep(replace(entry, state="away"))
        if entry.state in ("pending", "leaving"):
            entry = self._let_leave(entry)
        began_s = time.monotonic()
        self._show(
            f"{host} is not in the run now; service it, then start the same outlast run command on"
            f" it, or on a fresh host (waiting up to {duration(self._timeout_s)})"
        )
        self._wait(lambda: bool(self._successor(entry)), f"no host has come in place of {host}")
        successor, away_s = self._successor(entry), time.monotonic() - began_s
        self._keep(replace(entry, state="back", successor=successor, away_s=away_s))
        self._show(f"{successor} is in the run again, after {duration(away_s)}")

    def _let_leave(self, entry: RollingHost) -> RollingHost:
        """Ask a host to leave, and wait until it has; return its entry."""
        host, places = entry.host, self._places
        if host not in places.alive().values():
            self._show(f"{host} has no workers: it has left already, or is lost")
            return self._keep(replace(entry, state="away", workers=(), known=self._known()))
        few = f"{host} has {plural(self._ranks(host), 'rank')}, and too few spares were warm"
        self._wait(lambda: self._has_spares(host), few)
        ranks, began_s = self._ranks(host), time.monotonic()
        entry = self._keep(
            replace(
                entry,
                state="leaving",
                releases=places.releases[host],
                workers=tuple(name for name, at in places.alive().items() if at == host),
                known=self._known(),
                ranks=ranks,
            )
        )
        self._ask(host)
        self._show(f"{host}: {plural(ranks, 'rank')} to move, then it leaves the run")

        def is_released() -> bool:
            return places.releases[host] > entry.releases

        if ranks:
            what = f"the ranks of {host} have not moved"
            self._wait(lambda: self._moved_n >= 0 or is_released(), what)
            entry = replace(entry, n=self._moved_n, move_s=time.monotonic() - began_s)
            self._show(f"{host}: moved before phase {entry.n}, after {duration(entry.move_s)}")
        self._wait(is_released, f"{host} has not left the run")
        entry = self._keep(replace(entry, state="away", leave_s=time.monotonic() - began_s))
        self._show(f"{host} has left the run: its launcher ends")
        self.withdraw()
        return entry

    def _known(self) -> tuple[str, ...]:
        return tuple(sorted(set(self._places.hosts.values())))

    def _ranks(self, host: str) -> int:
        return len(self._places.workers_on(host))

    def _has_spares(self, host: str) -> bool:
        """Return whether the ranks of a host have places, and no other spare is still to come."""
        warm, starting = self._places.spares_beside(host)
        return warm >= self._ranks(host) and not starting

    def _successor(self, entry: RollingHost) -> str:
        """Return the host that has joined in place of one, by a warm worker; "" if none has."""
        for name, host in self._places.warm().items():
            is_back = host == entry.host and name not in entry.workers
            if is_back or host not in entry.known:
                return host
        return ""

    def _ask(self, host: str) -> None:
        self._request, self._leaving = drain_requests.fresh_name(), host
        self._refusal, self._moved_n = "", -1
        drain_requests.write(
            self._run_dir,
            DrainRequest(
                name=self._request,
                host=host,
                reason=f"outlast roll of {getpass.getuser()}",
                leaves=True,
            ),
        )

    def withdraw(self) -> None:
        """Take back what was asked of a host that has not left."""
        if self._request:
            drain_requests.withdraw_leaves(self._run_dir, "")

    def _keep(self, entry: RollingHost) -> RollingHost:
        self._record = self._record.with_host(entry)
        roll_record.write(self._run_dir, self._record)
        return entry

    def stand(self) -> str:
        """Return where the roll stands."""
        return f"the roll stands ({self._situation()}); the same command goes on, --cancel ends it"

    def _situation(self) -> str:
        found = ((state, self._record.names(state)) for state in _STATES)
        return "; ".join(f"{state}: {', '.join(names)}" for state, names in found if names)

    def _sit(self, pause_s: float) -> None:
        end_s = time.monotonic() + pause_s
        if pause_s:
            self._show(f"pause of {duration(pause_s)}")
        while time.monotonic() < end_s:
            self._turn(min(POLL_S, max(0.0, end_s - time.monotonic())))

    def _wait(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait until something is true. Raises _StoppedError."""
        end_s = time.monotonic() + self._timeout_s
        while not is_true():
            if time.monotonic() >= end_s:
                raise _StoppedError("stopped", f"{what} within {duration(self._timeout_s)}")
            self._turn(POLL_S)

    def _turn(self, wait_s: float) -> None:
        """Wait a moment, and read what has happened. Raises _StoppedError."""
        self._pause.wait(wait_s)
        self._look()
        if roll_record.is_cancelled(self._run_dir):
            raise _StoppedError("cancelled", "cancelled")
        if not self._places.is_running:
            raise _StoppedError("ended", "the run has ended")
        if self._refusal:
            raise _StoppedError("stopped", self._refusal)

    def _look(self) -> None:
        for event in self._reader.poll():
            self._places.take(event)
            self._take(event)

    def _take(self, event: AnyEvent) -> None:
        mark = f"{ROLL}: {self._request}"
        match event:
            case GenerationOpened() if not self._ranks(self._leaving):
                self._moved_n = event.n + 1
            case Note() if self._request and event.text.startswith(mark):
                if NO_SPARE in event.text:
                    self._show(f"{event.text}; waiting for spares")
                else:
                    self._refusal = event.text
            case _:
                pass


def rest_of(away: list[str]) -> str:
    """Return what the owner does about hosts that are away."""
    if not away:
        return "; no host is away for it"
    return f"; away: {', '.join(away)}: start the same outlast run command there, or leave it away"


def _names(hosts: str) -> list[str]:
    names = [name.strip() for name in hosts.split(",")]
    if not all(names):
        raise UsageError(f"--hosts {hosts}: one of the names is empty; nothing was requested")
    return names
