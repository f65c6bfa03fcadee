"""Random generators: what a process draws from, captured and put back exactly.

Always covered: Python's `random`, NumPy's global state, torch's CPU generator, and every CUDA
device's generator once CUDA is in use. Others by `protect`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outlast.errors import ProtectError

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
GENERATOR_TYPES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def capture(named: Mapping[str, Generator]) -> dict[str, Any]:
    """The state of all generators, as plain data that `checkpoint.tree` can encode."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if named:
        state["named"] = {name: _capture_one(generator) for name, generator in named.items()}
    return state


def restore(state: Mapping[str, Any], named: Mapping[str, Generator]) -> None:
    """Put `capture`'s answer back. Raises ProtectError when the named generators differ."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    saved = state.get("named", {})
    if saved.keys() != named.keys():
        raise ProtectError(
            f"the saved generators are {sorted(saved)}, the script protects {sorted(named)}:"
            " every worker must protect the same names"
        )
    for name, generator in named.items():
        _restore_one(generator, saved[name])


def _capture_one(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _restore_one(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
