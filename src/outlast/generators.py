"""Random generators: their states, read and put back exactly, as data that can be encoded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
GENERATOR_TYPES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def snapshot() -> dict[str, Any]:
    """The states of `random`, NumPy's and torch's CPU generators of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }


def of_process() -> dict[str, Any]:
    """`snapshot`, and that of the CUDA device that this process computes on, once it is in use."""
    states = snapshot()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # Its own device's only: who puts it back may compute on another one.
        states["cuda"] = torch.cuda.get_rng_state(torch.cuda.current_device())
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Put back what `states` holds; others stay."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], torch.cuda.current_device())


def moved(before: Mapping[str, Any]) -> dict[str, Any]:
    """Of `before`, the states that are no longer the present ones."""
    now = snapshot()
    differs = {
        "python": before["python"] != now["python"],
        "numpy": before["numpy"]["state"]["pos"] != now["numpy"]["state"]["pos"]
        or before["numpy"]["has_gauss"] != now["numpy"]["has_gauss"]
        or not np.array_equal(before["numpy"]["state"]["key"], now["numpy"]["state"]["key"]),
        "torch": not torch.equal(before["torch"], now["torch"]),
    }
    return {name: before[name] for name, differ in differs.items() if differ}


@contextmanager
def preserved() -> Iterator[None]:
    """This process's generators are afterwards as they were before."""
    before = snapshot()
    try:
        yield
    finally:
        restore(before)


def states(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """The state of each, as plain data."""
    return {path: _state(generator) for path, generator in generators.items()}


def put(generators: Mapping[str, Generator], saved: Mapping[str, Any]) -> None:
    """Give each the state that was saved under its path; one that had none stays."""
    for path, generator in generators.items():
        if path in saved:
            _set_state(generator, saved[path])


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
