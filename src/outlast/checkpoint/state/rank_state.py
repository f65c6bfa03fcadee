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
    """This rank's own part of a checkpoint.

    Small buffers are in it although they are tensors of the model: BatchNorm's differ by rank, and
    among the tensors there is one rank's of each. Raises CodecError as `tree.encode` does.
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
    """Of the names in a rank's own part: what the checkpoint lacks, and what the state lacks."""
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
    """Put a decoded own part back, into the objects that the script holds; with `process`, this
    process's generators too. They come last: an object may draw while it takes its state back."""
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
    """Small buffers by the name that they have among the tensors: each rank keeps its own."""
    return {
        f"{module}.{entry.name}": entry.value
        for module, found in state.entries.items()
        for entry in found
        if entry.kind == "buffer"
        and type(entry.value) is torch.Tensor
        and entry.value.nbytes < WHOLE_BYTES
    }
