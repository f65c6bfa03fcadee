"""How a loader draws: from this process's generators, and from those that objects keep.

A sampler's draws must not mix with the model's, or nobody could repeat them without training: see
`Private`. A loader worker's draws must not depend on which batches it got before: see `reseed`.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

from outlast.generators import Generator, preserved, put, restore, snapshot, states

_DEPTH_MAX = 6
_WIDTH_MAX = 64  # longer containers hold data, not generators
_VISITS_MAX = 2000
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, type, ModuleType, FunctionType,
    torch.Tensor, torch.dtype, torch.device, np.ndarray, np.generic, random.SystemRandom,
)  # fmt: skip


def draw_seed(generator: torch.Generator | None) -> int:
    """One number, drawn as a DataLoader draws its base seed."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def mix(seed: int, *numbers: int) -> int:
    """A seed of 64 bits that differs wherever `seed` or a number does."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers), seed=seed)


def owned(roots: Mapping[str, Any], apart: Any = None) -> dict[str, Generator]:
    """Generators that objects keep in attributes, lists, tuples and dicts, by their path.

    `apart` and what hangs from it is left out. Looks a bounded way: not into long containers.
    """
    found: dict[str, Generator] = {}
    seen = {id(apart), id(torch.default_generator), id(getattr(random, "_inst", None)),
            id(getattr(np.random.mtrand, "_rand", None))}  # fmt: skip

    def visit(path: str, thing: Any, depth: int) -> None:
        if isinstance(thing, _LEAVES) or id(thing) in seen or len(seen) > _VISITS_MAX:
            return
        seen.add(id(thing))
        if isinstance(thing, Generator):
            found[path] = thing
        elif depth < _DEPTH_MAX:
            for name, child in _children(thing):
                visit(f"{path}.{name}", child, depth + 1)

    for name, root in roots.items():
        visit(name, root, 0)
    return found


def _children(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, dict):
        items = thing.items() if len(thing) <= _WIDTH_MAX else ()
        return [(str(key), child) for key, child in items]
    if isinstance(thing, list | tuple):
        return (
            [(str(i), child) for i, child in enumerate(thing)] if len(thing) <= _WIDTH_MAX else []
        )
    return list(getattr(thing, "__dict__", {}).items())


def reseed(seed: int, generators: Mapping[str, Generator]) -> None:
    """Seed this process's generators, and each of `generators` by its path."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)
    for path, generator in generators.items():
        own = xxhash.xxh3_64_intdigest(path.encode(), seed=seed)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif isinstance(generator, np.random.RandomState):
            generator.seed([own & 0xFFFFFFFF, own >> 32])
        else:
            kind = type(generator.bit_generator)
            generator.bit_generator.state = kind(own).state


class Private:
    """A set of generator states of its own: inside `with`, draws come from it and nowhere else.

    It holds those of `generators`, and the process's unless `process` is False.
    """

    def __init__(self, seed: int, generators: Mapping[str, Generator], process: bool) -> None:
        self._generators = generators
        self._own = states(generators)
        self._process: dict[str, Any] | None = None
        if process:
            with preserved():
                reseed(seed, {})
                self._process = snapshot()

    def __enter__(self) -> None:
        self._outer = states(self._generators)
        put(self._generators, self._own)
        if self._process is not None:
            self._outer_process = snapshot()
            restore(self._process)

    def __exit__(self, *_: object) -> None:
        self._own = states(self._generators)
        put(self._generators, self._outer)
        if self._process is not None:
            self._process = snapshot()
            restore(self._outer_process)

    def reveal(self) -> None:
        """Leave the objects' generators where the draws inside have brought them."""
        put(self._generators, self._own)
