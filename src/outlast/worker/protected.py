"""What `Session.protect` was given: three kinds of state, and how each is kept.

- *replicated*: modules, optimizers, schedulers, GradScaler, `Replicated(...)`. Equal on all ranks
  of a replica; a joiner gets it from a donor that has finished its phase.
- *rank-specific*: generators and the user's own small objects. They lie in the page's slots.
- *attempt-local*: what a refused attempt may have touched before the vote (gradients, buffers,
  hyperparameters, scheduler and scaler, half-done DDP reductions); `Undo` puts it back.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from outlast.checkpoint import tree
from outlast.errors import ProtectError, UnsupportedError
from outlast.worker import generators
from outlast.worker.buffers import Buffers, BufferSnapshot
from outlast.worker.generators import GENERATOR_TYPES, Generator


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state and take it back."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Replicated:
    """Marks an object whose state is equal on all ranks (an EMA of the weights, say), so that it
    travels with the model and not in this rank's slot. It must change only after `optimizer.step`
    or between phases."""

    def __init__(self, target: Stateful) -> None:
        if not isinstance(target, Stateful):
            raise ProtectError(
                f"Replicated({type(target).__name__}) needs state_dict and load_state_dict"
            )
        self.target = target


class Protected:
    """The script's state by name. Raises ProtectError for what cannot be kept."""

    def __init__(self, named: Mapping[str, Any], state: dict[str, Any]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.objects: dict[str, Stateful] = {}
        self.generators: dict[str, Generator] = {}
        self.own: dict[str, Stateful | dict[Any, Any] | list[Any]] = {"state": state}
        for name, value in named.items():
            self._place(name, value)
        held = {id(p) for module in self.modules.values() for p in module.parameters()}
        for name, optimizer in self.optimizers.items():
            if any(id(p) not in held for g in optimizer.param_groups for p in g["params"]):
                raise ProtectError(
                    f"optimizer {name!r} updates a parameter that no protected module holds:"
                    " protect that module too, or a replacement worker would not get it"
                )
        self._shape = self._count()
        self.buffers = Buffers(self.modules)

    def _place(self, name: str, value: Any) -> None:
        if name == "state":
            raise ProtectError("the name 'state' is taken by session.state")
        if isinstance(value, nn.Module):
            _check_module(name, value)
            self.modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers[name] = value
        elif isinstance(value, Replicated):
            self.objects[name] = value.target
        elif isinstance(value, (LRScheduler, torch.amp.GradScaler)):
            self.objects[name] = value
        elif isinstance(value, GENERATOR_TYPES):
            self.generators[name] = value
        elif isinstance(value, torch.utils.data.DataLoader):
            return  # its position is kept by `batches`
        elif isinstance(value, (Stateful, dict, list)):
            self.own[name] = value
        else:
            raise ProtectError(
                f"cannot protect {name!r} ({type(value).__name__}): it has no state_dict and"
                " load_state_dict, and is neither a generator, a dict, nor a list"
            )

    def _count(self) -> tuple[int, ...]:
        return tuple(
            len(group["params"]) for o in self.optimizers.values() for group in o.param_groups
        )

    @property
    def has_scaler(self) -> bool:
        """A GradScaler may skip the optimizer's step on its own."""
        return any(isinstance(o, torch.amp.GradScaler) for o in self.objects.values())

    def check_unchanged(self) -> None:
        """Raises ProtectError when an optimizer's parameters were changed after `protect`."""
        if self._count() != self._shape:
            raise ProtectError(
                f"an optimizer had {self._shape} parameters by group at protect() and now has"
                f" {self._count()}: build everything first, then protect; nothing was applied"
            )

    def schema(self) -> tuple[str, str]:
        """(digest, summary) of names, shapes and dtypes; equal on all ranks or the run stops."""
        lines = [
            f"{name}.{key} {tuple(t.shape)} {t.dtype}"
            for name, module in self.modules.items()
            for key, t in [*module.named_parameters(), *module.named_buffers()]
        ]
        lines += [f"{n}: {type(o).__name__} {[len(g['params']) for g in o.param_groups]}"
                  for n, o in self.optimizers.items()]  # fmt: skip
        lines += sorted([*self.objects, *self.generators, *self.own])
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        numbers = sum(p.numel() for m in self.modules.values() for p in m.parameters())
        return digest, f"{len(lines)} entries, {numbers} parameters, {lines[:1]} ..."

    # --- rank-specific ---

    def own_state(self) -> dict[str, Any]:
        """Generators, own objects and own buffers, as plain data (by reference where it can be)."""
        return {
            "buffers": self.buffers.own(),
            **self.own_choices(),
        }

    def own_choices(self) -> dict[str, Any]:
        """The part of `own_state` that the script itself may change: drawn numbers, objects."""
        return {
            "random": generators.capture(self.generators),
            "objects": {
                name: value if isinstance(value, (dict, list)) else value.state_dict()
                for name, value in self.own.items()
            },
        }

    def restore_own(self, saved: Mapping[str, Any]) -> None:
        """Put back what `own_state` said (after a round trip through bytes)."""
        generators.restore(saved["random"], self.generators)
        self.buffers.restore_own(saved["buffers"])
        objects = saved["objects"]
        if objects.keys() != self.own.keys():
            raise ProtectError(
                f"the saved objects are {sorted(objects)}, the script protects {sorted(self.own)}"
            )
        for name, value in self.own.items():
            if isinstance(value, dict):
                value.clear()
                value.update(objects[name])
            elif isinstance(value, list):
                value[:] = objects[name]
            else:
                value.load_state_dict(objects[name])

    # --- replicated ---

    def replicated(self) -> dict[str, Any]:
        """Everything a joiner needs from a donor: tensors by reference, nothing copied."""
        return {
            "modules": {
                name: {
                    "parameters": {k: p.detach() for k, p in module.named_parameters()},
                    "buffers": {k: b.detach() for k, b in module.named_buffers()},
                }
                for name, module in self.modules.items()
            },
            "optimizers": {name: _optimizer_tree(o) for name, o in self.optimizers.items()},
            "objects": {name: o.state_dict() for name, o in self.objects.items()},
            "ddp": _ddp_flags(self.modules),
        }

    @torch.no_grad()
    def adopt(self, state: Mapping[str, Any]) -> None:
        """Take over a donor's `replicated()`. Raises ProtectError when the shapes do not fit;
        then nothing was changed."""
        own = self.buffers.own()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, module in self.modules.items():
            for kind, live in (
                ("parameters", dict(module.named_parameters())),
                ("buffers", dict(module.named_buffers())),
            ):
                saved = state["modules"][name][kind]
                _must_match(f"{name} {kind}", saved, live)
                pairs += [
                    (tensor, saved[key])
                    for key, tensor in live.items()
                    if kind == "parameters" or f"{name}.{key}" not in own
                ]
        for target, source in pairs:
            target.copy_(source)
        for name, optimizer in self.optimizers.items():
            _optimizer_adopt(optimizer, state["optimizers"][name])
        for name, value in self.objects.items():
            value.load_state_dict(state["objects"][name])
        _set_ddp_flags(self.modules, state["ddp"])
        self.buffers.look_away()


def _check_module(name: str, module: nn.Module) -> None:
    if any(not hasattr(part.reducer, "_reset_state") for part in _reducers({name: module})):
        raise UnsupportedError(
            f"{name}: the DDP of torch {torch.__version__} cannot be reset after a failed"
            " backward; torch 2.11 to 2.13 can"
        )


def _must_match(
    what: str, saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> None:
    wrong = [
        key
        for key in {*saved, *live}
        if key not in saved or key not in live or saved[key].shape != live[key].shape
    ]
    if wrong:
        raise ProtectError(
            f"{what}: {len(wrong)} entries differ from what the donor sent, first {min(wrong)!r};"
            " this worker's script built another model; nothing was taken over"
        )


def _optimizer_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "groups": [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ],
        # Raw tensors, and not load_state_dict, which would cast moments to the parameters' dtype.
        "state": [dict(optimizer.state[p]) if p in optimizer.state else None for p in parameters],
    }


def _optimizer_adopt(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for parameter, values in zip(parameters, saved["state"], strict=True):
        if values is not None:
            optimizer.state[parameter] = {k: _on(parameter, v) for k, v in values.items()}


def _on(parameter: torch.Tensor, value: Any) -> Any:
    # 0-dim step counters stay on the CPU, where the optimizer made them unless it is capturable.
    if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
        return value.to(parameter.device)
    return value


def _reducers(modules: Mapping[str, nn.Module]) -> list[nn.parallel.DistributedDataParallel]:
    return [
        part
        for module in modules.values()
        for part in module.modules()
        if isinstance(part, nn.parallel.DistributedDataParallel)
    ]


def _ddp_flags(modules: Mapping[str, nn.Module]) -> list[bool]:
    # A forward without gradients makes the next one skip its broadcast of buffers: ranks that
    # disagree on this wait for each other for ever.
    return [part.require_forward_param_sync for part in _reducers(modules)]


def _set_ddp_flags(modules: Mapping[str, nn.Module], flags: list[bool]) -> None:
    for part, flag in zip(_reducers(modules), flags, strict=True):
        part.require_forward_param_sync = flag


class Undo:
    """What one attempt may touch before its vote, remembered at its start."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self._gradless = [
            p for m in protected.modules.values() for p in m.parameters() if p.grad is None
        ]
        self._buffers = BufferSnapshot(protected.buffers)
        self._flags = _ddp_flags(protected.modules)
        self._groups = {
            name: [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            for name, o in protected.optimizers.items()
        }
        self._objects = {n: copy.deepcopy(o.state_dict()) for n, o in protected.objects.items()}
        self.own_bytes = tree.encode(protected.own_state())

    def new_gradients(self) -> bool:
        """Whether a parameter without a gradient at the start of the attempt has one now."""
        return any(p.grad is not None for p in self._gradless)

    @torch.no_grad()
    def put_back(self) -> str:
        """The state before the attempt, except for DDP's half-done work (see `reset_reducers`).
        Returns "" or why this process cannot be put back and must be replaced."""
        gradless = {id(p) for p in self._gradless}
        for module in self._protected.modules.values():
            for parameter in module.parameters():
                if id(parameter) in gradless:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        lost = self._buffers.put_back()
        _set_ddp_flags(self._protected.modules, self._flags)
        for name, optimizer in self._protected.optimizers.items():
            for group, values in zip(optimizer.param_groups, self._groups[name], strict=True):
                group.update(values)
            # A fused step refused under a GradScaler leaves its scale behind, and the redo would
            # be wrong by that factor.
            for leftover in ("grad_scale", "found_inf"):
                if hasattr(optimizer, leftover):
                    delattr(optimizer, leftover)
        for name, value in self._protected.objects.items():
            value.load_state_dict(copy.deepcopy(self._objects[name]))
            if isinstance(value, torch.amp.GradScaler):
                value._per_optimizer_states.clear()  # noqa: SLF001 - "already unscaled" outlives a refused step
        self._protected.restore_own(tree.decode(self.own_bytes))
        return f"buffer {lost} changed in an attempt that was refused" if lost else ""


def reset_reducers(protected: Protected) -> None:
    """Bring every DDP to "no reduction in flight", at the opening of a generation.

    An exception that left a backward leaves its reducer half-way, and a reset makes the reducer
    rebuild its buckets one step later, with a broadcast: so all ranks reset, or none may. The
    rebuilt buckets are the same ones, since the order of gradients is.
    """
    for part in _reducers(protected.modules):
        part.reducer._reset_state()  # noqa: SLF001 - no public way out of a failed backward
