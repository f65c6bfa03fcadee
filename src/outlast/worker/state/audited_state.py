"""State that must be equal on replicas, as named leaves.

It is the state that a joiner takes over from a donor (`ProtectedState.replicated`), without the
buffers that are a rank's own, and without the state that every vote compares
(rank_local_state.py). A rank's own objects, generators and data position do not belong to it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from outlast.checkpoint.format import codec
from outlast.checkpoint.save import shard_plan
from outlast.errors import ConfigError
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.rank_local_state import BUFFERS, RATES, part_of
from outlast.worker.state.tensor_digests import digests, local_shard

_LEAVES_MAX = 64  # items of a list or dict that get names of their own


class AuditedPart(NamedTuple):
    """The bytes of the state that one audit covers: the `number`-th of `parts` equal parts."""

    number: int
    parts: int


WHOLE = AuditedPart(0, 1)


def collect(protected: ProtectedState) -> dict[str, dict[str, Any]]:
    """Return the live leaves by kind and name; tensors by reference."""
    local = protected.local
    own = {*protected.buffers.own()}
    if not local.is_audited(BUFFERS):
        own.update(protected.buffers.late())
    replicated = protected.replicated()
    modules, optimizers = replicated.pop("modules"), replicated.pop("optimizers")
    del replicated["gradients"]
    found: dict[str, dict[str, Any]] = {"parameters": {}, "buffers": {}, "optimizers": {}}
    for name, module in modules.items() if local.has_replicas else ():
        for key, tensor in module["parameters"].items():
            found["parameters"][f"{name}.{key}"] = tensor
        for key, tensor in module["buffers"].items():
            if f"{name}.{key}" not in own:
                found["buffers"][f"{name}.{key}"] = tensor
    names = _parameter_names(protected)
    for name, optimizer in optimizers.items() if local.has_replicas else ():
        groups = optimizer["groups"] if local.is_audited(RATES) else []
        found["optimizers"].update(_optimizer(name, groups, optimizer["state"], names[name]))
        if optimizer["unowned"]:
            found["optimizers"].update(_leaves(f"{name}.state", optimizer["unowned"]))
    for name in protected.schedules:
        if not local.is_audited(part_of(protected.schedules[name])):
            del replicated["objects"][name]
    # DDP's buckets decide in which order gradients are added.
    layouts = enumerate(replicated.pop("ddp"))
    found["buckets"] = {f"ddp.{index}": layout for index, layout in layouts}
    for kind, value in replicated.items():  # schedulers and marked objects
        found[kind] = dict(_leaves("" if isinstance(value, Mapping) else kind, value))
    return found


def replica_set(protected: ProtectedState) -> bytes:
    """Return a digest of names, shapes and shards, which is equal on ranks of one replica set."""
    tensors = {
        f"{name}.{key}": parameter.detach()
        for name, module in protected.modules.items()
        for key, parameter in module.named_parameters()
    }
    state = xxhash.xxh3_64()
    for part in shard_plan.held_boxes(shard_plan.describe(tensors).table):
        line = f"{part.name!r} {part.dtype} {part.shape} {part.box.start} {part.box.size}\n"
        state.update(line.encode("utf-8", "surrogatepass"))
    return state.digest()


def digest_names(
    leaves: Mapping[str, Mapping[str, Any]], part: AuditedPart
) -> dict[str, dict[str, bytes]]:
    """Return a digest of each leaf, by kind and name. Of tensors only the bytes in `part` count;
    tensors without bytes there are omitted."""
    tensors: list[tuple[str, str, torch.Tensor]] = []
    found: dict[str, dict[str, bytes]] = {kind: {} for kind in leaves}
    for kind, named in leaves.items():
        for name in sorted(named):
            value = named[name]
            if isinstance(value, torch.Tensor):
                tensors.append((kind, name, local_shard(value)))
            else:
                found[kind][name] = xxhash.xxh3_64_digest(_plain(value))
    chosen = list(_cut(tensors, part))
    values = digests([tensor for _, _, tensor in chosen])
    for (kind, name, _), value in zip(chosen, values, strict=True):
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


@torch.no_grad()
def flip_bit(protected: ProtectedState, pattern: str) -> None:
    """Flip the lowest bit of the first byte of the first tensor whose name matches.

    Raises ConfigError with the names of all tensors if none matches.
    """
    named = [pair for kind in collect(protected).values() for pair in kind.items()]
    tensors = {n: t for n, t in named if isinstance(t, torch.Tensor) and t.numel()}
    for name, tensor in tensors.items():
        if fnmatch.fnmatchcase(name, pattern):
            flat = local_shard(tensor).detach().view(-1).view(torch.uint8)
            flat[:1] ^= 1
            return
    raise ConfigError(
        f"--fault flip: no replicated tensor matches {pattern!r}; known: {', '.join(tensors)}"
    )


def _parameter_names(protected: ProtectedState) -> dict[str, list[str]]:
    known = {
        id(parameter): f"{name}.{key}"
        for name, module in protected.modules.items()
        for key, parameter in module.named_parameters()
    }
    return {
        name: [known.get(id(p), str(i)) for i, p in enumerate(_parameters(optimizer))]
        for name, optimizer in protected.optimizers.items()
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer(
    name: str, groups: Sequence[Mapping[str, Any]], state: Sequence[Any], names: list[str]
) -> Iterator[tuple[str, Any]]:
    for index, group in enumerate(groups):
        yield from _leaves(f"{name}.param_groups.{index}", group)
    for parameter, values in zip(names, state, strict=True):
        for key, value in (values or {}).items():
            yield f"{name}.state.{parameter}.{key}", value


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


def _cut(
    tensors: list[tuple[str, str, torch.Tensor]], part: AuditedPart
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the tensors, or slices of them, whose bytes lie in `part` of all bytes."""
    if part.parts == 1:
        yield from tensors
        return
    sizes = [tensor.nbytes for _, _, tensor in tensors]
    first, last = (sum(sizes) * edge // part.parts for edge in (part.number, part.number + 1))
    at = 0
    for (kind, name, tensor), size in zip(tensors, sizes, strict=True):
        begin, end = max(first - at, 0), min(last - at, size)
        at += size
        if begin >= end:
            continue
        width = tensor.element_size()
        if begin or end < size:
            flat = tensor.detach().contiguous().reshape(-1)
            tensor = flat[begin // width : -(-end // width)]
        yield kind, name, tensor
