"""A script's state sorted by kind, its tensors' names, and its completeness."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from outlast import __version__
from outlast.errors import CodecError, UnsupportedError, UsageError
from outlast.random_state import GENERATOR_TYPES, Generator

# Names that torch.compile and activation checkpointing insert into those of tensors.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class ModuleEntry(NamedTuple):
    """One entry of a module's state: canonical name, key in `state_dict`, live value.

    The kind "made" is a value that a hook or `get_extra_state` computed.
    """

    name: str
    key: str
    value: Any
    kind: Literal["parameter", "buffer", "made"]


def module_entries(module: nn.Module) -> list[ModuleEntry]:
    """Return the state of `module` as in `state_dict`: persistent buffers only.

    Raises UnsupportedError for FSDP of version 1, CodecError for two entries of one name.
    """
    wrappers = _wrappers(module)
    parameters = {id(p) for p in module.parameters()}
    buffers = {id(b) for b in module.buffers()}
    entries: dict[str, ModuleEntry] = {}
    # Its hooks matter: FSDP2 puts the sharded parameters back in one of them.
    for key, value in module.state_dict(keep_vars=True).items():
        name = _canonical(key, wrappers)
        if name in entries and entries[name].value is not value:
            raise CodecError(
                f"{key!r} and {entries[name].key!r} are both called {name!r} without their"
                " wrappers; nothing was saved; rename one of these submodules"
            )
        kind = (
            "parameter" if id(value) in parameters else "buffer" if id(value) in buffers else "made"
        )
        entries[name] = ModuleEntry(name, key, value, kind)
    return list(entries.values())


def parameter_entries(modules: dict[str, list[ModuleEntry]]) -> dict[int, tuple[str, str]]:
    """Return the module and the name of each parameter, by id; the first one if shared."""
    known: dict[int, tuple[str, str]] = {}
    for module, found in modules.items():
        for entry in found:
            if entry.kind == "parameter":
                known.setdefault(id(entry.value), (module, entry.name))
    return known


def _wrappers(module: nn.Module) -> list[str]:
    """Return the paths of modules whose only child is called "module", innermost first."""
    prefixes: list[str] = []
    for path, part in module.named_modules(remove_duplicate=False):
        if _is_flattened(type(part)):
            raise UnsupportedError(
                f"{path or 'the module'} is wrapped in FullyShardedDataParallel, whose flattened"
                " parameters have no names of their own; use fully_shard (FSDP2)"
            )
        if isinstance(part, (DataParallel, DistributedDataParallel)):
            prefixes.append(f"{_strip_wrappers(path)}.".removeprefix("."))
    return sorted(prefixes, key=len, reverse=True)


@lru_cache(maxsize=1024)
def _is_flattened(kind: type[nn.Module]) -> bool:
    return any(each.__name__ == "FullyShardedDataParallel" for each in kind.__mro__)


def _canonical(key: str, wrappers: list[str]) -> str:
    name = _strip_wrappers(key)
    for wrapper in wrappers:
        if name.startswith(f"{wrapper}module."):
            name = wrapper + name[len(wrapper) + len("module.") :]
    return name


def _strip_wrappers(path: str) -> str:
    if not any(part in path for part in _WRAPPER_PARTS):  # nearly always
        return path
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)


_VALUES = (bool, int, float, complex, str, bytes, dict, list, tuple, set, torch.Tensor, type(None))


@runtime_checkable
class Stateful(Protocol):
    """Any object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the object."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state of the object."""


class ScriptState:
    """A script's state by name.

    `shared` parts are equal on all ranks; parts in `own`, and generators and loaders anywhere,
    belong to this rank. Raises UsageError, by name, for a part without a state that can be saved.
    """

    def __init__(self, parts: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        self.given = parts
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.objects: dict[str, Stateful] = {}
        self.values: dict[str, Any] = {}
        self.generators: dict[str, Generator] = {}
        self.own: dict[str, Stateful | dict[Any, Any] | list[Any]] = {}
        for name, value in parts.items():
            self._place(name, value)
        for name, value in (own or {}).items():
            self._place_own(name, value)
        self.entries: dict[str, list[ModuleEntry]] = {
            n: module_entries(m) for n, m in self.modules.items()
        }

    def names(self) -> set[str]:
        """Return the names of all parts, this rank's own ones included."""
        return {*self.given, *self.own, *self.generators}

    @property
    def kinds(self) -> dict[str, str]:
        """Return the kind of each shared part: module, optimizer, object or value."""
        sorts = {
            "module": self.modules,
            "optimizer": self.optimizers,
            "object": self.objects,
            "value": self.values,
        }
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
                f"{name!r} is a DataLoader, which has no position to save: use torchdata's"
                " StatefulDataLoader, or keep the position yourself"
            )
        else:
            raise UsageError(
                f"{name!r} ({type(value).__name__}) cannot be this rank's own state: it has no"
                " state_dict and load_state_dict, and is neither a generator, a dict, nor a list"
            )


def check_complete(state: ScriptState) -> None:
    """Raise UsageError that names every missing part."""
    missing = [*_optimizers(state), *_module_parameters(state), *_schedulers(state)]
    if missing:
        raise UsageError(
            f"the state is not complete: {'; '.join(missing)}. A run could not continue from such a"
            " checkpoint, so nothing was saved; add the missing part, or pass complete=False where"
            " that is intended (such as weights alone)"
        )


def _optimizers(state: ScriptState) -> Iterable[str]:
    if state.optimizers:
        return
    for name, module in state.modules.items():
        if any(parameter.requires_grad for parameter in module.parameters()):
            yield f"{name!r} has parameters to train, but no optimizer is given"


def _module_parameters(state: ScriptState) -> Iterable[str]:
    owned = {id(e.value) for found in state.entries.values() for e in found}
    owned |= {id(tensor) for tensor in _held_tensors(state.values)}
    for name, optimizer in state.optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strange = sum(id(parameter) not in owned for parameter in parameters)
        if strange:
            yield (
                f"optimizer {name!r} updates {strange} of its {len(parameters)} parameters in no"
                " module that is given"
            )


def _schedulers(state: ScriptState) -> Iterable[str]:
    scheduled = {id(optimizer) for part in state.objects.values() for optimizer in _led_by(part)}
    for name, optimizer in state.optimizers.items():
        # torch marks the step of an optimizer that it has made a scheduler for.
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in scheduled:
            yield f"a learning rate scheduler leads optimizer {name!r}, but is not given"


def _led_by(part: Any) -> Iterable[Optimizer]:
    """Yield the optimizers that a scheduler, or a container of schedulers, changes."""
    inside = [part]
    for value in list(getattr(part, "__dict__", {}).values()):
        inside += value if isinstance(value, (list, tuple)) else [value]
    for each in inside:
        optimizer = getattr(each, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            yield optimizer


def _held_tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _held_tensors(part)


_MOMENTS_BY_CLASS = 2  # tensors of a parameter's size that Adam and most others keep


def expected_state(state: ScriptState) -> dict[str, torch.Tensor]:
    """Return a tensor like each one that optimizers will create at their first step.

    The names are arbitrary. The parameter itself stands for each of its moments: they have its
    shape, type and placement.
    """
    expected: dict[str, torch.Tensor] = {}
    for name, optimizer in state.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            count = _expected_moments(optimizer, group)
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in optimizer.state:
                    prefix = f"{name}.state to come.{number}.{index}"
                    expected |= {f"{prefix}.{moment}": parameter for moment in range(count)}
    return expected


def _expected_moments(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    kind = type(optimizer).__name__
    if kind == "SGD":
        return int(bool(group.get("momentum")))
    if kind == "RMSprop":
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    if kind in ("Muon", "ASGD"):
        return 1
    return _MOMENTS_BY_CLASS + bool(group.get("amsgrad"))


def script_origin() -> dict[str, str]:
    """Return the versions, host and script that a checkpoint records as its origin."""
    return {
        "outlast": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "script": Path(sys.argv[0]).name,
    }
