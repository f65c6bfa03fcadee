"""Objects without `state_dict` that `session.protect` takes: attributes, arrays, sets.

| object | its state |
|---|---|
| a meter, a dataclass, a namespace | its attributes, plain values that `codec` can encode |
| a NumPy array, a tensor, a set | its elements, restored in place |
| a list or dict of such objects, loaders, modules, optimizers, generators | that of each one |

A list or dict of objects keeps its items: one that the script adds or replaces later would not be
protected, and is refused.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from outlast.checkpoint.script_state import Stateful
from outlast.checkpoint.state_values import restore_in_place
from outlast.errors import ProtectError
from outlast.random_state import GENERATOR_TYPES
from outlast.worker.state.pipeline_stages import is_schedule

_IN_PLACE = (set, np.ndarray, torch.Tensor)
_NO_OBJECTS = (type, types.ModuleType, enum.Enum)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: types of C may keep values outside of attributes
_PARTS = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader, *GENERATOR_TYPES)


class PlainObject:
    """An object by its attributes, or an array or set by its elements."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes, or the elements as `elements`."""
        if isinstance(self.target, _IN_PLACE):
            return {"elements": self.target}
        names = [*getattr(self.target, "__dict__", ()), *_slots(type(self.target))]
        return {name: getattr(self.target, name) for name in names if hasattr(self.target, name)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state in the object, its containers and arrays. Raises ProtectError for
        elements that do not fit."""
        live = self.state_dict()
        if isinstance(self.target, _IN_PLACE):
            if restore_in_place(self.target, state["elements"]) is not self.target:
                raise ProtectError(
                    f"a protected {type(self.target).__name__} has other elements than before, of"
                    " another type or shape; keep its shape, or keep it in session.state"
                )
            return
        for name in live.keys() - state.keys():
            object.__delattr__(self.target, name)
        for name, value in state.items():
            object.__setattr__(self.target, name, restore_in_place(live.get(name), value))


class ProtectedParts:
    """Arguments of `session.protect`, in parts: a list or dict of objects is one for each."""

    def __init__(
        self,
        named: Mapping[str, Any],
        known: tuple[type, ...],
        place: Callable[[str, Any], None],
    ) -> None:
        """Call `place` for each part. `known`: further types that are protected as they are. Raises
        ProtectError for an iterator, or for two parts of one name."""
        names = set[str]()
        self._containers: dict[str, tuple[Any, list[tuple[Any, Any]]]] = {}
        for name, value in named.items():
            items = _items(value)
            is_container = bool(items) and all(_is_part(part, known) for _, part in items)
            if is_container:
                self._containers[name] = value, items
            for key, part in items if is_container else [("", value)]:
                whole = f"{name}.{key}" if is_container else name
                if whole in names:
                    raise ProtectError(f"two protected objects have the name {whole!r}; rename one")
                names.add(whole)
                place(whole, _protectable(whole, part, known))

    def must_be_there(self) -> None:
        """Raise ProtectError if the script has added, removed or replaced an item."""
        for name, (container, before) in self._containers.items():
            now = _items(container)
            same = len(now) == len(before) and all(
                key == known and part is kept
                for (key, part), (known, kept) in zip(now, before, strict=True)
            )
            if not same:
                keys, known = ([key for key, _ in each] for each in (now, before))
                what = f"items {keys}" if keys != known else "other objects than then"
                raise ProtectError(
                    f"{name} has {what}, and had {known} at protect(): what is new is not"
                    " protected; put all objects there before protect() and change them in place,"
                    " or leave the container out, since variables of the script are carried"
                )


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [*value.items()]
    return [*enumerate(value)] if isinstance(value, (list, tuple)) else []


def _is_part(value: Any, known: tuple[type, ...]) -> bool:
    """Return whether an item of a container is an object with a state of its own."""
    is_stateful = isinstance(value, (*_PARTS, *known, Stateful)) and not isinstance(value, type)
    return is_stateful or (not isinstance(value, _IN_PLACE) and _is_object(value))


def _protectable(name: str, value: Any, known: tuple[type, ...]) -> Any:
    if hasattr(type(value), "__next__") and not isinstance(value, Stateful):
        raise ProtectError(
            f"cannot protect {name!r} ({type(value).__name__}): an iterator has no place at which"
            " another process could continue; draw in the loop, for batch in"
            " session.batches(loader): session.run(step, batch), or keep an index in session.state"
        )
    is_known = isinstance(value, (*_PARTS, *known, Stateful)) or is_schedule(value)
    is_plain = not is_known and (isinstance(value, _IN_PLACE) or _is_object(value))
    return PlainObject(value) if is_plain else value


def _is_object(value: Any) -> bool:
    """Return whether a value has attributes and is neither a function nor a class."""
    bases = [base for base in type(value).__mro__ if base is not object]
    is_python = all(base.__flags__ & _HEAP_TYPE or base is types.SimpleNamespace for base in bases)
    has_attributes = hasattr(value, "__dict__") or bool(_slots(type(value)))
    return is_python and has_attributes and not isinstance(value, _NO_OBJECTS)


def _slots(kind: type) -> list[str]:
    found = (vars(base).get("__slots__", ()) for base in kind.__mro__ if base is not object)
    names = (name for each in found for name in ([each] if isinstance(each, str) else each))
    return [name for name in names if name not in ("__dict__", "__weakref__")]
