"""State that must be equal on replicas, as named leaves.

It is the state that a joiner takes over from a donor (`ProtectedState.replicated`), without the
buffers that are a rank's own, and without the state that every vote compares
(rank_local_state.py). A rank's own objects, generators and data position do not belong to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from outlast.checkpoint.format import codec
from outlast.checkpoint.save import shard_plan
from outlast.checkpoint.state_content import without_owner
from outlast.worker.state.optimizer_state import hyperparameters
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.rank_local_state import BUFFERS, RATES, part_of
from outlast.worker.state.tensor_digests import digests, local_shard

_LEAVES_MAX = 64  # items of a list or dict that get names of their own


class AuditedPart(NamedTuple):
    """The part of the state that one audit covers: number `number` of `parts`."""

    number: int
    parts: int


WHOLE = AuditedPart(0, 1)
IN_VOTES = AuditedPart(0, 2)  # parameters and tensors of their optimizers' states
REST = AuditedPart(1, 2)  # all that votes do not compare


def collect(protected: ProtectedState, part: AuditedPart = WHOLE) -> dict[str, dict[str, Any]]:
    """Return the live leaves of `part`, WHOLE or REST, by kind and name; tensors by reference."""
    local = protected.local
    found: dict[str, dict[str, Any]] = {"parameters": {}, "buffers": {}, "optimizers": {}}
    for name, optimizer in protected.optimizers.items() if local.has_replicas else ():
        groups = hyperparameters(optimizer) if local.is_audited(RATES) else []
        for index, group in enumerate(groups):
            found["optimizers"].update(_leaves(f"{name}.param_groups.{index}", group))
        if unowned := without_owner(optimizer):
            found["optimizers"].update(_leaves(f"{name}.state", unowned))
    # DDP's buckets decide in which order gradients are added.
    layouts = enumerate(protected.reducers.states())
    found["buckets"] = {f"ddp.{index}": msgspec.msgpack.encode(state) for index, state in layouts}
    states = {
        name: each.state_dict()
        for name, each in protected.objects.items()
        if name not in protected.schedules or local.is_audited(part_of(each))
    }
    found["objects"] = dict(_leaves("", states))
    if local.has_replicas:
        found["buffers"].update(_shared_buffers(protected))
        for name, parameter in protected.audited:
            if part != REST:
                found["parameters"][name] = parameter
            for each, value in _moments(protected, name, parameter):
                if part != REST or not isinstance(value, torch.Tensor):
                    found["optimizers"][each] = value
    return {
        kind: {
            name: local_shard(value) if isinstance(value, torch.Tensor) else value
            for name, value in named.items()
        }
        for kind, named in found.items()
    }


def _shared_buffers(protected: ProtectedState) -> dict[str, torch.Tensor]:
    """Return the buffers that ranks hold alike."""
    own = {*protected.buffers.own()}
    if not protected.local.is_audited(BUFFERS):
        own.update(protected.buffers.late())
    buffers = sorted(protected.tree.buffers().items(), key=lambda pair: pair[0])
    return {name: buffer for name, buffer in buffers if name not in own}


def _moments(
    protected: ProtectedState, name: str, parameter: torch.Tensor
) -> Iterator[tuple[str, Any]]:
    for owner, optimizer in protected.optimizers.items():
        for key, value in (optimizer.state.get(parameter) or {}).items():
            yield f"{owner}.state.{name}.{key}", value


def replica_set(protected: ProtectedState) -> bytes:
    """Return a digest of names, shapes and shards, which is equal on ranks of one replica set."""
    tensors = {
        f"{name}.{key}": parameter.detach()
        for name, module in protected.modules.items()
        for key, parameter in module.named_parameters()
    }
    state = xxhash.xxh3_64(protected.pipeline.identity.encode())
    for part in shard_plan.held_boxes(shard_plan.describe(tensors).table):
        line = f"{part.name!r} {part.dtype} {part.shape} {part.box.start} {part.box.size}\n"
        state.update(line.encode("utf-8", "surrogatepass"))
    return state.digest()


def digest_names(leaves: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, bytes]]:
    """Return a digest of each leaf, by kind and name."""
    tensors: list[torch.Tensor] = []
    places: list[tuple[str, str]] = []
    found: dict[str, dict[str, bytes]] = {kind: {} for kind in leaves}
    for kind, named in leaves.items():
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                places.append((kind, name))
                tensors.append(value)
            else:
                found[kind][name] = xxhash.xxh3_64_digest(_plain(value))
    for (kind, name), value in zip(places, digests(tensors), strict=True):
        found[kind][name] = value
    return found


def digest_kinds(names: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return one digest for each kind that has leaves."""
    found = {}
    for kind, named in names.items():
        if named:
            state = xxhash.xxh3_64()
            for name in sorted(named):
                state.update(f"{name}\0".encode("utf-8", "surrogatepass"))
                state.update(named[name])
            found[kind] = state.digest()
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of small containers by name; a large container is one leaf."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif type(value) in (list, tuple):
        items = list(enumerate(value))
    if not 0 < len(items) <= _LEAVES_MAX:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(f"{name}.{key}" if name else str(key), item)


def _plain(value: Any) -> bytes:
    """Return bytes that are equal for equal values, in any order of dicts and sets."""
    if isinstance(value, Mapping):
        pairs = sorted((_plain(key), _plain(item)) for key, item in value.items())
        return b"{" + b",".join(key + b":" + item for key, item in pairs) + b"}"
    if isinstance(value, (set, frozenset)):
        return b"<" + b",".join(sorted(map(_plain, value))) + b">"
    if type(value) in (list, tuple):
        return b"[" + b",".join(map(_plain, value)) + b"]"
    if isinstance(value, torch.Tensor):
        return digests([local_shard(value)])[0] + f"{value.dtype}{tuple(value.shape)}".encode()
    if isinstance(value, np.ndarray):
        return (
            xxhash.xxh3_64_digest(np.ascontiguousarray(value).tobytes()) + str(value.dtype).encode()
        )
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
    return codec.encode(value)
