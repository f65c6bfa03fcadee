"""What a script hands over to be saved, sorted by how it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from outlast.checkpoint.names import Entry, entries
from outlast.errors import UsageError
from outlast.random_state import GENERATOR_TYPES, Generator

_VALUES = (bool, int, float, complex, str, bytes, dict, list, tuple, set, torch.Tensor, type(None))


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state and take it back."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class State:
    """A script's state by name. `shared` parts are equal on all ranks; what is in `own`, and
    generators and loaders wherever they stand, are this rank's.

    Raises UsageError, by name, for what has no state that could be kept.
    """

    def __init__(self, given: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        self.given = given
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.objects: dict[str, Stateful] = {}
        self.values: dict[str, Any] = {}
        self.generators: dict[str, Generator] = {}
        self.own: dict[str, Stateful | dict[Any, Any] | list[Any]] = {}
        for name, value in given.items():
            self._place(name, value)
        for name, value in (own or {}).items():
            self._place_own(name, value)
        self.entries: dict[str, list[Entry]] = {n: entries(m) for n, m in self.modules.items()}

    @property
    def kinds(self) -> dict[str, str]:
        """What each shared part is."""
        sorts = {"module": self.modules, "optimizer": self.optimizers,
                 "object": self.objects, "value": self.values}  # fmt: skip
        return {name: kind for kind, parts in sorts.items() for name in parts}

    def _place(self, name: str, value: Any) -> None:
        if not name or not isinstance(name, str):
            raise UsageError(f"the state has an entry called {name!r}; give it a name")
        if isinstance(value, nn.Module):
            self.modules[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        elif isinstance(value, (*GENERATOR_TYPES, DataLoader)):
            self._place_own(name, value)
        elif isinstance(value, _VALUES):
            self.values[name] = value
        elif isinstance(value, Stateful):
            self.objects[name] = value
        else:
            raise UsageError(
                f"{name!r} ({type(value).__name__}) cannot be saved: it has no state_dict and"
                " load_state_dict, and is neither a generator nor a plain value"
            )

    def _place_own(self, name: str, value: Any) -> None:
        if name in self.own or name in self.generators:
            raise UsageError(f"two parts of this rank's own state are called {name!r}; rename one")
        if isinstance(value, GENERATOR_TYPES):
            self.generators[name] = value
        elif isinstance(value, (Stateful, dict, list)):
            self.own[name] = value
        elif isinstance(value, DataLoader):
            raise UsageError(
                f"{name!r} is a DataLoader, which cannot say where it is: use torchdata's"
                " StatefulDataLoader, or keep the position yourself"
            )
        else:
            raise UsageError(
                f"{name!r} ({type(value).__name__}) cannot be this rank's own state: it has no"
                " state_dict and load_state_dict, and is neither a generator, a dict, nor a list"
            )
