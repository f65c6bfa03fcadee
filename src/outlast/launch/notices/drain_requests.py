"""Requests of operators that ranks leave a host: one file each in DIR/notices.

`outlast drain` writes them on any host that has the run directory; the controller's node reads
them each LOOK_S. A start of the run removes those of earlier launches, a takeover does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from outlast.atomic_files import replace_file
from outlast.controller.planned_migration import ROLL
from outlast.errors import RunDirError
from outlast.events import Warned
from outlast.launch.nodes import slurm_drains
from outlast.telemetry.event_store import EventClock

CHECK = "operator"
CHECKS = (CHECK, ROLL)
SYMPTOM = "node-drain"
FOLDER = "notices"
LOOK_S = 0.5
REQUESTS_MAX = 4096
BYTES_MAX = 64 << 10
TEXT_MAX = 500  # characters
PAST_S = 1e-3  # of a deadline that is over: it stays one


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request that a host's ranks, or the rank that `worker` has, be elsewhere in `within_s` (0:
    no deadline). Times are of the host that wrote it, and are read after a takeover alone."""

    name: str
    host: str
    worker: str = ""  # "": all ranks of the host
    rank: int = -1
    within_s: float = 0.0
    until_s: float = 0.0  # the same, as seconds since 1970
    reason: str = ""
    leaves: bool = False  # the host leaves the run, once its ranks have moved


def write(run_dir: Path, request: DrainRequest) -> None:
    """Add a request to a run. Raises RunDirError."""
    folder = run_dir / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"{request.name}.json", msgspec.json.encode(request))
    except OSError as error:
        raise RunDirError(
            f"{folder} cannot be written ({error.strerror}); nothing was requested"
        ) from error


def withdraw(run_dir: Path, host: str, rank: int) -> list[DrainRequest]:
    """Remove the requests for a rank, or those for a whole host; return them. Those of `outlast
    roll` stay. Raises RunDirError."""
    found = [
        one
        for one in read(run_dir, lambda _: None)
        if (one.rank == rank if rank >= 0 else one.host == host and one.rank < 0) and not one.leaves
    ]
    _remove(run_dir, found)
    return found


def withdraw_leaves(run_dir: Path, host: str) -> list[DrainRequest]:
    """Remove the requests that a host leaves the run ("": any host); return them. Raises
    RunDirError."""
    found = [one for one in read(run_dir, lambda _: None) if one.leaves and host in ("", one.host)]
    _remove(run_dir, found)
    return found


def _remove(run_dir: Path, requests: list[DrainRequest]) -> None:
    try:
        for one in requests:
            (run_dir / FOLDER / f"{one.name}.json").unlink(missing_ok=True)
    except OSError as error:
        raise RunDirError(f"{run_dir / FOLDER} cannot be written ({error.strerror})") from error


def read(run_dir: Path, note: Callable[[str], None]) -> list[DrainRequest]:
    """Return all requests, oldest first; `note` gets a text for each file that is none."""
    found: list[DrainRequest] = []
    with contextlib.suppress(OSError):  # none was written
        for path in sorted((run_dir / FOLDER).iterdir())[:REQUESTS_MAX]:
            if path.suffix != ".json":
                continue  # a draft
            try:
                with path.open("rb") as file:
                    data = file.read(BYTES_MAX)
                request = msgspec.json.decode(data, type=DrainRequest)
            except FileNotFoundError:
                continue
            except (OSError, msgspec.DecodeError) as error:
                note(f"{path} is no request to drain, and is ignored: {error}")
                continue
            found.append(msgspec.structs.replace(request, name=path.stem))
    return found


def clear(run_dir: Path) -> None:
    """Remove the requests to earlier launches: their hosts may have come back."""
    with contextlib.suppress(OSError):
        for path in (run_dir / FOLDER).iterdir():
            path.unlink(missing_ok=True)


class DrainWatch:
    """Requests of one run with the time that remains of each deadline.

    It counts from the moment at which this host first read the request, so that no clocks are
    compared. What was there at the beginning is of an earlier controller: there the clock of the
    host that wrote it counts, and never gives more time than was given at first.
    """

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._run_dir, self._note = run_dir, note
        self._ends: dict[str, float] = {}  # by name, as time.monotonic has it
        self._noted: set[str] = set()
        self._is_first = True

    def look(self) -> tuple[Warned, ...]:
        """Return a finding for each request."""
        requests, now_s = read(self._run_dir, self._note_once), time.monotonic()
        for one in requests:
            rest_s = one.within_s
            if self._is_first and one.until_s:
                rest_s = min(rest_s, max(0.0, one.until_s - EventClock().now_ns() / 1e9))
            self._ends.setdefault(one.name, now_s + rest_s)
        self._is_first = False
        return tuple(self._finding(one, now_s) for one in requests)

    def _finding(self, one: DrainRequest, now_s: float) -> Warned:
        rest_s = max(PAST_S, self._ends[one.name] - now_s) if one.within_s > 0 else 0.0
        text = one.reason[:TEXT_MAX]
        return Warned(
            t_ns=0,
            host=one.host,
            check=ROLL if one.leaves else CHECK,
            symptom=SYMPTOM,
            severity="drain",
            code=one.name,
            device=f"rank {one.rank}" if one.rank >= 0 else "",
            detail="".join(each if each.isprintable() else " " for each in text),
            worker=one.worker,
            within_s=rest_s,
        )

    def _note_once(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < REQUESTS_MAX:
            self._noted.add(text)
            self._note(text)


async def watch(
    run_dir: Path, tell: Callable[[str, tuple[Warned, ...]], None], note: Callable[[str], None]
) -> None:
    """Report the requests of a run after each look, as long as there are some, until cancelled."""
    requests, had_some = DrainWatch(run_dir, note), False
    while True:
        found = await asyncio.to_thread(requests.look)
        for check in CHECKS if found or had_some else ():
            tell(check, tuple(one for one in found if one.check == check))
        had_some = bool(found)
        await asyncio.sleep(LOOK_S)


def begin(
    run_dir: Path,
    tell: Callable[[str, tuple[Warned, ...]], None],
    note: Callable[[str], None],
    *,
    is_start: bool,
) -> list[asyncio.Task[None]]:
    """Begin to watch requests and the drains of Slurm, on the controller's node. `is_start`: no
    takeover, so that requests to earlier launches are removed."""
    if is_start:
        clear(run_dir)
    watches = (
        watch(run_dir, tell, note),
        slurm_drains.watch(partial(tell, slurm_drains.CHECK), note),
    )
    return [asyncio.create_task(each) for each in watches]


def fresh_name() -> str:
    """Return a name that sorts by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
