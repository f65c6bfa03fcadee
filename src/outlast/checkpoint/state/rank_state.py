"""State of one rank alone: random generators, loader positions, small buffers.

Encoded as one value, `{"random", "objects", "buffers", "rest"}` (docs/format.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.checkpoint.load.tensor_fill import fill_once
from outlast.checkpoint.save.shard_plan import WHOLE_BYTES
from outlast.checkpoint.state import state_values
from outlast.checkpoint.state.script_state import ScriptState
from outlast.checkpoint.state.state_content import EXACT, NameMatching


def capture(state: ScriptState, rest: Mapping[str, Any], world: int) -> bytes:
    """Return this rank's own part of a checkpoint.

    It includes small buffers although they are tensors of the model: BatchNorm's differ by rank,
    and the tensors of a checkpoint have only one rank's of each. Raises CodecError as
    `codec.encode` does.
    """
    return codec.encode(
        {
            "random": random_state.of_process() | {"named": random_state.states(state.generators)},
            "objects": {
                name: part if isinstance(part, (dict, list)) else part.state_dict()
                for name, part in state.own.items()
            },
            "buffers": buffers(state) if world > 1 else {},
            "rest": rest if world > 1 else {},
        }
    )


def differences(
    state: ScriptState, saved: Mapping[str, Any], matching: NameMatching = EXACT
) -> tuple[list[str], list[str]]:
    """Return the names of own parts that the checkpoint lacks, and those that the state lacks."""
    missing: list[str] = []
    unexpected: list[str] = []
    for what, here, there in (
        ("generator", state.generators, saved["random"]["named"]),
        ("own state", state.own, saved["objects"]),
    ):
        for name in sorted({*here, *there}):
            if matching.skips(name) or (name in here and name in there):
                continue
            (missing if name in here else unexpected).append(f"{what} {name!r}")
    return missing, unexpected


@torch.no_grad()
def restore(
    state: ScriptState, saved: Mapping[str, Any], *, process: bool, matching: NameMatching = EXACT
) -> None:
    """Restore a decoded own part in the script's objects; with `process`, generators too.

    The process's generators come last: an object may draw while it loads its state.
    """
    live = buffers(state)
    for name, value in saved["buffers"].items():
        if name in live and live[name].shape == value.shape and not matching.skips(name):
            into, values = fill_once(name, live[name], value)
            into.copy_(values)
    for name, part in state.own.items():
        if name in saved["objects"] and not matching.skips(name):
            value = saved["objects"][name]
            if isinstance(part, (dict, list)):
                state_values.restore_in_place(part, value)
            else:
                part.load_state_dict(value)
    named = saved["random"]["named"]
    random_state.restore_state(
        state.generators, {n: v for n, v in named.items() if not matching.skips(n)}
    )
    if process:
        random_state.restore(saved["random"])


def buffers(state: ScriptState) -> dict[str, torch.Tensor]:
    """Return small buffers by their tensor names: each rank keeps its own."""
    return {
        f"{module}.{entry.name}": entry.value
        for module, found in state.entries.items()
        for entry in found
        if entry.kind == "buffer"
        and type(entry.value) is torch.Tensor
        and entry.value.nbytes < WHOLE_BYTES
    }
