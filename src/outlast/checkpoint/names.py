"""Names of a module's tensors that do not depend on what the module is wrapped in."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from outlast.errors import CodecError, UnsupportedError

# What torch.compile and activation checkpointing put between a module and its tensors.
_SEEN_THROUGH = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class Entry(NamedTuple):
    """One entry of a module's state: its canonical name, its key in `state_dict`, and the live
    value; "made" is what a hook or `get_extra_state` made for the occasion."""

    name: str
    key: str
    value: Any
    kind: Literal["parameter", "buffer", "made"]


def entries(module: nn.Module) -> list[Entry]:
    """The state of `module`, as `state_dict` has it: persistent buffers only.

    Raises UnsupportedError for FSDP of version 1, CodecError for two entries of one name.
    """
    wrappers = _wrappers(module)
    parameters = {id(p) for p in module.parameters()}
    buffers = {id(b) for b in module.buffers()}
    found: dict[str, Entry] = {}
    # Its hooks matter: FSDP2 puts the sharded parameters back in one of them.
    for key, value in module.state_dict(keep_vars=True).items():
        name = _canonical(key, wrappers)
        if name in found and found[name].value is not value:
            raise CodecError(
                f"{key!r} and {found[name].key!r} are both called {name!r} without their wrappers;"
                " nothing was saved; rename one of these submodules"
            )
        kind = (
            "parameter" if id(value) in parameters else "buffer" if id(value) in buffers else "made"
        )
        found[name] = Entry(name, key, value, kind)
    return list(found.values())


def of_parameters(modules: dict[str, list[Entry]]) -> dict[int, tuple[str, str]]:
    """Of each parameter, by id: the module that holds it, and its name there. Of several that
    hold it, the first."""
    known: dict[int, tuple[str, str]] = {}
    for module, found in modules.items():
        for entry in found:
            if entry.kind == "parameter":
                known.setdefault(id(entry.value), (module, entry.name))
    return known


def _wrappers(module: nn.Module) -> list[str]:
    """Where there are modules whose only child is called "module", innermost first."""
    found: list[str] = []
    for path, part in module.named_modules(remove_duplicate=False):
        if _is_flattened(type(part)):
            raise UnsupportedError(
                f"{path or 'the module'} is wrapped in FullyShardedDataParallel, whose flattened"
                " parameters have no names of their own; use fully_shard (FSDP2)"
            )
        if isinstance(part, (DataParallel, DistributedDataParallel)):
            found.append(f"{_seen_through(path)}.".removeprefix("."))
    return sorted(found, key=len, reverse=True)


@lru_cache(maxsize=1024)
def _is_flattened(kind: type[nn.Module]) -> bool:
    return any(each.__name__ == "FullyShardedDataParallel" for each in kind.__mro__)


def _canonical(key: str, wrappers: list[str]) -> str:
    name = _seen_through(key)
    for wrapper in wrappers:
        if name.startswith(f"{wrapper}module."):
            name = wrapper + name[len(wrapper) + len("module.") :]
    return name


def _seen_through(path: str) -> str:
    if not any(part in path for part in _SEEN_THROUGH):  # nearly always
        return path
    return ".".join(part for part in path.split(".") if part not in _SEEN_THROUGH)
