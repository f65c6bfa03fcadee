"""Values with tensors inside: taken apart into a skeleton and named tensors, and put together.

A skeleton is `{"value": the value with None for tensors, "holes": {name of tensor: (path, type of
device)}}`, and can be encoded by `tree`. Tensors are named by their path: `ema.shadow.0.weight`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from outlast.checkpoint.schema import DEPTH_MAX
from outlast.errors import CodecError

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple)
_INITIALIZED = frozenset({torch.Tensor, torch.nn.Parameter})
_UNINITIALIZED = (UninitializedBuffer, UninitializedParameter)


def add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Name a tensor. Raises CodecError where the name is taken, or it has no shape yet."""
    if type(tensor) not in _INITIALIZED and isinstance(tensor, _UNINITIALIZED):
        raise CodecError(f"{name} is not initialized; nothing was saved; run one forward first")
    if tensors.setdefault(name, tensor) is not tensor:
        raise _both_called(name)


def split(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The skeleton of `value`; its tensors go into `tensors`, by reference, under `name` and below.

    Raises CodecError as `add` does. What `tree` cannot encode is left for `tree` to refuse.
    """
    holes: dict[str, tuple[tuple[Any, ...], str]] = {}
    inside: set[int] = set()

    def hollow(value: Any, name: str, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            add(tensors, name, value)
            if name in holes:  # the same tensor, but at another path, which would stay empty
                raise _both_called(name)
            holes[name] = (path, value.device.type)
            return None
        kind = type(value)
        if kind not in _MAPPINGS and kind not in _SEQUENCES:
            return value
        if id(value) in inside or len(inside) >= DEPTH_MAX:
            return value  # `tree` says what is wrong with it
        if set(map(type, value.values() if kind in _MAPPINGS else value)) <= _PLAIN:
            return value
        inside.add(id(value))
        hollowed = {key: hollow(item, f"{name}.{key}", (*path, key)) for key, item in _items(value)}
        inside.discard(id(value))
        if kind in _SEQUENCES:
            return kind(hollowed.values())
        shell = copy.copy(value)  # of its own type, attributes and all
        shell.update(hollowed)
        return shell

    return {"value": hollow(value, name, ()), "holes": holes}


def join(skeleton: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of a decoded skeleton, which is used up, with `tensors` in their places."""
    value = skeleton["value"]
    for name, (path, _) in skeleton["holes"].items():
        value = _filled(value, path, tensors[name])
    return value


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """What lies at `path` in `value`, or None."""
    for key in path:
        keyed = type(value) in _MAPPINGS and key in value
        if not keyed and not (type(value) in _SEQUENCES and key < len(value)):
            return None
        value = value[key]
    return value


def _both_called(name: str) -> CodecError:
    return CodecError(
        f"two tensors of the state are both called {name!r}; nothing was saved; rename one"
    )


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items()) if type(value) in _MAPPINGS else enumerate(value)


def _filled(value: Any, path: tuple[Any, ...], tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    part = _filled(value[key], rest, tensor)
    if type(value) is tuple:
        return (*value[:key], part, *value[key + 1 :])
    value[key] = part
    return value
