"""Attempts at a phase: copies, checks and undo of the state that may change before the vote.

Gradients are recorded at the start; those left by an attempt without a vote are detected.

Weights that an attempt writes before its vote are detected by digests: `parameter.data.add_(...)`,
a NumPy view, or `set_()` do not change version counters. All weights and moments are digested in a
function's rehearsals and its first step, and in every attempt at a function whose code can write in
such a way (unversioned_writes.py). For other functions each later attempt digests one window of one
parameter, in turn, so that a rare write by code that was not examined is found eventually.

Digests are compared before the vote, and when an attempt is refused: weights that it swapped and
did not swap back would enter the redo.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from outlast.checkpoint.format import codec
from outlast.errors import ProtectError
from outlast.worker.script.value_encoding import PLAIN
from outlast.worker.state.optimizer_state import hyperparameters, put_in_groups
from outlast.worker.state.protected_modules import BufferSnapshot
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.scaler_steps import ScalerSteps
from outlast.worker.state.tensor_digests import (
    Word,
    digests,
    first_difference,
    local_shard,
    word_of,
)


class _Seen(NamedTuple):
    """Weak reference to a gradient at the start, so that an attempt can free its memory."""

    parameter: nn.Parameter
    gradient: weakref.ref[torch.Tensor] | None
    version: int


_VERSION = attrgetter("_version")  # torch's own counter of changes


class AttemptGradients:
    """The gradients of all protected parameters at the start of an attempt."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        reducers: Iterable[DistributedDataParallel],
        scaler_steps: ScalerSteps,
    ) -> None:
        self._parameters = list(parameters)
        self._versions = [*map(_VERSION, self._parameters)]
        self._before = [
            _Seen(p, None, 0) if g is None else _Seen(p, weakref.ref(g), _VERSION(g))
            for p in self._parameters
            for g in (p.grad,)
        ]
        self._reducers = reducers
        self._scaler_steps = scaler_steps

    def changed_parameter(self) -> nn.Parameter | None:
        """Return a parameter that the attempt has written to, or None."""
        versions = [*map(_VERSION, self._parameters)]
        if versions == self._versions:
            return None
        pairs = zip(self._parameters, versions, self._versions, strict=True)
        return next(parameter for parameter, now, before in pairs if now != before)

    def has_leftovers(self) -> bool:
        """Return whether the attempt, without an optimizer's vote, leaves gradients to which the
        next phase would add: new ones, or changed ones that are not zero."""
        if self._scaler_steps.has_ended():
            return False
        return any(
            before.parameter.grad is not None
            and (before.gradient is None or self._differs(before, before.parameter.grad))
            for before in self._before
        )

    def untouched(self) -> set[int]:
        """Return the ids of the parameters whose gradients are those of earlier phases."""
        pairs = [(one, one.gradient) for one in self._before]
        same = [o for o, old in pairs if old and (g := old()) is not None and g is o.parameter.grad]
        return {id(one.parameter) for one in same if _VERSION(one.parameter.grad) == one.version}

    @torch.no_grad()
    def put_back(self) -> None:
        """Remove new gradients and zero the others, since a phase clears gradients first."""
        for before in self._before:
            if before.gradient is None:
                before.parameter.grad = None
            elif before.parameter.grad is not None:
                before.parameter.grad.zero_()

    def _differs(self, before: _Seen, now: torch.Tensor) -> bool:
        assert before.gradient is not None
        if before.gradient() is now and _VERSION(now) == before.version:
            return False
        if id(before.parameter) in self._in_buckets():
            return False  # DDP itself moves these to new memory when it rebuilds its buckets
        now = local_shard(now)
        values = now.coalesce().values() if now.is_sparse else now
        return bool(values.any())

    def _in_buckets(self) -> set[int]:
        return {
            id(p)
            for part in self._reducers
            if part.gradient_as_bucket_view
            for p in part.parameters()
        }


class ObjectMark:
    """State of an object with a `state_dict`: its plain values, and digests of its tensors, since a
    version counter misses a write through `.data`. Tensors at the addresses `apart_from` do not
    count: they are restored elsewhere. `by_version`: addresses and version counters instead of
    digests, for an object whose `state_dict` does not copy its tensors (`copies`)."""

    def __init__(self, target: Any, apart_from: set[int], *, by_version: bool = False) -> None:
        self._target, self._apart_from, self._by_version = target, apart_from, by_version
        self._look = self._now()

    @property
    def tensor_count(self) -> int:
        """Return the number of tensors in the state at the mark."""
        return len(self._look[1])

    def has_moved(self) -> bool:
        """Return whether the state has changed since the mark."""
        return self._now() != self._look

    def copies(self) -> bool:
        """Return whether each `state_dict` has tensors of its own."""
        one, other = self._tensors(), self._tensors()  # both alive, so that no address is reused
        return [t.data_ptr() for t in one[1]] != [t.data_ptr() for t in other[1]]

    def _tensors(self) -> tuple[bytes, list[torch.Tensor]]:
        schema, tensors = codec.flatten(self._target.state_dict())
        return schema, [t for t in tensors if t.data_ptr() not in self._apart_from]

    def _now(self) -> tuple[bytes, list[Any]]:
        schema, tensors = self._tensors()
        if not self._by_version:
            return schema, list[Any](digests(tensors))
        return schema, [(t.data_ptr(), t._version) for t in tensors]  # noqa: SLF001 - torch's own counter of changes


class UndoCopy:
    """State before one attempt: gradients, buffers, hyperparameters, schedulers and scalers.

    With `everything`, also all other state that is equal on all ranks.
    """

    def __init__(
        self,
        protected: ProtectedState,
        key: str = "",
        *,
        everything: bool = False,
        exact: bool = False,
    ) -> None:
        """`key`: the function that the attempt runs, "" for dry runs, which are always undone.

        `exact`: the function can write past version counters.
        """
        self._protected = protected
        self._copy = deep_copy(protected.replicated()) if everything else None
        self._objects = {n: copy.deepcopy(o.state_dict()) for n, o in protected.schedules.items()}
        scales = [(scaler, self._objects[n]["scale"]) for n, scaler in protected.scalers.items()]
        self.scaler_steps = ScalerSteps(scales)
        self.gradients = AttemptGradients(
            protected.tree.parameters(), protected.tree.reducers, self.scaler_steps
        )
        known = protected.knows(key)
        self._buffers = BufferSnapshot(protected.buffers, everything=not known, exact=exact)
        self._flags = protected.tree.flags()
        self._groups = {n: deep_copy(hyperparameters(o)) for n, o in protected.optimizers.items()}
        self._marks: dict[str, ObjectMark] = {}
        if key and not everything and protected.copies:
            self._marks = self._marked(by_version=known and not exact)
        self.own_bytes = protected.own_state(protected.own_choices(key))

    def _marked(self, *, by_version: bool) -> dict[str, ObjectMark]:
        """Mark the Replicated objects; `by_version`: only those whose state_dict copies nothing."""
        protected = self._protected
        shared = {b.data_ptr() for b in protected.tree.buffers().values()}
        marks = {
            name: ObjectMark(target, shared, by_version=by_version)
            for name, target in protected.copies.items()
            if not (by_version and name in protected.copying)
        }
        for name, mark in marks.items():
            if protected.tensor_counts.get(name) != mark.tensor_count:  # `copies` is not known yet
                protected.tensor_counts[name] = mark.tensor_count
                if mark.copies():
                    protected.copying.add(name)
        if by_version:
            return {name: mark for name, mark in marks.items() if name not in protected.copying}
        return marks

    def changed_parameter(self) -> str:
        """Return the name of a parameter that the attempt has written to, "" for none."""
        changed = self.gradients.changed_parameter()
        named = (
            f"{name}.{key}"
            for name, module in self._protected.modules.items()
            for key, parameter in module.named_parameters()
            if parameter is changed
        )
        return next(named, "") if changed is not None else ""

    def mark_written(self) -> None:
        """Mark buffers that changed past their version counters, before the vote."""
        self._buffers.mark_written()

    def leaves_gradients(self) -> bool:
        """Return whether an attempt without a vote leaves gradients to the next phase."""
        return self.gradients.has_leftovers()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters before the attempt, if all was copied."""
        modules = self._copy["modules"] if self._copy is not None else {}
        return {f"{n}.{k}": t for n, each in modules.items() for k, t in each["parameters"].items()}

    def put_back_training(self) -> None:
        """Restore weights, moments, buffers and objects before a vote, if all was copied. What is
        the rank's own, and DDP's buckets, stay."""
        if self._copy is not None:
            ddp = msgspec.to_builtins(self._protected.reducers.states())
            self._protected.adopt({**self._copy, "ddp": ddp})

    @torch.no_grad()
    def put_back(self) -> str:
        """Restore the state before the attempt, except for DDP's half-done work.

        `DDPBuckets.restore` restores that. Returns "", or the reason why this process must be
        replaced. Raises ProtectError when a Replicated object, or an optimizer's groups, were
        changed against the contract.
        """
        self._protected.check_groups()
        self._protected.iterations.undo()
        self._buffers.must_fit()
        if self._copy is not None:
            self._protected.adopt(self._copy)
        self.gradients.put_back()
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
                value._per_optimizer_states.clear()  # noqa: SLF001 - "already unscaled" would survive a refused step
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
    """Return a deep copy; tensors on `device`, or on their own."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: deep_copy(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(deep_copy(item, device) for item in value)
    return copy.deepcopy(value)


WINDOW_BYTES = 1 << 16
_WINDOW = "window"


class WrittenWeights:
    """Digests of weights at the start of an attempt: with `everything` (a function that is new
    here, or can write past the version counters) all weights and moments, else the window of the
    `turn`-th attempt."""

    def __init__(self, protected: ProtectedState, *, everything: bool, turn: int) -> None:
        self._protected, self._everything = protected, everything
        self._words: dict[str, Word] = {}
        self._parameter: torch.nn.Parameter | None = None
        if everything:
            self._words = {name: word_of(tensor) for name, tensor in self._all()}
            return
        parameters = protected.parameters
        if not parameters:
            return
        turns, place = divmod(turn, len(parameters))
        self._parameter = parameters[place]
        shard = local_shard(self._parameter)
        width = WINDOW_BYTES // shard.element_size()
        start = turns * width % max(1, shard.numel())
        self._window = start, start + width
        self._words = {_WINDOW: word_of(shard, *self._window)}

    def changed(self) -> str:
        """Return the name of a changed weight or moment; "" if there is none."""
        if self._parameter is not None:
            now = {_WINDOW: word_of(local_shard(self._parameter), *self._window)}
            return self._name() if first_difference(self._words, now) else ""
        if self._everything:
            return first_difference(self._words, {n: word_of(t) for n, t in self._all()})
        return ""

    def _all(self) -> list[tuple[str, torch.Tensor]]:
        return _weights(self._protected) + _moments(self._protected)

    def _name(self) -> str:
        named = self._protected.tree.named_parameters()
        return next((name for name, each in named if each is self._parameter), "a parameter")


def _weights(protected: ProtectedState) -> list[tuple[str, torch.Tensor]]:
    return [(name, local_shard(parameter)) for name, parameter in protected.tree.named_parameters()]


def _moments(protected: ProtectedState) -> list[tuple[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in protected.tree.named_parameters()}
    return [
        (f"{optimizer}.state.{names.get(id(parameter), '')}.{key}", local_shard(value))
        for optimizer, each in protected.optimizers.items()
        for parameter, values in each.state.items()
        for key, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(value, torch.Tensor)
    ]


Kind = Literal["step", "eval", "checkpoint", "epoch", "draw"]


@dataclasses.dataclass
class PhaseAttempt:
    """State of one attempt at one phase."""

    kind: Kind
    key: str
    undo: UndoCopy
    begin_ns: int
    weights: WrittenWeights | None = None  # if it votes before weights change
    has_copy: bool = False  # weights may change at any time, and it votes at its end
    vote_ns: int = 0
    choices: bytes = b""  # generators, own objects and variables at the vote
    is_gated: bool = False  # the vote preceded an optimizer's step, not the phase's end
    waits: bool = False  # the slot `after` is written at the phase's end
    result: bytes = b""  # of a phase that votes at its end, before the vote
    buffers: bytes = b""  # the rank's own buffers at such a vote
    dry: bool = False
    replayed: bool = False  # on another rank's inputs, up to the vote
    rehearsed: bool = False  # refused at its gate because this function is new here
    disputed: bool = False  # refused to record which state differs by rank
    reports: dict[str, float] = dataclasses.field(default_factory=dict)

    def describe_written(self) -> str:
        """Return why a refused attempt cannot be undone: it has changed weights; else "".

        Rehearsed and disputed attempts have passed the same comparison before their vote.
        """
        if self.weights is None or self.rehearsed or self.disputed:
            return ""
        name = self.undo.changed_parameter() or self.weights.changed()
        return f"{self.key} changed {name} in an attempt that was refused" if name else ""


class AttemptUndone(Exception):  # noqa: N818 - control flow of the phase runner
    """Raised after an attempt is undone; the membership decides where it is repeated."""
