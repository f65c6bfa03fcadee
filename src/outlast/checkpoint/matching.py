"""Matching of a checkpoint's names and element types to those of a state, by request.

A name stands for itself and for all below it: `model.head` for `model.head.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class Matching(NamedTuple):
    """`strict`: names that only one side has are differences; else they are left out and listed.
    `cast`: floating-point types may differ. `skip`: names that are left as they are. `rename`:
    names of the checkpoint, and what the state calls them."""

    strict: bool = True
    cast: bool = False
    skip: tuple[str, ...] = ()
    rename: Mapping[str, str] = {}

    def skips(self, name: str) -> bool:
        """Return whether `name` is left as it is."""
        return any(within(name, each) for each in self.skip)

    def casts(self, there: str, here: str) -> bool:
        """Return whether values of one type may be read into a tensor of the other."""
        return self.cast and there in _FLOATS and here in _FLOATS


EXACT = Matching()


def within(name: str, subtree: str) -> bool:
    """Return whether `name` is `subtree`, or lies below it."""
    return name == subtree or name.startswith(f"{subtree}.")


def called(shared: Mapping[str, Any], optimizer: str, tensors: Collection[str]) -> list[str]:
    """The names of parameters that a checkpoint's `optimizer` speaks of: those of rank 0, and those
    whose state any rank kept."""
    found = [each for group in shared["optimizers"][optimizer]["parameters"] for each in group]
    prefixes, state = _prefixes(shared), f"{optimizer}.state."
    for name in tensors:
        each = name.removeprefix(state).rpartition(".")[0] if name.startswith(state) else ""
        while each and not any(f"{prefix}{each}" in tensors for prefix in prefixes):
            each = each.rpartition(".")[0]
        found += [each] if each else []
    return list(dict.fromkeys(found))


def owners(shared: Mapping[str, Any], optimizer: str, tensors: Collection[str]) -> dict[str, str]:
    """The names among a checkpoint's `tensors` of the parameters of its `optimizer`, by what it
    calls them; empty where that is not certain."""
    names = called(shared, optimizer, tensors)
    fitting = [
        prefix
        for prefix in _prefixes(shared)
        if all(f"{prefix}{each}" in tensors for each in names)
    ]
    return {each: f"{fitting[0]}{each}" for each in names} if len(fitting) == 1 else {}


def _prefixes(shared: Mapping[str, Any]) -> list[str]:
    return ["", *(f"{name}." for name, kind in shared["kinds"].items() if kind == "module")]
