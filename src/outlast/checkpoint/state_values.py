"""Values with tensors inside: split into a skeleton and tensors, joined, restored in place.

A skeleton is `{"value": the value with None for tensors, "holes": {name of tensor: (path, type of
device)}}`, which `codec` can encode. Tensors are named by their path: `ema.shadow.0.weight`.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.value_encoder import DEPTH_MAX
from outlast.errors import CodecError

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple)
_INITIALIZED = frozenset({torch.Tensor, torch.nn.Parameter})
_UNINITIALIZED = (UninitializedBuffer, UninitializedParameter)


def add_tensors(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    """Name a tensor.

    Raises CodecError where the name is taken or no text in UTF-8, or the tensor has no shape.
    """
    if is_uninitialized(tensor):
        raise CodecError(f"{name} is not initialized; nothing was saved; run one forward first")
    if type(tensor) in _INITIALIZED and tensor.is_nested:  # refused here: it has no shape either
        raise CodecError(
            f"{name} is a nested tensor; nothing was saved; leave it out, or give what rebuilds it"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise CodecError(
                f"the name {name!r} is no text in UTF-8 ({error.reason}); nothing was saved; rename"
                " it"
            ) from error
    if tensors.setdefault(name, tensor) is not tensor:
        raise _both_called(name)


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a lazy module's, which has no shape before the first forward."""
    return type(tensor) not in _INITIALIZED and isinstance(tensor, _UNINITIALIZED)


def split_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the skeleton of `value`; add its tensors to `tensors`, by reference.

    Their names are `name` and paths below it. Raises CodecError as `add_tensors` does. Values that
    `codec` cannot encode stay, for `codec` to refuse.
    """
    holes: dict[str, tuple[tuple[Any, ...], str]] = {}
    inside: set[int] = set()

    def hollow(value: Any, name: str, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            add_tensors(tensors, name, value)
            if name in holes:  # the same tensor, but at another path, which would stay empty
                raise _both_called(name)
            holes[name] = (path, value.device.type)
            return None
        kind = type(value)
        if kind not in _MAPPINGS and kind not in _SEQUENCES:
            return value
        if id(value) in inside or len(inside) >= DEPTH_MAX:
            return value  # `codec` reports the error
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


def join_tensors(skeleton: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of a decoded skeleton, which is consumed, with `tensors` in place."""
    value = skeleton["value"]
    for name, (path, _) in skeleton["holes"].items():
        value = _filled(value, path, tensors[name])
    return value


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the item at `path` in `value`, or None."""
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


_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
_LIVE_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)


def is_same(live: Any, saved: Any) -> bool:
    """Return whether both are encoded with the same bytes, and train the same tensors."""
    try:
        is_equal = codec.encode(live) == codec.encode(saved)
    except CodecError:  # a refused save left an unsupported value there
        return False
    return is_equal and list(trained(live)) == list(trained(saved))


def trained(
    value: Any, path: tuple[Any, ...] = (), inside: frozenset[int] = frozenset()
) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield what `codec` drops of parameters and of leaves that require gradients: their paths.

    Beside each path stands 1 if the tensor requires gradients, plus 2 for a parameter. `inside`:
    ids of containers of `value`.
    """
    if isinstance(value, torch.Tensor):
        is_parameter = isinstance(value, torch.nn.Parameter)
        if is_parameter or (value.requires_grad and value.is_leaf):
            yield path, value.requires_grad + 2 * is_parameter
        return
    is_mapping = type(value) in _MAPPINGS
    if not (is_mapping or type(value) in _SEQUENCES) or id(value) in inside:
        return
    if not set(map(type, value.values() if is_mapping else value)) <= _PLAIN:
        for key, item in _items(value):
            if type(item) not in _PLAIN:
                yield from trained(item, (*path, key), inside | {id(value)})


def retrained(
    value: Any, marks: Iterable[tuple[tuple[Any, ...], int]] | None, live: Any = None
) -> Any:
    """Return a decoded value, which is consumed, with what `trained` has yielded of it.

    `marks`: None in states of older versions; `live` then decides, as in `restore_parameters`.
    """
    if marks is None:
        return restore_parameters(live, value)
    for path, mark in marks:
        tensor = value_at(value, tuple(path))
        if mark & 2:
            tensor = torch.nn.Parameter(tensor, requires_grad=bool(mark & 1))
        else:
            tensor.requires_grad_()
        value = _filled(value, tuple(path), tensor)
    return value


def restore_in_place(live: Any, saved: Any) -> Any:
    """Return `saved`, in the containers, arrays and tensors of `live` if types agree.

    Both are values that `codec` can encode. Returns `live` itself where it could be made equal;
    objects that it no longer contains stay unchanged.
    """
    if type(live) is not type(saved):
        return saved
    if type(live) in _LIVE_MAPPINGS:
        restored = {
            key: restore_in_place(live[key], v) if key in live else v for key, v in saved.items()
        }
        live.clear()
        live.update(restored)
        return live
    if type(live) is list:
        pairs = zip(live, saved, strict=False)
        restored = [b if type(b) in _IMMUTABLE else restore_in_place(a, b) for a, b in pairs]
        live[:] = restored + saved[len(live) :]
        return live
    if type(live) is tuple:
        parts = tuple(restore_in_place(a, b) for a, b in zip(live, saved, strict=False))
        parts += saved[len(live) :]
        whole = len(parts) == len(live) and all(a is b for a, b in zip(parts, live, strict=True))
        return live if whole else parts
    if type(live) is set:
        live.clear()
        live.update(saved)
        return live
    if isinstance(live, torch.Tensor):
        return _tensor(live, saved)
    if isinstance(live, np.ndarray) and _alike(live, saved) and live.flags.writeable:
        live[...] = saved
        return live
    return saved


def restore_parameters(live: Any, saved: Any) -> Any:
    """Return `saved`, which is consumed, with parameters where `live` has them.

    Tensors are read without what autograd knows of them. At the paths of parameters and of leaves
    that require gradients, `saved` has the same again.
    """
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        trained = live.requires_grad and (saved.is_floating_point() or saved.is_complex())
        if type(live) is torch.nn.Parameter:
            return torch.nn.Parameter(saved, requires_grad=trained)
        return saved.requires_grad_() if trained and live.is_leaf else saved
    if type(live) is not type(saved):
        return saved
    if isinstance(live, _LIVE_MAPPINGS):
        for key, part in live.items():
            if key in saved:
                saved[key] = restore_parameters(part, saved[key])
    elif type(live) in _SEQUENCES:
        pairs = zip(live, saved, strict=False)
        restored = type(saved)(restore_parameters(*pair) for pair in pairs)
        return restored + saved[len(restored) :]
    return saved


def restore_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Restore hyperparameters; a learning rate that is a tensor is updated in place."""
    for name, value in values.items():
        live = group.get(name)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
            live.copy_(value)
        else:
            group[name] = copy.deepcopy(value)


@torch.no_grad()
def _tensor(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    # Neither memory that several elements share nor an inference tensor may be written to, and a
    # result of a graph cannot stop to require gradients.
    is_fixed = live.requires_grad != saved.requires_grad and not live.is_leaf
    if not _alike(live, saved) or overlaps_itself(live) or live.is_inference() or is_fixed:
        moved = saved.detach().to(live.device)
        return next((retrained(moved, [((), mark)]) for _, mark in trained(saved)), moved)
    live.copy_(saved)
    return live.requires_grad_(saved.requires_grad) if live.is_leaf else live


def _alike(live: Any, saved: Any) -> bool:
    return live.shape == saved.shape and live.dtype == saved.dtype


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor may share memory, as after expand or unfold."""
    if not tensor.numel():
        return False
    last = 0  # the last element that dimensions of smaller strides reach
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in sizes if size > 1):
        if stride <= last:
            return True
        last += (size - 1) * stride
    return False
