"""What a process draws from: captured and put back exactly.

Always covered: Python's `random`, NumPy's global state, torch's CPU generator, and the generator
of the CUDA device that this worker computes on, once CUDA is in use. Others by `protect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast import generators
from outlast.errors import ProtectError
from outlast.generators import Generator


def capture(named: Mapping[str, Generator]) -> dict[str, Any]:
    """The state of all generators, as plain data that `checkpoint.tree` can encode."""
    state = generators.of_process()
    if named:
        state["named"] = generators.states(named)
    return state


def restore(state: Mapping[str, Any], named: Mapping[str, Generator]) -> None:
    """Put `capture`'s answer back. Raises ProtectError when the named generators differ."""
    saved = state.get("named", {})
    if saved.keys() != named.keys():
        raise ProtectError(
            f"the saved generators are {sorted(saved)}, the script protects {sorted(named)}:"
            " every worker must protect the same names"
        )
    generators.restore(state)
    generators.put(named, saved)
