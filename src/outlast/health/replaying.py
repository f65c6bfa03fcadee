"""A recording held against other settings than it was made with: what these expect, and nobody
looked at, is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from outlast.health.probing import Taken
from outlast.health.settings import Settings

EXPECTED_BY = {
    "gpu": "gpus", "leftover": "gpus", "disk": "disks", "smart": "disks", "service": "services",
    "matmul": "compute",
}  # fmt: skip
"""Checks by whose part of the settings a probe says that a node need not have something."""
_NOT_SEEN = "it was not looked at when this was recorded"


def held_against(taken: Iterable[Taken], now: Settings, before: Settings) -> list[Taken]:
    """`before`: the settings of the recording."""
    if now == before:
        return list(taken)
    known = [_expected(one, now, before) for one in taken]
    mounts = [one for one in known if one.check == "mount"]
    if mounts:
        seen = {one.device for one in mounts}
        known += [
            replace(mounts[0], device=path, **_failed(_NOT_SEEN))
            for path in now.mounts.expected
            if path not in seen and path not in now.mounts.ignore
        ]
    return known


def _expected(one: Taken, now: Settings, before: Settings) -> Taken:
    part = EXPECTED_BY.get(one.check)
    if not one.absent or part is None or getattr(now, part) == getattr(before, part):
        return one
    return replace(one, **_failed(f"{_NOT_SEEN}: {one.absent}"))


def _failed(why: str) -> dict[str, Any]:
    bare = Taken(check="", device="", t_ns=0, took_s=0.0, failed=why)
    return {name: getattr(bare, name) for name in ("sample", "absent", "failed", "late", "stuck")}
