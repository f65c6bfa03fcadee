"""Protected modules: their parameters and hooks, and buffers, which may differ by rank.

BatchNorm's running statistics are computed from this rank's own samples, so under DDP they differ
between ranks until rank 0's are broadcast: a replacement for rank 0 needs rank 0's. Constant
buffers (masks, rotary tables) can be huge and never change. An EMA's counter changes after the vote
and is equal on all ranks. Changes of buffers are therefore tracked:

| buffer | kept |
|---|---|
| changes before the vote | rank-specific: in the progress slots |
| changes after the vote | by a donor, as parameters; small ones in the slots, too |
| never changes | not kept |

Small ones that change after the vote may differ by rank (rank_local_state.py).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from outlast.errors import ProtectError
from outlast.transport.worker_page import SLOT_BYTES
from outlast.worker.state.tensor_digests import (
    Word,
    are_same,
    first_difference,
    local_shard,
    word_of,
)

_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")
_GRADIENT, _BUFFERS = attrgetter("grad"), attrgetter("_buffers")
_DENSE, _SPARSE = 1, 2  # kinds of gradients
_PARAMETER_HOOKS = "_post_accumulate_grad_hooks"
_REGISTER = "an undone attempt has left it behind; register it before protect()"
_HOOKS_MAX = 1 << 30  # for a module that is new
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ProtectedModules:
    """All submodules of the named modules and their parameters; `refresh` finds those added later.

    `reducers` are the DDP modules that reduce gradients of these modules: submodules, and DDP
    modules around a submodule, which a script need not protect (`protect(model=ddp.module)`).
    """

    def __init__(
        self, named: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        self._named, self._optimizers = named, optimizers
        self._hooks: dict[int, int] = {}  # by module, at the end of the last phase
        self._handles = -1  # registered until then
        self._wrappers: list[DistributedDataParallel] = []
        self._has_run = False
        self._walk()
        self._find_wrappers()

    def _walk(self) -> None:
        self._parts = [
            (prefix, part)
            for name, module in self._named.items()
            for prefix, part in module.named_modules(prefix=name)
        ]
        self.parts = [part for _, part in self._parts]
        self._children = self._present_children()
        self._list_parameters()
        self._list_reducers()

    def _list_parameters(self) -> None:
        tables = [part._parameters for part in self.parts]  # noqa: SLF001 - TorchScript's have no iterator
        self.parameter_names = [tuple(table.keys()) for table in tables]
        self._parameters = [p for table in tables for p in table.values() if p is not None]

    def _list_reducers(self) -> None:
        found = [part for _, part in self._parts if isinstance(part, DistributedDataParallel)]
        self.reducers = list({id(part): part for part in [*found, *self._wrappers]}.values())

    def _find_wrappers(self) -> None:
        """Find DDP modules around submodules, in an order that all ranks have. All objects are
        searched, but only where an optimizer updates a parameter that no known DDP reduces."""
        if not dist.is_initialized():
            return
        known = {id(p) for part in self.reducers for p in part.parameters()}
        updated = (p for o in self._optimizers for group in o.param_groups for p in group["params"])
        if all(id(p) in known or local_shard(p) is not p for p in updated):
            return
        gc.collect()  # a DDP that the script has dropped reduces nothing
        places = {id(p): place for place, p in enumerate(self.parameters())}
        placed = [
            (min(places[id(p)] for p in each.parameters() if id(p) in places), each)
            for each in gc.get_objects()
            if DistributedDataParallel in type(each).__mro__
            and any(id(p) in places for p in each.parameters())
        ]
        self._wrappers = [each for _, each in sorted(placed, key=lambda pair: pair[0])]
        self._list_reducers()

    def remember_hooks(self) -> None:
        """Record the present hooks as known."""
        handles = RemovableHandle.next_id  # count of handles ever registered in this process
        if handles != self._handles:
            self._handles = handles
            self._hooks = {id(part): _count_hooks(part) for part in self.parts}

    def new_hook(self) -> str:
        """Return "name (type)" of a module with a new hook since the last phase, else ""."""
        if self._handles < 0 or self._handles == RemovableHandle.next_id:
            return ""
        before = self._hooks
        grown = ((n, p) for n, p in self._parts if _count_hooks(p) > before.get(id(p), _HOOKS_MAX))
        return next((f"{name} ({type(part).__name__})" for name, part in grown), "")

    def modes(self) -> bytes:
        """Return `training` of each module, then `requires_grad` of each parameter."""
        return bytes([*map(_TRAINING, self.parts), *map(_REQUIRES_GRAD, self._parameters)])

    def set_modes(self, modes: bytes) -> None:
        """Restore the result of `modes`. No-op if the number of modules or parameters differs."""
        parameters = self.parameters()
        if len(modes) != len(self._parts) + len(parameters) or modes == self.modes():
            return
        for (_, part), trains in zip(self._parts, modes, strict=False):
            part.training = bool(trains)
        for parameter, wants in zip(parameters, modes[len(self._parts) :], strict=True):
            parameter.requires_grad_(bool(wants))

    def gradients(self) -> bytes:
        """Return for each parameter whether it has a gradient: 1, or 2 for a sparse one."""
        gradients = map(_GRADIENT, self._parameters)
        return bytes([0 if g is None else _SPARSE if g.is_sparse else _DENSE for g in gradients])

    def set_gradients(self, gradients: bytes) -> None:
        """Create zero gradients where `gradients` has one and the parameter has none; remove the
        others. No-op if the number of parameters differs."""
        parameters = self.parameters()
        if len(gradients) != len(parameters) or gradients == self.gradients():
            return
        for parameter, kind in zip(parameters, gradients, strict=True):
            if not kind:
                parameter.grad = None
            elif parameter.grad is None:
                layout = torch.sparse_coo if kind == _SPARSE else torch.strided
                parameter.grad = torch.zeros_like(parameter.detach(), layout=layout)

    def _present_children(self) -> list[nn.Module | None]:
        return [child for part in self.parts for child in part._modules.values()]  # noqa: SLF001 - no copy

    def refresh(self) -> None:
        """List the parameters again, the submodules if they changed, and DDP modules made before
        the first phase."""
        if are_same(self._present_children(), self._children):
            self._list_parameters()
        else:
            self._walk()
        if not self._has_run:
            self._has_run = True
            self._find_wrappers()

    @property
    def named_parts(self) -> list[tuple[str, nn.Module]]:
        """All submodules with their names."""
        return self._parts

    def types(self) -> dict[str, str]:
        """Return the name of the class of each submodule, by the submodule's name."""
        return {name: type(part).__name__ for name, part in self._parts}

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters, at the last `refresh`. A parameter shared by several submodules
        appears several times."""
        return self._parameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters by "module.name"."""
        return [
            (f"{prefix}.{key}", parameter)
            for prefix, part in self._parts
            for key, parameter in part._parameters.items()  # noqa: SLF001 - the same
            if parameter is not None
        ]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return all buffers by "module.name"; for a sharded buffer, this rank's shard."""
        tables = [*map(_BUFFERS, self.parts)]
        if not any(tables):
            return {}
        return {
            f"{prefix}.{key}": local_shard(buffer)
            for (prefix, _), table in zip(self._parts, tables, strict=True)
            for key, buffer in table.items()
            if buffer is not None
        }

    def flags(self) -> list[bool]:
        """Return for each DDP whether its next forward broadcasts buffers. A forward without
        gradients disables the broadcast; ranks with different flags would deadlock."""
        return [part.require_forward_param_sync for part in self.reducers]

    def set_flags(self, flags: list[bool]) -> None:
        """Set DDP's `require_forward_param_sync` of every reducer, in the order of `flags`."""
        for part, flag in zip(self.reducers, flags, strict=True):
            part.require_forward_param_sync = flag


SMALL_BYTES = 1 << 20
LATE_BYTES_MAX = 4 << 20  # of all small buffers together that change after the vote
# First by value, later by version: native batch norm does not increment version counters.
PHASES_BY_VALUE = 8


class ModuleBuffers:
    """All buffers of the protected modules, by "module.name"."""

    def __init__(self, modules: ProtectedModules) -> None:
        self.named = modules.buffers
        self.added: set[str] = set()  # by attempts that were refused
        self._changing: set[str] = set()
        self._late: set[str] = set()
        self._phases = 0
        self._versions: dict[str, tuple[int, int]] = {}
        self._values: dict[str, torch.Tensor] = {}
        self.look_away()

    def own(self) -> dict[str, torch.Tensor]:
        """Return the rank-specific buffers by reference. Raises ProtectError above SLOT_BYTES."""
        self._changing |= self._news()
        named = self.named()
        own = {key: named[key] for key in sorted(self._changing - self._late)}
        if sum(each.nbytes for each in own.values()) > SLOT_BYTES:
            largest = max(own, key=lambda key: own[key].nbytes)
            raise ProtectError(
                f"buffers that change before optimizer.step belong to this rank and must fit its"
                f" slot of {SLOT_BYTES} bytes; {largest} alone has {own[largest].nbytes}; nothing"
                " was applied. If it is equal on all ranks, write it after optimizer.step in"
                " session.run, or between phases (it then travels with the model); else keep it"
                " smaller or build it from the batch"
            )
        return own

    def late(self) -> dict[str, torch.Tensor]:
        """Return the small buffers that change after the vote, by reference, within the limits."""
        if not self._late:
            return {}
        named, room = self.named(), LATE_BYTES_MAX
        found: dict[str, torch.Tensor] = {}
        for key in sorted(self._late, key=lambda each: (named[each].nbytes, each)):
            room -= named[key].nbytes
            if room >= 0 and named[key].nbytes <= SMALL_BYTES:
                found[key] = named[key]
        return found

    @torch.no_grad()
    def restore_late(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `late`."""
        self._late.update(saved)
        self.restore_own(saved)

    @torch.no_grad()
    def restore_own(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the rank's own buffers."""
        named = self.named()
        for key, value in saved.items():
            named[key].copy_(value)
        self._changing.update(saved)
        self.look_away()

    def mark_vote(self) -> None:
        """Mark a won vote: a buffer that first changes after it is equal on all ranks."""
        self._changing |= self._news()

    def mark_end(self) -> None:
        """Mark the end of a complete phase."""
        news = self._news()
        self._late |= news
        self._changing |= news
        self._phases += 1
        if self._phases == PHASES_BY_VALUE:
            self._values.clear()

    def mark_changing(self, key: str) -> None:
        """Mark a buffer as changed before the vote, regardless of torch's version counter."""
        self._changing.add(key)

    def is_changing(self, key: str) -> bool:
        """Return whether this buffer is known to differ between ranks or to change."""
        return key in self._changing

    def look_away(self) -> None:
        """Take the present values as unchanged, after an adoption or a restore."""
        named = self.named()
        self._versions = {key: _version(b) for key, b in named.items()}
        if self._phases < PHASES_BY_VALUE:
            self._values = {
                key: b.detach().clone()
                for key, b in named.items()
                if key not in self._changing and b.nbytes <= SMALL_BYTES
            }

    def _news(self) -> set[str]:
        """Return the buffers that have changed for the first time."""
        news = {
            key
            for key, buffer in self.named().items()
            if key not in self._changing and self._differs(key, buffer)
        }
        for key in news:
            self._values.pop(key, None)
        return news

    def _differs(self, key: str, buffer: torch.Tensor) -> bool:
        if self._versions.get(key) != _version(buffer):
            return True
        value = self._values.get(key)
        return value is not None and not torch.equal(value, buffer)


class BufferSnapshot:
    """Buffers at the start of an attempt: copies of all small or changing buffers, and of
    `everything` if the changes of the attempt's function are not yet known. `exact`: the function
    can write past version counters, so that digests of the others are kept."""

    def __init__(self, buffers: ModuleBuffers, *, everything: bool, exact: bool = False) -> None:
        self._buffers, self._by_value, self._exact = buffers, everything, exact
        self._kept: dict[str, torch.Tensor] = {}
        self._trusted: dict[str, tuple[int, int]] = {}
        for key, buffer in buffers.named().items():
            if everything or buffers.is_changing(key) or buffer.nbytes <= SMALL_BYTES:
                self._kept[key] = buffer.detach().clone()
            else:
                self._trusted[key] = _version(buffer)
        self._words = self._digested() if exact else {}

    def _digested(self) -> dict[str, Word]:
        named = self._buffers.named()
        return {key: word_of(named[key]) for key in self._trusted if key in named}

    def mark_written(self) -> None:
        """Mark buffers that have changed past their version counters, before the vote."""
        if not self._exact:
            return
        named = self._buffers.named()
        for key, value in self._kept.items():
            is_known = self._buffers.is_changing(key) or key not in named
            if not is_known and not torch.equal(named[key], value):
                self._buffers.mark_changing(key)
        now = self._digested()
        while name := first_difference(self._words, now):
            self._buffers.mark_changing(name)
            del now[name]

    def must_fit(self) -> None:
        """Raise ProtectError if a buffer cannot be put back, or what it was is not known."""
        named, added = self._buffers.named(), self._buffers.added
        added |= named.keys() - self._kept.keys() - self._trusted.keys()
        for key, value in self._kept.items():
            now = named.get(key)
            if self._by_value and key in added and not (now is None or torch.equal(now, value)):
                raise ProtectError(f"{key}, a buffer of a phase's own, changes: {_REGISTER}")
            if now is None or now.shape != value.shape or now.dtype != value.dtype:
                found = "gone" if now is None else f"{tuple(now.shape)} {now.dtype}"
                raise ProtectError(
                    f"buffer {key} was {tuple(value.shape)} {value.dtype} before an attempt that"
                    f" was refused and is {found} after it: it cannot be put back; give it its"
                    " last shape before protect() (by a forward, say), and keep what grows in"
                    " session.state"
                )

    @torch.no_grad()
    def put_back(self) -> str:
        """Restore the buffers. Return "", or the name of a large buffer that changed for the first
        time in the refused attempt and cannot be restored."""
        named = self._buffers.named()
        for key, value in self._kept.items():
            if self._by_value and not torch.equal(named[key], value):
                self._buffers.mark_changing(key)
            named[key].copy_(value)
        lost = [key for key, version in self._trusted.items() if _version(named[key]) != version]
        unversioned = first_difference(self._words, self._digested()) if self._exact else ""
        self._buffers.look_away()
        return lost[0] if lost else unversioned


def _version(buffer: torch.Tensor) -> tuple[int, int]:
    return buffer._cdata, buffer._version  # noqa: SLF001 - its identity without an audit event, and torch's own counter of changes


def _count_hooks(part: nn.Module) -> int:
    """Return how many hooks a module and its own parameters have."""
    owners, names = (part, *part.parameters(recurse=False)), (*_HOOKS, _PARAMETER_HOOKS)
    return sum(len(getattr(owner, name, None) or ()) for owner in owners for name in names)
