"""Paths into JSON objects: `status.containerStatuses[0].state`, `labels."nvidia.com/gpu"`.

A step is a key, an index of a list (`[0]`, also `.0`), the elements of a list whose key has a value
(`conditions[type=Failed]`), or all elements (`[*]`). A key with dots stands in quotes, or as it is:
where an object has no key `nvidia`, its key `nvidia.com/gpu` is tried.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from outlast.errors import UsageError

STEPS_MAX = 32
_STEP = re.compile(
    r"""(?:^|\.)"(?P<quoted>[^"]*)" | \[(?P<inside>[^\[\]]*)\] | (?:^|\.)(?P<plain>[^.\[\]"]+)""",
    re.VERBOSE,
)


class Step(NamedTuple):
    """`key` of an object. `place`: in a list. `where`: key and value of a list's elements; two
    empty texts are all of them."""

    key: str = ""
    place: int | None = None
    where: tuple[str, str] | None = None


def parse(path: str) -> tuple[Step, ...]:
    """Return the steps of a path. Raises UsageError for one that is none."""
    steps: list[Step] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None or match.end() == at or len(steps) == STEPS_MAX:
            raise UsageError(
                f"{path!r} is no path: say one as status.containers[0].name,"
                ' conditions[type=Failed].time or labels."nvidia.com/gpu"'
            )
        steps.append(_step(match))
        at = match.end()
    return tuple(steps)


def find(value: Any, path: str, steps: tuple[Step, ...]) -> Any:
    """Return what an object has under a path, as a list where several; None where nothing."""
    if isinstance(value, dict) and path in value:
        return value[path]
    return _find(value, steps)


def _step(match: re.Match[str]) -> Step:
    if match["quoted"] is not None:
        return Step(key=match["quoted"])
    if (plain := match["plain"]) is not None:
        return Step(key=plain, place=int(plain) if plain.isdecimal() else None)
    inside = match["inside"].removeprefix("?").strip("()@. ")
    if inside.isdecimal():
        return Step(place=int(inside))
    if inside in ("", "*"):
        return Step(where=("", ""))
    key, equals, wanted = inside.partition("=")
    if equals:
        return Step(where=(key.strip(" ="), wanted.strip("= '\"")))
    return Step(key=inside.strip("'\""))


def _find(value: Any, steps: tuple[Step, ...]) -> Any:
    for nth, step in enumerate(steps):
        if isinstance(value, list):
            if step.where is not None:
                chosen = [one for one in value if _fits(one, step.where)]
                found = [_find(one, steps[nth + 1 :]) for one in chosen]
                there = [one for one in found if one is not None]
                return there[0] if len(there) == 1 else there or None
            if step.place is None or step.place >= len(value):
                return None
            value = value[step.place]
        elif isinstance(value, dict):
            if step.key not in value or not step.key:
                return _find_dotted(value, steps[nth:])
            value = value[step.key]
        else:
            return None
    return value


def _find_dotted(value: dict[str, Any], steps: tuple[Step, ...]) -> Any:
    """Return what stands under a key that has dots in it, the longest first."""
    for many in range(len(steps), 1, -1):
        if all(step.key for step in steps[:many]):
            key = ".".join(step.key for step in steps[:many])
            if key in value:
                return _find(value[key], steps[many:])
    return None


def _fits(one: Any, where: tuple[str, str]) -> bool:
    key, wanted = where
    if not key:
        return True
    return isinstance(one, dict) and str(one.get(key)) == wanted
