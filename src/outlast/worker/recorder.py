"""What torch's flight recorder has of this process, as a file: asked for when somebody hangs.

torch records by itself; nothing of this is on the path of a step. The file is torch's JSON with the
groups' members, which gloo's lacks: `outlast fleet trace` reads it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch._C import _distributed_c10d as c10d

from outlast import wire

_MEMBERS_MAX = 4096  # of one group: above, the file would mostly hold these


def answer(
    asked: wire.Trace,
    run_dir: Path,
    seat: int,
    groups: Mapping[str, tuple[int, ...]],
    say: Callable[[wire.Traced], None],
) -> None:
    """Write what was asked for and say so, within `asked.until_ns` (CLOCK_MONOTONIC).

    On a thread of its own: what does not end, in torch or on a disk, holds nobody up, and the
    control thread, on which this is called, goes on with what it hears next.
    """
    left_s = (asked.until_ns - time.monotonic_ns()) / 1e9
    if left_s <= 0:
        return  # of a moment that is over: this process stood still
    writer = threading.Thread(
        target=_write, args=(asked, run_dir, seat, groups, say), name="outlast-trace", daemon=True
    )
    writer.start()
    writer.join(left_s)


def _write(
    asked: wire.Trace,
    run_dir: Path,
    seat: int,
    groups: Mapping[str, tuple[int, ...]],
    say: Callable[[wire.Traced], None],
) -> None:
    try:
        path = run_dir / asked.folder / f"rank_{seat}@{asked.host}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(_dump(groups))
        temporary.replace(path)
    except (OSError, RuntimeError, AttributeError, msgspec.DecodeError) as error:
        say(wire.Traced(error=f"{type(error).__name__}: {error}"[:500]))
    else:
        say(wire.Traced())


def _dump(groups: Mapping[str, tuple[int, ...]]) -> bytes:
    recorded: bytes = c10d._dump_fr_trace_json()  # noqa: SLF001 # pyright: ignore[reportAttributeAccessIssue]
    dump: dict[str, Any] = msgspec.json.decode(recorded)
    dump["pg_config"] = {
        name: {"name": name, "desc": "", "ranks": str(list(ranks))}
        for name, ranks in groups.items()
        if len(ranks) <= _MEMBERS_MAX
    }
    return msgspec.json.encode(dump)
