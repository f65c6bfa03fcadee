"""Dump of torch's flight recorder of this process, on request, when a rank hangs.

torch records by itself; nothing of this is on the path of a step. The file is torch's JSON with the
groups' members, which gloo's lacks, and without what the groups of earlier generations did:
`outlast fleet trace` reads it. NCCL's recorder is asked through the handler that torch has for
debuggers: unlike torch's function it lets go of Python's lock, which a device that does not answer
would hold for ever.
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
_MEMBERS_MAX = 4096  # of one group: above, the file would mostly hold these
_TAKEN_S = 0.2  # to copy the records needs milliseconds
NCCL = "dump_nccl_trace_json"  # torch's handler; not there where torch was built without NCCL


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
    """Write what was asked for and say so, unless `asked.until_ns` (CLOCK_MONOTONIC) has passed.

    On a thread of its own: what does not end, in torch or on a disk, holds nobody up. The control
    thread, on which this is called, waits until the records are copied, `_TAKEN_S` at most: what
    it hears next may be Close, which changes them.
    """
    if request.until_ns <= time.monotonic_ns():
        return  # of a moment that is over: this process stood still
    taken = threading.Event()
    writer = threading.Thread(
        target=_write, args=(request, place, groups, say, taken), name="outlast-trace", daemon=True
    )
    try:
        writer.start()
    except RuntimeError as error:  # as many threads as this process may have
        say(messages.Traced(folder=request.folder, error=str(error)))
        return
    taken.wait(_TAKEN_S)


def _write(
    request: messages.Trace,
    place: DumpPlace,
    groups: Mapping[str, tuple[int, ...]],
    say: Callable[[messages.Traced], None],
    taken: threading.Event,
) -> None:
    try:
        path = _path(request, place)
        gloo = c10d._dump_fr_trace_json()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        recorded = [gloo, *_of_nccl()]
        taken.set()
        _put(path, with_members(recorded, groups))
    except Exception as error:  # noqa: BLE001 - the agent waits for an answer, whatever it is
        say(messages.Traced(folder=request.folder, error=f"{type(error).__name__}: {error}"[:500]))
    else:
        say(messages.Traced(folder=request.folder))
    finally:
        taken.set()


def _path(request: messages.Trace, place: DumpPlace) -> Path:
    """Raises UsageError for names that lead elsewhere, and where there is no seat to name."""
    for name in (request.folder, request.host):
        if Path(name).name != name or name in ("", ".."):
            raise UsageError(f"{name!r} is no name for a trace")
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
    """Asks a handler for all that it has."""

    def body(self) -> bytes:
        return b""

    def params(self) -> dict[str, str]:
        return {}


class _Answer(c10d._Response):  # noqa: SLF001
    """Keeps what a handler says."""

    def __init__(self) -> None:
        super().__init__()
        self.text: str | bytes = ""

    def set_status(self, status: int) -> None:
        """Told before what is said; whatever it is, what is said is no dump then."""

    def set_content(self, content: str | bytes, content_type: str) -> None:  # noqa: ARG002
        self.text = content


def _of_nccl() -> list[bytes]:
    """NCCL's records. If a device does not answer this does not end, and nothing is written: a
    file without them would say that its rank entered nothing."""
    if NCCL not in c10d._get_handler_names():  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
        return []
    answer = _Answer()
    c10d._get_handler(NCCL)(_Question(), answer)  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
    return [answer.text if isinstance(answer.text, bytes) else answer.text.encode()]


def with_members(recorded: Sequence[bytes], groups: Mapping[str, tuple[int, ...]]) -> bytes:
    """Torch's JSON, of one recorder or several, with the members of `groups`, which are called
    NAME @GENERATION. What groups of other generations did is left out, and generations from the
    names. Records are numbered from 0, or from 1 where some have been written over."""
    dumps: list[dict[str, Any]] = [msgspec.json.decode(one) for one in recorded]
    kept: list[dict[str, Any]] = []
    lost = 0
    for each in dumps:
        entries = sorted(each.get("entries", ()), key=lambda entry: entry["record_id"])
        mine = [entry for entry in entries if _is_of_now(entry["process_group"][0], groups)]
        # Where something older is there, nothing of these has been written over.
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
    """Groups that the script made behind our back have no generation."""
    return name in groups or not name.rpartition(LIFE)[0]
