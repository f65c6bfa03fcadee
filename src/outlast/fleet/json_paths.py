"""Paths into JSON objects: `status.containerStatuses[0].state`, `labels."nvidia.com/gpu"`.

A step is a key, an index of a list (`[0]`, also `.0`), the elements of a list whose keys have
values (`conditions[type=Failed]`, `conditions[type=Ready,status=False]`), or all elements (`[*]`).
A key with dots stands in quotes, or as it is: where an object has no key `nvidia`, its key
`nvidia.com/gpu` is tried.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from outlast.errors import UsageError

STEPS_MAX = 32
NOT_TRUE = "a condition that is not True"
"""Stands for the time at which a condition of Kubernetes became False, where a path names its type
alone: `Admitted` is False from when a workload was evicted, and so no time of a start."""
_CHANGES = (["lastTransitionTime"], ["lastUpdateTime"])
_STEP = re.compile(
    r"""(?:^|\.)"(?P<quoted>[^"]*)" | \[(?P<inside>[^\[\]]*)\] | (?:^|\.)(?P<plain>[^.\[\]"]+)""",
    re.VERBOSE,
)
_AND = re.compile(r"\s*(?:,|&&)\s*(?=[@.\w/-]+\s*=)")


class Step(NamedTuple):
    """`key` of an object. `place`: in a list. `where`: keys and values of a list's elements, all
    of them where there is none."""

    key: str = ""
    place: int | None = None
    where: tuple[tuple[str, str], ...] | None = None


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
        return Step(where=())
    pairs = [one.strip("()@. ").partition("=") for one in _AND.split(inside)]
    if pairs[0][1]:
        return Step(where=tuple((key.strip(" ="), said.strip("= '\"")) for key, _, said in pairs))
    return Step(key=inside.strip("'\""))


def _find(value: Any, steps: tuple[Step, ...]) -> Any:
    for nth, step in enumerate(steps):
        if isinstance(value, list):
            if step.where is not None:
                chosen = [one for one in value if _fits(one, step.where)]
                rest = steps[nth + 1 :]
                if _is_unclear(chosen, step.where, rest):
                    return NOT_TRUE
                found = [_find(one, rest) for one in chosen]
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


def _fits(one: Any, where: tuple[tuple[str, str], ...]) -> bool:
    if not where:
        return True
    return isinstance(one, dict) and all(str(one.get(key)) == said for key, said in where)


def _is_unclear(
    chosen: list[Any], where: tuple[tuple[str, str], ...], rest: tuple[Step, ...]
) -> bool:
    """Return whether a path asks when a condition changed, names its type alone, and it is not
    True."""
    if [key for key, _ in where] != ["type"] or [step.key for step in rest] not in _CHANGES:
        return False
    return any(str(one.get("status", "True")) != "True" for one in chosen)
