"""`outlast drain`: request that a running job leaves a rank's place, or a host."""

from __future__ import annotations

import getpass
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from outlast import quantities
from outlast.cli.output_stream import echo, print_json
from outlast.cli.rank_hosts import RankHosts
from outlast.errors import EXIT_DONE, EXIT_USER_ERROR, ConfigError, RunDirError, UsageError
from outlast.events import Decided, GenerationOpened, Note, RunEnded, Warned
from outlast.launch.notices import drain_requests
from outlast.launch.notices.drain_requests import DrainRequest
from outlast.telemetry.event_store import POLL_S, EventReader
from outlast.text_formatting import duration


class DrainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `outcome`: moved | without-ranks | stays (for now; the request remains in
    force) | ended (the run, done or resumable) | failed (the run) | withdrawn. `n`: the phase
    before which the ranks moved; -1: they did not. `waited_s`: since the request. `notes`: of the
    run on the request, before that."""

    outcome: Literal["moved", "without-ranks", "stays", "ended", "failed", "withdrawn"]
    text: str
    n: int = -1
    waited_s: float = 0.0
    notes: tuple[str, ...] = ()


def drain(
    run_dir: Path,
    *,
    rank: int | None = None,
    host: str | None = None,
    by: str = "",
    reason: str = "",
    cancel: bool = False,
    json: bool = False,
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
    json
        Print the answer as JSON.
    timeout_s
        Time limit in seconds for the wait.
    """
    if (rank is None) == (host is None):
        raise UsageError("give either --rank or --host")
    if not timeout_s > 0:
        raise ConfigError(f"--timeout {timeout_s}: must be above 0 seconds")
    reader = EventReader(run_dir)
    places = RankHosts(reader.poll())
    if cancel:
        withdrawn = drain_requests.withdraw(run_dir, host or "", -1 if rank is None else rank)
        text = f"{len(withdrawn)} request(s) were withdrawn; ranks that have moved stay"
        return _tell(DrainAnswer(outcome="withdrawn", text=text), json)
    places.must_run(run_dir)
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
    show = (lambda _text: None) if json else echo
    return _tell(_wait(reader, request, leaving, timeout_s, show), json)


def _tell(answer: DrainAnswer, json: bool) -> int:
    """Print an answer; return the exit code."""
    if json:
        print_json(answer)
    else:
        echo(answer.text)
    return EXIT_USER_ERROR if answer.outcome in ("stays", "failed") else EXIT_DONE


def _wait(
    reader: EventReader,
    request: DrainRequest,
    leaving: set[str],
    timeout_s: float,
    show: Callable[[str], None],
) -> DrainAnswer:
    """Wait for what becomes of a request; `show` gets the run's notes on it. Raises RunDirError at
    the time limit."""
    began_s, pause, moved = time.monotonic(), threading.Event(), set[str]()
    mark, notes = f"{drain_requests.CHECK}: {request.name}", list[str]()
    while (waited_s := time.monotonic() - began_s) < timeout_s:
        for event in reader.poll():
            match event:
                case Warned(code=request.name, severity="drain") if not leaving:
                    text = f"{request.host} has no ranks; its spares are used last"
                    return DrainAnswer(outcome="without-ranks", text=text, waited_s=waited_s)
                case Decided():
                    moved |= {old for _, old, _ in event.replaced}
                case GenerationOpened() if leaving and leaving <= moved:
                    n, known = event.n + 1, tuple(notes)
                    text = f"moved before phase {n}, {duration(waited_s)} after the request"
                    return DrainAnswer(
                        outcome="moved", text=text, n=n, waited_s=waited_s, notes=known
                    )
                case Note() if event.text.startswith(mark):
                    notes.append(event.text)
                    show(event.text)
                    if not request.within_s:
                        text = "the request remains in force; --cancel withdraws it"
                        known = tuple(notes)
                        return DrainAnswer(
                            outcome="stays", text=text, waited_s=waited_s, notes=known
                        )
                case RunEnded():
                    is_kept = event.outcome in ("interrupted", "done")
                    return DrainAnswer(
                        outcome="ended" if is_kept else "failed",
                        text=f"the run ended ({event.outcome}, step {event.step})",
                        waited_s=waited_s,
                        notes=tuple(notes),
                    )
                case _:
                    pass
        pause.wait(POLL_S)
    raise RunDirError(
        f"nothing moved within {duration(timeout_s)}; the request remains in force: --cancel"
        " withdraws it"
    )
