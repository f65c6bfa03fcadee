"""`outlast drain`: request that a running job leaves a rank's place, or a host."""

from __future__ import annotations

import getpass
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from outlast import quantities
from outlast.cli.output_stream import echo
from outlast.errors import EXIT_DONE, EXIT_USER_ERROR, ConfigError, RunDirError, UsageError
from outlast.events import (
    AnyEvent,
    Decided,
    GenerationOpened,
    Note,
    RunEnded,
    RunStarted,
    Warned,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
)
from outlast.launch.notices import drain_requests
from outlast.launch.notices.drain_requests import DrainRequest
from outlast.telemetry.event_store import POLL_S, EventReader
from outlast.text_formatting import duration


def drain(
    run_dir: Path,
    *,
    rank: int | None = None,
    host: str | None = None,
    by: str = "",
    reason: str = "",
    cancel: bool = False,
    timeout_s: Annotated[float, Parameter(name="--timeout")] = 600.0,
) -> int:
    """Move a rank, or all ranks of a host, of a running job to spares.

    Ranks move between two steps, as soon as warm spares fit; until then the request
    remains in force. If no spare fits and it has a deadline, the job saves a
    checkpoint at once, and ends behind another one before the deadline; the same
    `outlast run` command resumes it.

    Exit code 1: nothing moved and the job goes on; the reason is printed.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start.
    rank
        Rank that moves.
    host
        Host whose ranks move, as `outlast events` names it.
    by
        Deadline: a duration such as 90s or 10min, or a time such as 17:30 or
        2026-11-28T17:30:00+01:00. Default: none.
    reason
        Reason, for the events of the run.
    cancel
        Withdraw earlier requests for this rank or host.
    timeout_s
        Time limit in seconds for the wait.
    """
    if (rank is None) == (host is None):
        raise UsageError("give either --rank or --host")
    if not timeout_s > 0:
        raise ConfigError(f"--timeout {timeout_s}: must be above 0 seconds")
    reader = EventReader(run_dir)
    places = _Places(reader.poll())
    if cancel:
        withdrawn = drain_requests.withdraw(run_dir, host or "", -1 if rank is None else rank)
        echo(f"{len(withdrawn)} request(s) were withdrawn; ranks that have moved stay")
        return EXIT_DONE
    if not places.is_running:
        raise RunDirError(f"{run_dir}: the run has ended; nothing was requested")
    within_s = quantities.seconds_until(by, "--by") if by else 0.0
    worker = places.worker_of(rank) if rank is not None else ""
    request = DrainRequest(
        name=drain_requests.fresh_name(),
        host=places.hosts[worker] if worker else places.check_host(host or ""),
        worker=worker,
        rank=-1 if rank is None else rank,
        within_s=within_s,
        until_s=time.time() + within_s if by else 0.0,
        reason=f"{getpass.getuser()}: {reason}" if reason else f"requested by {getpass.getuser()}",
    )
    leaving = {worker} if worker else places.workers_on(request.host)
    drain_requests.write(run_dir, request)
    return _wait(reader, request, leaving, timeout_s)


class _Places:
    """Workers of ranks, and hosts of workers, by the events so far."""

    def __init__(self, before: Iterable[AnyEvent]) -> None:
        self.is_running = False
        self.hosts: dict[str, str] = {}
        self.ranks: dict[int, str] = {}
        for event in before:
            match event:
                case RunStarted():
                    self.is_running, self.hosts, self.ranks = True, {}, {}
                case RunEnded():
                    self.is_running = False
                case WorkerSpawned():
                    self.hosts[event.worker] = event.host
                case WorkerSeated():
                    self.ranks[event.seat] = event.worker
                case WorkerLost() if self.ranks.get(event.seat) == event.worker:
                    del self.ranks[event.seat]
                case _:
                    pass

    def worker_of(self, rank: int) -> str:
        """Return the worker of a rank. Raises UsageError."""
        worker = self.ranks.get(rank, "")
        if worker not in self.hosts:
            known = ", ".join(map(str, sorted(self.ranks))) or "none"
            raise UsageError(
                f"--rank {rank}: no worker has this rank now (ranks with a worker: {known});"
                " nothing was requested"
            )
        return worker

    def check_host(self, host: str) -> str:
        """Return the host if it has or had workers. Raises UsageError."""
        known = sorted(set(self.hosts.values()))
        found = [one for one in known if host in (one, one.partition(".")[0])]
        if len(found) != 1:
            raise UsageError(
                f"--host {host}: not a host of this run (hosts: {', '.join(known) or 'none'});"
                " nothing was requested"
            )
        return found[0]

    def workers_on(self, host: str) -> set[str]:
        """Return the workers of the ranks on a host."""
        return {name for name in self.ranks.values() if self.hosts.get(name) == host}


def _wait(reader: EventReader, request: DrainRequest, leaving: set[str], timeout_s: float) -> int:
    """Print what becomes of a request; return the exit code."""
    began_s, pause, moved = time.monotonic(), threading.Event(), set[str]()
    mark = f"{drain_requests.CHECK}: {request.name}"
    while time.monotonic() - began_s < timeout_s:
        for event in reader.poll():
            match event:
                case Warned(code=request.name, severity="drain") if not leaving:
                    echo(f"{request.host} has no ranks; its spares are used last")
                    return EXIT_DONE
                case Decided():
                    moved |= {old for _, old, _ in event.replaced}
                case GenerationOpened() if leaving and leaving <= moved:
                    after = duration(time.monotonic() - began_s)
                    echo(f"moved before phase {event.n + 1}, {after} after the request")
                    return EXIT_DONE
                case Note() if event.text.startswith(mark):
                    echo(event.text)
                    if not request.within_s:
                        echo("the request remains in force; --cancel withdraws it")
                        return EXIT_USER_ERROR
                case RunEnded():
                    echo(f"the run ended ({event.outcome}, step {event.step})")
                    return (
                        EXIT_DONE if event.outcome in ("interrupted", "done") else EXIT_USER_ERROR
                    )
                case _:
                    pass
        pause.wait(POLL_S)
    raise RunDirError(
        f"nothing moved within {duration(timeout_s)}; the request remains in force: --cancel"
        " withdraws it"
    )
