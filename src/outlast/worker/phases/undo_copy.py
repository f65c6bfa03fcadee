"""Undo copies of the state that an attempt changes before its vote."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from outlast.checkpoint.format import codec
from outlast.errors import ProtectError
from outlast.worker.phases.attempt_gradients import AttemptGradients
from outlast.worker.state.module_buffers import BufferSnapshot
from outlast.worker.state.optimizer_state import GROUPS, hyperparameters, put_in_groups
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import digests


class ObjectMark:
    """State of an object with a `state_dict`: its plain values, and digests of its
    tensors, since a version counter misses a write through `.data`. Tensors at the addresses
    `apart_from` (others put those back) do not count."""

    def __init__(self, target: Any, apart_from: set[int]) -> None:
        self._target, self._apart_from = target, apart_from
        self._look = self._now()

    def has_moved(self) -> bool:
        """Return whether the state is another one."""
        return self._now() != self._look

    def _now(self) -> tuple[bytes, list[bytes]]:
        schema, tensors = codec.flatten(self._target.state_dict())
        return schema, digests([t for t in tensors if t.data_ptr() not in self._apart_from])


class UndoCopy:
    """State before one attempt: gradients, buffers, hyperparameters, schedulers and scalers.

    With `everything` also all else that ranks hold alike.
    """

    def __init__(
        self, protected: ProtectedState, key: str = "", *, everything: bool = False
    ) -> None:
        """`key`: the function that the attempt runs, "" for dry runs, of which nothing stays."""
        self._protected = protected
        self._copy = deep_copy(protected.replicated()) if everything else None
        self._gradients = AttemptGradients(
            protected.tree.parameters(), protected.tree.reducers, protected.scalers
        )
        known = protected.knows(key)
        self._buffers = BufferSnapshot(protected.buffers, everything=not known)
        self._flags = protected.tree.flags()
        self._groups = {n: deep_copy(hyperparameters(o)) for n, o in protected.optimizers.items()}
        self._objects = {n: copy.deepcopy(o.state_dict()) for n, o in protected.schedules.items()}
        self._marks: dict[str, ObjectMark] = {}
        if key and not known and not everything:
            shared = {b.data_ptr() for b in protected.tree.buffers().values()}
            self._marks = {n: ObjectMark(o, shared) for n, o in protected.copies.items()}
        self.own_bytes = protected.own_state(protected.own_choices())

    def changed_parameter(self) -> str:
        """Return the name of a parameter that the attempt has written to, "" for none."""
        changed = self._gradients.changed_parameter()
        named = (
            f"{name}.{key}"
            for name, module in self._protected.modules.items()
            for key, parameter in module.named_parameters()
            if parameter is changed
        )
        return next(named, "") if changed is not None else ""

    def leaves_gradients(self) -> bool:
        """Return whether an attempt without a vote leaves gradients to the next phase."""
        return self._gradients.has_leftovers()

    @torch.no_grad()
    def put_back(self) -> str:
        """Restore the state before the attempt, except for DDP's half-done work.

        `DDPBuckets.restore` restores that. Returns "", or the reason why this process must be
        replaced. Raises ProtectError when a Replicated object, or an optimizer's groups, were
        changed against the contract.
        """
        for name, optimizer in self._protected.optimizers.items():
            if len(optimizer.param_groups) != len(self._groups[name]):
                raise ProtectError(
                    f"optimizer {name!r} got another number of groups in an attempt that was"
                    f" refused, and cannot be put back: {GROUPS}"
                )
        self._buffers.must_fit()
        if self._copy is not None:
            self._protected.adopt(self._copy)
        self._gradients.put_back()
        lost = self._buffers.put_back()
        self._protected.tree.set_flags(self._flags)
        for name, optimizer in self._protected.optimizers.items():
            put_in_groups(optimizer, self._groups[name])
            # A fused step refused under a GradScaler leaves its scale behind, and the redo would
            # be wrong by that factor.
            for leftover in ("grad_scale", "found_inf"):
                if hasattr(optimizer, leftover):
                    delattr(optimizer, leftover)
        for name, value in self._protected.schedules.items():
            if isinstance(value, LRScheduler):  # its state is its attributes
                for key in value.state_dict().keys() - self._objects[name].keys():
                    delattr(value, key)
            value.load_state_dict(copy.deepcopy(self._objects[name]))
            if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
                value._per_optimizer_states.clear()  # noqa: SLF001 - "already unscaled" outlives a refused step
        self._protected.restore_own(self.own_bytes)
        for name, mark in self._marks.items():
            if mark.has_moved():
                raise ProtectError(
                    f"the Replicated object {name!r} changed before optimizer.step, in an attempt"
                    " that was refused: no copy of it is kept, so it cannot be put back; change it"
                    " after optimizer.step or between phases"
                )
        return f"buffer {lost} changed in an attempt that was refused" if lost else ""


def deep_copy(value: Any, device: str | None = None) -> Any:
    """Copy everything; tensors to `device`, or where they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: deep_copy(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(deep_copy(item, device) for item in value)
    return copy.deepcopy(value)
