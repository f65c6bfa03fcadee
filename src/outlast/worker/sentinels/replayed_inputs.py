"""Inputs of a phase that another rank computes again: its arguments, and the rank's own state.

Modules, optimizers and functions among the arguments are not sent: the other rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from outlast.checkpoint.format import codec
from outlast.errors import CodecError
from outlast.worker.sentinels.collective_tape import CollectiveTape
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import local_shard

INPUT_BYTES_MAX = 256 << 20


class InputReplayer(Protocol):
    """Runner of a phase's function on another rank's inputs."""

    def replay_inputs(
        self, call: Callable[[], Any], key: str, own: bytes, tape: CollectiveTape
    ) -> str:
        """Run a function, and undo it; return why it cannot."""
        ...


def why_unfit(protected: ProtectedState) -> str:
    """Return why steps of this rank cannot be replayed on another one; "" if they can."""
    if protected.pipeline:
        return "it has a stage of a pipeline"
    if any(local_shard(each) is not each for each in protected.parameters):
        return "its parameters are sharded, and no replica has all of them"
    if protected.reducers.is_static:
        return "its DDP has a static graph"
    if not protected.local.has_replicas:
        return "its weights are its own"
    return ""


def encode_inputs(call: Callable[[], Any], own: bytes) -> tuple[str, bytes]:
    """Return why a call's arguments cannot be sent, and the arguments and `own` state as bytes."""
    if not isinstance(call, partial):
        return "its function is called in another way", b""
    named: dict[Any, Any] = {**dict(enumerate(call.args)), **call.keywords}
    sent: dict[Any, Any] = {}
    for name, value in named.items():
        try:
            codec.flatten(value)
        except CodecError as error:
            if not (callable(value) or hasattr(value, "state_dict")):
                return f"an argument cannot be sent ({error})", b""
        else:
            sent[name] = value
    schema, tensors = codec.flatten(sent)
    if any(each.nbytes for each in _odd(sent)):
        return "a tensor of its batch is not contiguous, or requires a gradient", b""
    size = sum(each.nbytes for each in tensors)
    if size > INPUT_BYTES_MAX:
        return f"its batch of {size} bytes is above {INPUT_BYTES_MAX}", b""
    on_device = [not each.is_cpu for each in tensors]
    whole = {"own": own, "schema": schema, "tensors": tensors, "on_device": on_device}
    return "", codec.encode(whole)


def _odd(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and (not value.is_contiguous() or value.requires_grad):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _odd(each, depth - 1)


def decode_inputs(call: Callable[[], Any], data: bytes) -> tuple[Callable[[], Any], bytes]:
    """Return this rank's call with another rank's arguments, and that rank's own state."""
    assert isinstance(call, partial)
    whole = codec.decode(data)
    here = torch.device("cuda", torch.cuda.current_device()) if any(whole["on_device"]) else None
    tensors = [
        each.to(here) if far else each.clone()
        for each, far in zip(whole["tensors"], whole["on_device"], strict=True)
    ]
    sent = codec.unflatten(whole["schema"], tensors)
    args = [sent.get(place, value) for place, value in enumerate(call.args)]
    keywords = {name: sent.get(name, value) for name, value in call.keywords.items()}
    return partial(call.func, *args, **keywords), whole["own"]
