"""Dump of torch's flight recorder of this process, on request, when a rank hangs.

torch records anyway; this adds no cost to a step. The file is torch's JSON with the groups' members
(missing in gloo's) and without entries of earlier generations; `outlast fleet trace` reads it.
NCCL's recorder is read through torch's debug handler. Unlike torch's function, the handler releases
the GIL, which a device that does not respond would block forever. torch 2.15 accepts no request of
a Python class; there the function is used, and a process that it blocks is killed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch._C import _distributed_c10d as c10d

from outlast.errors import UsageError
from outlast.transport import messages
from outlast.worker.groups.inner_group import LIFE

ROOM = "traces"
_MEMBERS_MAX = 4096  # per group; bounds the file size
_TAKEN_S = 0.2  # time limit; copying the records takes milliseconds
NCCL = "dump_nccl_trace_json"  # torch's handler; missing if torch was built without NCCL


class DumpPlace(NamedTuple):
    """Writer and path of a dump."""

    run_dir: Path
    seat: int


def answer(
    request: messages.Trace,
    place: DumpPlace,
    groups: Mapping[str, tuple[int, ...]],
    say: Callable[[messages.Traced], None],
) -> None:
    """Write the dump and report it, unless `request.until_ns` (CLOCK_MONOTONIC) has passed.

    A thread writes, so that a hang in torch or on a disk blocks no other thread. The calling
    control thread waits at most `_TAKEN_S` for the copy of the records, since its next message may
    be Close, which changes them.
    """
    if request.until_ns <= time.monotonic_ns():
        return  # the request is too old: this process was stalled
    copied = threading.Event()
    writer = threading.Thread(
        target=_write, args=(request, place, groups, say, copied), name="outlast-trace", daemon=True
    )
    try:
        writer.start()
    except RuntimeError as error:  # thread limit of the process
        say(messages.Traced(folder=request.folder, error=str(error)))
        return
    copied.wait(_TAKEN_S)


def _write(
    request: messages.Trace,
    place: DumpPlace,
    groups: Mapping[str, tuple[int, ...]],
    say: Callable[[messages.Traced], None],
    copied: threading.Event,
) -> None:
    try:
        path = _path(request, place)
        gloo = c10d._dump_fr_trace_json()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        recorded = [gloo, *_of_nccl()]
        copied.set()
        _put(path, with_members(recorded, groups))
    except Exception as error:  # noqa: BLE001 - the agent waits for an answer, whatever the error
        say(messages.Traced(folder=request.folder, error=f"{type(error).__name__}: {error}"[:500]))
    else:
        say(messages.Traced(folder=request.folder))
    finally:
        copied.set()


def _path(request: messages.Trace, place: DumpPlace) -> Path:
    """Return the dump's path. Raises UsageError for unsafe names and without a seat."""
    for name in (request.folder, request.host):
        if Path(name).name != name or name in ("", ".."):
            raise UsageError(f"{name!r} is not a trace name")
    if place.seat < 0:
        raise UsageError("a worker without a seat has nothing to trace")
    return place.run_dir / ROOM / request.folder / f"rank_{place.seat}@{request.host}.json"


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class _Question(c10d._Request):  # noqa: SLF001
    """Request to a handler for all records."""

    def body(self) -> bytes:
        return b""

    def params(self) -> dict[str, str]:
        return {}


class _Answer(c10d._Response):  # noqa: SLF001
    """Response of a handler, kept in `text`."""

    def __init__(self) -> None:
        super().__init__()
        self.text: str | bytes = ""

    def set_status(self, status: int) -> None:
        """Ignore the status: a handler sets it only with a text that is no dump."""

    def set_content(self, content: str | bytes, content_type: str) -> None:  # noqa: ARG002
        self.text = content


def _of_nccl() -> list[bytes]:
    """Return NCCL's records. While a device does not respond, this blocks and no file is written: a
    file without NCCL's records would mean that the rank entered no collective."""
    if NCCL not in c10d._get_handler_names():  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        return []
    answer = _Answer()
    try:
        c10d._get_handler(NCCL)(_Question(), answer)  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        if "cast" not in str(error):  # torch 2.15 takes no parameters from Python
            raise
        return [c10d._dump_nccl_trace_json()]  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
    return [answer.text if isinstance(answer.text, bytes) else answer.text.encode()]


def with_members(recorded: Sequence[bytes], groups: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return torch's JSON of all recorders with the members of `groups` (NAME @GENERATION), without
    records of other generations; names lose their generation. Records are numbered from 0, or from
    1 if some were overwritten."""
    dumps: list[dict[str, Any]] = [msgspec.json.decode(dump) for dump in recorded]
    kept: list[dict[str, Any]] = []
    lost = 0
    for each in dumps:
        entries = sorted(each.get("entries", ()), key=lambda entry: entry["record_id"])
        mine = [entry for entry in entries if _is_of_now(entry["process_group"][0], groups)]
        # If an older record exists, none of these was overwritten.
        lost |= bool(mine) and len(mine) == len(entries) and mine[0]["record_id"] > 0
        kept += mine
    kept.sort(key=lambda entry: entry.get("time_created_ns", 0))
    dump = dumps[0]
    for at, entry in enumerate(kept):
        entry["record_id"] = at + lost
        name, *more = entry["process_group"]
        if name in groups:
            entry["process_group"] = [name.rpartition(LIFE)[0], *more]
    dump["entries"] = kept
    dump["pg_config"] = {
        name: {"name": name, "desc": "", "ranks": str(list(ranks))}
        for name, ranks in ((name.rpartition(LIFE)[0], ranks) for name, ranks in groups.items())
        if len(ranks) <= _MEMBERS_MAX
    }
    return msgspec.json.encode(dump)


def _is_of_now(name: str, groups: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a group is of this generation; groups made by the script itself have none."""
    return name in groups or not name.rpartition(LIFE)[0]
