"""States of random generators, read and restored exactly, as data that can be encoded.

The generators of `random`, NumPy and torch are asked several times a step, and reading one takes up
to 60 us. Each is read again only if its memory has changed: the bytes of the object that CPython
has for it, which hold all that its next number depends on.

| generator        | memory that is compared                                  | beside it      |
|------------------|----------------------------------------------------------|----------------|
| `random`         | `random.Random`: the words and the index                 | `gauss_next`   |
| NumPy            | `RandomState`: the second normal number, its generator's |                |
|                  | address; `MT19937`: the words and the index              |                |
| torch, CPU, CUDA | the state itself, which torch copies in 0.5 us           |                |

Another generator of bits given to NumPy is read each time.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from outlast.errors import UsageError

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
GENERATOR_TYPES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


_HEAD_BYTES = 8  # of an object: its reference count
_newest: dict[str, tuple[Any, Any]] = {}  # by name: the look, and the state


def _memory_of(thing: Any) -> bytes:
    return ctypes.string_at(id(thing) + _HEAD_BYTES, type(thing).__basicsize__ - _HEAD_BYTES)


def _look_at_python() -> Any:
    generator: Any = random.getstate.__self__
    return _memory_of(generator), generator.gauss_next


def _look_at_numpy() -> Any:
    generator: Any = np.random.get_state.__self__
    bits = generator._bit_generator  # noqa: SLF001 - its public name is a function that may be patched
    return (_memory_of(generator), _memory_of(bits)) if type(bits) is np.random.MT19937 else None


def _unless_equal(name: str, look: Any, read: Callable[[], Any]) -> Any:
    """Return the newest state of a generator if its look is the same, else read it."""
    before = _newest.get(name)
    if look is not None and before is not None and before[0] == look:
        return before[1]
    state = read()
    _newest[name] = look, state
    return state


def _unless_equal_bytes(name: str, state: torch.Tensor) -> torch.Tensor:
    return _unless_equal(name, ctypes.string_at(state.data_ptr(), state.nbytes), lambda: state)


def snapshot() -> dict[str, Any]:
    """Return the states of `random`, NumPy's and torch's CPU generators of this process.

    An unchanged state is the same object as before: callers do not change it.
    """
    return {
        "python": _unless_equal("python", _look_at_python(), random.getstate),
        "numpy": _unless_equal(
            "numpy", _look_at_numpy(), lambda: np.random.get_state(legacy=False)
        ),
        "torch": _unless_equal_bytes("torch", torch.get_rng_state()),
    }


def of_process() -> dict[str, Any]:
    """Return `snapshot` and, once CUDA is in use, the state of this process's device."""
    states = snapshot()
    if torch.cuda.is_initialized():
        # Only its own device's: the process that restores it may use another one.
        device = torch.cuda.current_device()
        states["cuda"] = _unless_equal_bytes("cuda", torch.cuda.get_rng_state(device))
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Restore the generators in `states`; others stay."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], torch.cuda.current_device())


def moved(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of `before` that have changed."""
    now = snapshot()
    return {name: state for name, state in before.items() if not same(state, now[name])}


def same(one: Any, other: Any) -> bool:
    """Return whether two states, or other plain values, are equal bit for bit."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and len(one) < 4:  # never the numbers of a state
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@contextmanager
def preserved() -> Iterator[None]:
    """Restore this process's generators at the end of the context."""
    before = snapshot()
    try:
        yield
    finally:
        restore(before)


def states(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Return the state of each generator as plain data.

    Raises UsageError, by name, for one without a state (random.SystemRandom).
    """
    for path, generator in generators.items():
        if isinstance(generator, random.SystemRandom):
            raise UsageError(
                f"{path!r} is a random.SystemRandom, which has no state that could be saved and"
                " repeated; nothing was saved; use random.Random"
            )
    return {path: _state(generator) for path, generator in generators.items()}


def restore_state(generators: Mapping[str, Generator], saved: Mapping[str, Any]) -> None:
    """Restore each generator from its path; one without a saved state stays."""
    for path, generator in generators.items():
        if path in saved:
            _set_state(generator, saved[path])


def make_generator(state: Any) -> Generator:
    """Return a new generator in a state from `states`."""
    if isinstance(state, torch.Tensor):
        generator: Generator = torch.Generator()
    elif isinstance(state, tuple):
        generator = random.Random()
    elif "has_gauss" in state:
        generator = np.random.RandomState()
    else:
        generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
    _set_state(generator, state)
    return generator


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    bits = generator.bit_generator
    state = dict(bits.state)
    if isinstance(bits.seed_seq, np.random.SeedSequence):  # of which `spawn` makes children
        state["seed_seq"] = bits.seed_seq.state
    return state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
        if "seed_seq" in state:
            _set_seeds(generator.bit_generator.seed_seq, state["seed_seq"])


def _set_seeds(seeds: Any, state: dict[str, Any]) -> None:
    """Set the seeds of a bit generator, which NumPy allows in pickled form only.

    Raises UsageError where that fails.
    """
    if seeds.state != state:
        seeds.__setstate__(np.random.SeedSequence(**state).__reduce__()[2])
        if seeds.state != state:
            raise UsageError(
                "NumPy cannot restore the seeds of a generator that has spawned others; create each"
                " generator from a seed of its own"
            )
