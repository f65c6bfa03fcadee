"""States of this process's generators and of protected ones, for `codec` to encode.

Each is encoded again only if it has moved: a step asks for all of them five times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.errors import ProtectError
from outlast.random_state import Generator

_captured: dict[str, tuple[Any, codec.Encoded]] = {}  # by generator: its state, and that encoded
_newest: list[codec.Encoded] = []  # of all together


def capture(named: Mapping[str, Generator]) -> dict[str, Any] | codec.Encoded:
    """Return the state of all generators, for `codec` to encode."""
    states, is_new = random_state.of_process(), not _newest
    for name, state in states.items():
        if name not in _captured or _captured[name][0] is not state:
            _captured[name], is_new = (state, codec.encode_node(state)), True
    if not (is_new or named):
        return _newest[0]
    captured: dict[str, Any] = {name: _captured[name][1] for name in states}
    if named:
        return captured | {"named": random_state.states(named)}
    _newest[:] = [codec.encode_node(captured)]
    return _newest[0]


def restore(state: Mapping[str, Any], named: Mapping[str, Generator]) -> None:
    """Restore the result of `capture`. Raises ProtectError when the named generators differ."""
    saved = state.get("named", {})
    if saved.keys() != named.keys():
        raise ProtectError(
            f"the saved generators are {sorted(saved)}, the script protects {sorted(named)}:"
            " every worker must protect the same names"
        )
    random_state.restore(state)
    random_state.restore_state(named, saved)
