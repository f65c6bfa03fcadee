"""Stacks of workers from py-spy, which reads them from outside without their help."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from outlast.launch.host.worker_pool import WorkerHandle
from outlast.text_formatting import plural

DUMP_S = 10.0
RANKS_MAX = 64  # whose stacks are read
_AT_ONCE = 4
_LIBRARIES = ("site-packages", "/lib/python", "<")


class _Frame(msgspec.Struct):
    name: str
    filename: str
    short_filename: str | None
    line: int

    @property
    def place(self) -> str:
        return f"{self.name} ({self.short_filename or self.filename}:{self.line})"

    @property
    def is_of_script(self) -> bool:
        return not any(part in self.filename for part in _LIBRARIES)


class _Thread(msgspec.Struct):
    thread_name: str | None
    frames: list[_Frame]

    def text(self) -> str:
        lines = [f"    {frame.name} ({frame.filename}:{frame.line})" for frame in self.frames]
        return "\n".join([f"Thread {self.thread_name}", *lines, ""])


def find_py_spy() -> str | None:
    """Return the path of py-spy, on the search path or beside this interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.is_file() else None)


async def describe_standstill(workers: Sequence[WorkerHandle], folder: Path) -> str:
    """Write the stacks of the workers to `folder`, a file a rank; return one sentence with the
    calls that each rank's main thread is in, or with the command that shows them."""
    program = find_py_spy()
    if program is None:
        pids = ", ".join(f"rank {each.seat}: pid {each.process.pid}" for each in workers)
        return f"to see where it stands, install py-spy, and: py-spy dump --pid PID ({pids})"
    turn = asyncio.Semaphore(_AT_ONCE)

    async def place_of(worker: WorkerHandle) -> str:
        async with turn:
            return await asyncio.to_thread(_dump, program, worker.process.pid, worker.seat, folder)

    examined = workers[:RANKS_MAX]
    try:
        places = await asyncio.gather(*map(place_of, examined))
    except OSError as error:
        return f"the stacks cannot be written: {error}"
    ranks: dict[str, list[int]] = {}
    for worker, place in zip(examined, places, strict=True):
        ranks.setdefault(place, []).append(worker.seat)
    parts = [f"{_ranks(seats)} {place}" for place, seats in ranks.items()]
    return f"{'; '.join(parts)}; stacks: {folder}"


def _ranks(seats: list[int]) -> str:
    if len(seats) > 4:
        return f"{plural(len(seats), 'rank')} ({seats[0]} to {seats[-1]})"
    return f"rank{'s' if len(seats) > 1 else ''} {', '.join(map(str, seats))}"


def _dump(program: str, pid: int, seat: int, folder: Path) -> str:
    """Write one rank's stacks; return where its main thread is. Raises OSError."""
    try:
        done = subprocess.run(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DUMP_S,
            check=False,
        )
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            return f"has no stack ({words[0] if words else 'py-spy failed'})"
        threads = msgspec.json.decode(done.stdout, type=list[_Thread])
    except subprocess.TimeoutExpired:
        return f"has no stack (py-spy took {DUMP_S:g} s)"
    except msgspec.DecodeError as error:
        return f"has no stack (py-spy: {error})"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{seat}.txt").write_text("\n".join(each.text() for each in threads))
    return _place(threads)


def _place(threads: list[_Thread]) -> str:
    """Return the innermost call of the main thread, and the script's call that led there."""
    main = next((one for one in threads if one.thread_name == "MainThread"), None)
    frames = main.frames if main else threads[0].frames if threads else []
    if not frames:
        return "runs no Python code"
    own = next((frame for frame in frames if frame.is_of_script), None)
    if own is None or own is frames[0]:
        return f"in {frames[0].place}"
    return f"in {frames[0].place}, called from {own.place}"
