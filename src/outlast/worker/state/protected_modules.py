"""Protected modules, walked once: parameters and hooks, and buffers, which may differ by rank.

BatchNorm's running statistics are made from this rank's own samples, so under DDP they differ
between ranks until rank 0's are broadcast: a replacement for rank 0 needs rank 0's. Constant
buffers (masks, rotary tables) can be huge and never change. An EMA's counter changes after the vote
and is equal everywhere. So buffers are watched:

| buffer | kept |
|---|---|
| changes before the vote | rank-specific: in the progress slots |
| changes after the vote | by a donor, as parameters; small ones in the slots, too |
| never changes | not at all |

Small ones that change after the vote may differ by rank (rank_local_state.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from outlast.errors import ProtectError
from outlast.transport.worker_page import SLOT_BYTES
from outlast.worker.state.tensor_digests import local_shard

_DENSE, _SPARSE = 1, 2  # kinds of gradients
_HOOKS_MAX = 1 << 30  # of a module that was not there before
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ProtectedModules:
    """All parts of the named modules. What modules are given later is found by `refresh`."""

    def __init__(self, named: Mapping[str, nn.Module]) -> None:
        self._named = named
        self._hooks: dict[int, int] = {}  # by module, at the end of the last phase
        self._handles = -1  # made until then
        self._walk()

    def _walk(self) -> None:
        self._parts = [
            (prefix, part)
            for name, module in self._named.items()
            for prefix, part in module.named_modules(prefix=name)
        ]
        self._children = self._present_children()
        found = [part for _, part in self._parts if isinstance(part, DistributedDataParallel)]
        self.reducers = list({id(part): part for part in found}.values())

    @property
    def parts(self) -> list[nn.Module]:
        """Every module in them, they themselves included."""
        return [part for _, part in self._parts]

    def remember_hooks(self) -> None:
        """Take the present hooks for those of a phase, or of the script before it."""
        handles = RemovableHandle.next_id  # counts all that were ever registered in this process
        if handles != self._handles:
            self._handles = handles
            self._hooks = {id(part): _count_hooks(part) for part in self.parts}

    def new_hook(self) -> str:
        """Return the type of a module that has got a hook since the last phase, else ""."""
        if self._handles < 0 or self._handles == RemovableHandle.next_id:
            return ""
        before = self._hooks
        grown = (p for p in self.parts if _count_hooks(p) > before.get(id(p), _HOOKS_MAX))
        return next((type(part).__name__ for part in grown), "")

    def modes(self) -> bytes:
        """Of each module whether it trains, of each parameter whether it wants a gradient."""
        trains = bytes(part.training for _, part in self._parts)
        return trains + bytes(p.requires_grad for p in self.parameters())

    def set_modes(self, modes: bytes) -> None:
        """Be as `modes` said. Another number of modules changes nothing."""
        parameters = self.parameters()
        if len(modes) != len(self._parts) + len(parameters) or modes == self.modes():
            return
        for (_, part), trains in zip(self._parts, modes, strict=False):
            part.training = bool(trains)
        for parameter, wants in zip(parameters, modes[len(self._parts) :], strict=True):
            parameter.requires_grad_(bool(wants))

    def gradients(self) -> bytes:
        """Return for each parameter whether it has a gradient: 1, or 2 for a sparse one."""
        return bytes(
            0 if p.grad is None else _SPARSE if p.grad.is_sparse else _DENSE
            for p in self.parameters()
        )

    def set_gradients(self, gradients: bytes) -> None:
        """Have zeroes where `gradients` said that there was a gradient and there is none, and None
        where there was none. Another number of parameters changes nothing."""
        parameters = self.parameters()
        if len(gradients) != len(parameters) or gradients == self.gradients():
            return
        for parameter, kind in zip(parameters, gradients, strict=True):
            if not kind:
                parameter.grad = None
            elif parameter.grad is None:
                layout = torch.sparse_coo if kind == _SPARSE else torch.strided
                parameter.grad = torch.zeros_like(parameter.detach(), layout=layout)

    def _present_children(self) -> list[int]:
        return [id(child) for _, part in self._parts for child in part._modules.values()]  # noqa: SLF001 - no copy

    def refresh(self) -> None:
        """Look again, where a part was added, replaced or taken away."""
        if self._present_children() != self._children:
            self._walk()

    def names_besides(self, known: Collection[int]) -> list[str]:
        """Return the names of the parameters whose ids are not among `known`."""
        return [
            f"{prefix}.{name}"
            for prefix, part in self._parts
            for name, parameter in part.named_parameters(recurse=False)
            if id(parameter) not in known
        ]

    def parameters(self) -> list[nn.Parameter]:
        """All parameters now; one that several parts share comes several times."""
        return [
            parameter
            for _, part in self._parts
            for parameter in part._parameters.values()  # noqa: SLF001 - the same
            if parameter is not None
        ]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters now, by "module.name"."""
        return [
            (f"{prefix}.{key}", parameter)
            for prefix, part in self._parts
            for key, parameter in part._parameters.items()  # noqa: SLF001 - the same
            if parameter is not None
        ]

    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers now, by "module.name"; of sharded ones what this rank holds."""
        return {
            f"{prefix}.{key}": local_shard(buffer)
            for prefix, part in self._parts
            for key, buffer in part._buffers.items()  # noqa: SLF001 - the same
            if buffer is not None
        }

    def flags(self) -> list[bool]:
        """Of each DDP, whether its next forward broadcasts buffers: a forward without gradients
        makes it skip that, and ranks that disagree wait for each other for ever."""
        return [part.require_forward_param_sync for part in self.reducers]

    def set_flags(self, flags: list[bool]) -> None:
        """Set DDP's `require_forward_param_sync` of every reducer, in the order of `flags`."""
        for part, flag in zip(self.reducers, flags, strict=True):
            part.require_forward_param_sync = flag


SMALL_BYTES = 1 << 20
LATE_BYTES_MAX = 4 << 20  # of all small buffers together that change behind the vote
# Native batch norm writes without telling torch's version counters, so in a worker's first phases
# small buffers are compared by value; what has not changed by then is watched by version.
PHASES_BY_VALUE = 8


class ModuleBuffers:
    """All buffers of the protected modules, by "module.name"."""

    def __init__(self, modules: ProtectedModules) -> None:
        self.named = modules.buffers
        self._changing: set[str] = set()
        self._late: set[str] = set()
        self._phases = 0
        self._versions: dict[str, tuple[int, int]] = {}
        self._values: dict[str, torch.Tensor] = {}
        self.look_away()

    def own(self) -> dict[str, torch.Tensor]:
        """The rank-specific ones, by reference. Raises ProtectError where they fill no slot."""
        self._changing |= self._news()
        named = self.named()
        own = {key: named[key] for key in sorted(self._changing - self._late)}
        if sum(map(_bytes, own.values())) > SLOT_BYTES:
            largest = max(own, key=lambda key: _bytes(own[key]))
            raise ProtectError(
                f"buffers that change before optimizer.step belong to this rank and must fit its"
                f" slot of {SLOT_BYTES} bytes; {largest} alone has {_bytes(own[largest])}; nothing"
                " was applied. If it is equal on all ranks, write it after optimizer.step in"
                " session.run, or between phases (it then travels with the model); else keep it"
                " smaller or build it from the batch"
            )
        return own

    def late(self) -> dict[str, torch.Tensor]:
        """The small ones that change behind the vote, by reference: what a rank carries of them."""
        if not self._late:
            return {}
        named, room = self.named(), LATE_BYTES_MAX
        found: dict[str, torch.Tensor] = {}
        for key in sorted(self._late, key=lambda each: (_bytes(named[each]), each)):
            room -= _bytes(named[key])
            if room >= 0 and _bytes(named[key]) <= SMALL_BYTES:
                found[key] = named[key]
        return found

    @torch.no_grad()
    def restore_late(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put back what `late` gave."""
        self._late.update(saved)
        self.restore_own(saved)

    @torch.no_grad()
    def restore_own(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put back the rank's own buffers."""
        named = self.named()
        for key, value in saved.items():
            named[key].copy_(value)
        self._changing.update(saved)
        self.look_away()

    def mark_vote(self) -> None:
        """The vote is won: what changes first from here on is equal on all ranks."""
        self._changing |= self._news()

    def mark_end(self) -> None:
        """The phase is complete."""
        news = self._news()
        self._late |= news
        self._changing |= news
        self._phases += 1
        if self._phases == PHASES_BY_VALUE:
            self._values.clear()

    def mark_changing(self, key: str) -> None:
        """An attempt has changed this buffer before its vote, whatever torch's counter says."""
        self._changing.add(key)

    def is_changing(self, key: str) -> bool:
        """Return whether this buffer is known to differ between ranks or to change."""
        return key in self._changing

    def look_away(self) -> None:
        """Our own copying (an adopted state, a put-back) is no change."""
        named = self.named()
        self._versions = {key: _version(b) for key, b in named.items()}
        if self._phases < PHASES_BY_VALUE:
            self._values = {
                key: b.detach().clone()
                for key, b in named.items()
                if key not in self._changing and _bytes(b) <= SMALL_BYTES
            }

    def _news(self) -> set[str]:
        """Buffers that have changed for the first time."""
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
    """The buffers at the start of an attempt: copies of all that are small or known to change,
    and of `everything` where nobody has seen yet what the attempt's function changes."""

    def __init__(self, buffers: ModuleBuffers, *, everything: bool) -> None:
        self._buffers, self._by_value = buffers, everything
        self._kept: dict[str, torch.Tensor] = {}
        self._trusted: dict[str, tuple[int, int]] = {}
        for key, buffer in buffers.named().items():
            if everything or buffers.is_changing(key) or _bytes(buffer) <= SMALL_BYTES:
                self._kept[key] = buffer.detach().clone()
            else:
                self._trusted[key] = _version(buffer)

    def must_fit(self) -> None:
        """Raises ProtectError where a buffer has another shape or type than before."""
        named = self._buffers.named()
        for key, value in self._kept.items():
            now = named.get(key)
            if now is None or now.shape != value.shape or now.dtype != value.dtype:
                found = "gone" if now is None else f"{tuple(now.shape)} {now.dtype}"
                raise ProtectError(
                    f"buffer {key} was {tuple(value.shape)} {value.dtype} before an attempt that"
                    f" was refused and is {found} behind it: it cannot be put back; give it its"
                    " last shape before protect() (by a forward, say), and keep what grows in"
                    " session.state"
                )

    @torch.no_grad()
    def put_back(self) -> str:
        """Returns "" or which large buffer changed for the first time in a refused attempt, so
        that it cannot be put back here."""
        named = self._buffers.named()
        for key, value in self._kept.items():
            if self._by_value and not torch.equal(named[key], value):
                self._buffers.mark_changing(key)
            named[key].copy_(value)
        lost = [key for key, version in self._trusted.items() if _version(named[key]) != version]
        self._buffers.look_away()
        return lost[0] if lost else ""


def _version(buffer: torch.Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version  # noqa: SLF001 - torch's own counter of changes


def _bytes(buffer: torch.Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _count_hooks(part: nn.Module) -> int:
    """Return how many hooks a module and its own parameters have."""
    of_parameters = (
        hooks
        for parameter in part.parameters(recurse=False)
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # noqa: SLF001 - torch has no other list of them
    )
    return sum(len(vars(part).get(name, ())) for name in _HOOKS) + sum(
        len(hooks) for hooks in of_parameters if hooks
    )
