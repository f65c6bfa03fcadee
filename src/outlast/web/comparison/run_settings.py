"""Settings and versions of a run, as its directory records them, and their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from outlast.launch.terms.run_identity import checkpoints_of

BYTES_MAX = 4 << 20  # of a file
_SAME_RUN = ("run_dir",)  # differ between any two runs
_ERRORS = (OSError, msgspec.DecodeError, RecursionError, ValueError)


class RunSettings(NamedTuple):
    """Settings by dotted key, and versions by name. `missing`: what is unknown, and why."""

    settings: Mapping[str, str]
    versions: Mapping[str, str]
    missing: tuple[str, ...]


class Difference(NamedTuple):
    """A setting or version of two runs; None where a run has none."""

    key: str
    first: str | None
    second: str | None


class _Plan(msgspec.Struct):
    plan: dict[str, Any]


class _Commit(msgspec.Struct):
    origin: dict[str, str]
    time_ns: int = 0


def read_settings(run_dir: Path) -> RunSettings:
    """Read the plan of a run's newest launcher, and the origin of its newest checkpoint."""
    missing = []
    settings: dict[str, str] = {}
    versions: dict[str, str] = {}
    try:
        plan = msgspec.json.decode(_bytes(run_dir / "plan.json", run_dir), type=_Plan).plan
        settings = {key: text for key, text in _flat("", plan) if key not in _SAME_RUN}
    except _ERRORS as error:
        missing.append(f"settings are unknown: plan.json cannot be read ({_why(error)})")
    try:
        root = checkpoints_of(run_dir)
        commits = (_commit(path, root) for path in root.glob("step-*/commit.json"))
        versions = max(commits, key=lambda commit: commit.time_ns).origin
    except _ERRORS as error:
        why = "it has no checkpoint" if type(error) is ValueError else _why(error)
        missing.append(f"versions are unknown: {why}")
    return RunSettings(settings, versions, tuple(missing))


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[Difference]:
    """Return what differs, by key."""
    keys = sorted({*first, *second})
    return [
        Difference(key, first.get(key), second.get(key))
        for key in keys
        if first.get(key) != second.get(key)
    ]


def _commit(path: Path, root: Path) -> _Commit:
    return msgspec.json.decode(_bytes(path, root), type=_Commit)


def _bytes(path: Path, root: Path) -> bytes:
    """Return a file's content. Raises OSError for one that is too large or outside of `root`."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise OSError(f"{path} leads out of the run directory")
    if path.stat().st_size > BYTES_MAX:
        raise OSError(f"{path} is larger than {BYTES_MAX:,} bytes")
    return path.read_bytes()


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the settings of a plan; a list is one setting."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield prefix, text


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
