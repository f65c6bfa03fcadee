"""What is one rank's alone: random generators, positions of loaders, buffers that its samples made.

Encoded as one value, `{"random", "objects", "buffers", "rest"}` (docs/format.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outlast import generators
from outlast.checkpoint import inplace, tree
from outlast.checkpoint.plan import WHOLE_BYTES
from outlast.checkpoint.state import State


def capture(state: State, rest: Mapping[str, Any], world: int) -> bytes:
    """This rank's own part of a checkpoint.

    Small buffers are in it although they are tensors of the model: BatchNorm's differ by rank, and
    among the tensors there is one rank's of each. Raises CodecError as `tree.encode` does.
    """
    return tree.encode(
        {
            "random": generators.of_process() | {"named": generators.states(state.generators)},
            "objects": {
                name: part if isinstance(part, (dict, list)) else part.state_dict()
                for name, part in state.own.items()
            },
            "buffers": buffers(state) if world > 1 else {},
            "rest": rest if world > 1 else {},
        }
    )


def differences(state: State, saved: Mapping[str, Any]) -> list[str]:
    """Of the names in a rank's own part."""
    found: list[str] = []
    for what, here, there in (
        ("generator", state.generators, saved["random"]["named"]),
        ("own state", state.own, saved["objects"]),
    ):
        found += [f"{what} {name!r}: missing in the checkpoint" for name in here.keys() - there]
        found += [f"{what} {name!r}: missing here" for name in there.keys() - here.keys()]
    return sorted(found)


@torch.no_grad()
def restore(state: State, saved: Mapping[str, Any], *, process: bool) -> None:
    """Put a decoded own part back, into the objects that the script holds; with `process`, this
    process's generators too. They come last: an object may draw while it takes its state back."""
    live = buffers(state)
    for name, value in saved["buffers"].items():
        if name in live and live[name].shape == value.shape:
            live[name].copy_(value)
    for name, part in state.own.items():
        if name in saved["objects"]:
            value = saved["objects"][name]
            if isinstance(part, (dict, list)):
                inplace.settle(part, value)
            else:
                part.load_state_dict(value)
    generators.put(state.generators, saved["random"]["named"])
    if process:
        generators.restore(saved["random"])


def buffers(state: State) -> dict[str, torch.Tensor]:
    """Small buffers by the name that they have among the tensors: each rank keeps its own."""
    return {
        f"{module}.{entry.name}": entry.value
        for module, found in state.entries.items()
        for entry in found
        if entry.kind == "buffer"
        and type(entry.value) is torch.Tensor
        and entry.value.nbytes < WHOLE_BYTES
    }
