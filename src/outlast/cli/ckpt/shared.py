"""What a checkpoint keeps beside tensors, in short: one line for each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.checkpoint.catalog import Checkpoint
from outlast.errors import MismatchError

_LINE_MAX = 200


def values_in(checkpoint: Checkpoint) -> dict[str, str]:
    """Each part of the shared value with what it holds. Raises ModuleNotFoundError without torch,
    CorruptionError or StorageError as reading does."""
    from outlast.checkpoint import tree
    from outlast.checkpoint.reader import Reader

    try:
        shared = tree.decode(Reader(checkpoint).blob(0, "shared"))
    except MismatchError:
        return {}
    if not isinstance(shared, dict):
        return {"shared": _short(shared)}
    if "kinds" not in shared:
        return {str(name): _short(value) for name, value in shared.items()}
    said = {name: _part(shared, name, kind) for name, kind in shared["kinds"].items()}
    said |= {name: _short(value) for name, value in shared.get("imported", {}).items()}
    return said


def _part(shared: Mapping[str, Any], name: str, kind: str) -> str:
    what = shared["classes"].get(name) or kind
    if name in shared["optimizers"]:
        groups = shared["optimizers"][name]["groups"]["value"]
        return f"{what}: " + "; ".join(map(_short, groups))
    for room in ("objects", "values"):
        if name in shared[room]:
            value = _short(shared[room][name]["value"])
            return value if room == "values" else f"{what}: {value}"
    return what


def _short(value: Any) -> str:
    """A value on one line, as Python says it."""
    if isinstance(value, dict):
        text = ", ".join(f"{key}={item!r}" for key, item in value.items())
    else:
        text = repr(value)
    line = " ".join(text.split())
    return line if len(line) <= _LINE_MAX else line[: _LINE_MAX - 3] + "..."
