"""Gradients around an attempt: those present before, and those left without a vote."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel


class _Seen(NamedTuple):
    """A gradient as it was: weakly, since an attempt that drops it must free its memory."""

    parameter: nn.Parameter
    gradient: weakref.ref[torch.Tensor] | None
    version: int
    parameter_version: int


class AttemptGradients:
    """The gradients of all protected parameters at the start of an attempt."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        reducers: Iterable[DistributedDataParallel],
        scalers: Iterable[torch.amp.GradScaler],
    ) -> None:
        self._before = [
            _Seen(p, None, 0, p._version)  # noqa: SLF001 - torch's own counter of changes
            if g is None
            else _Seen(p, weakref.ref(g), g._version, p._version)  # noqa: SLF001 - as above
            for p in parameters
            for g in (p.grad,)
        ]
        self._reducers = reducers
        self._scalers = [(s, s._per_optimizer_states) for s in scalers]  # noqa: SLF001 - see `_skipped`

    def changed_parameter(self) -> nn.Parameter | None:
        """A parameter that the attempt has written to."""
        for before in self._before:
            if before.parameter._version != before.parameter_version:  # noqa: SLF001 - as above
                return before.parameter
        return None

    def has_leftovers(self) -> bool:
        """Return whether the attempt, on which no optimizer has voted, leaves gradients to which
        the next phase would add: new ones, or changed ones that are not zero."""
        if self._skipped():
            return False
        return any(
            before.parameter.grad is not None
            and (before.gradient is None or self._differs(before, before.parameter.grad))
            for before in self._before
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """None where there was none, zero elsewhere: a phase begins by clearing what it finds."""
        for before in self._before:
            if before.gradient is None:
                before.parameter.grad = None
            elif before.parameter.grad is not None:
                before.parameter.grad.zero_()

    def _differs(self, before: _Seen, now: torch.Tensor) -> bool:
        assert before.gradient is not None
        if before.gradient() is now and now._version == before.version:  # noqa: SLF001 - as above
            return False
        if id(before.parameter) in self._in_buckets():
            return False  # DDP itself moves these to new memory when it rebuilds its buckets
        values = now.coalesce().values() if now.is_sparse else now
        return bool(values.any())

    def _in_buckets(self) -> set[int]:
        return {
            id(p) for part in self._reducers if part.gradient_as_bucket_view
            for p in part.parameters()
        }  # fmt: skip

    def _skipped(self) -> bool:
        """Return whether a GradScaler skipped its optimizer in this attempt because of infinities:
        it was asked for a step and there was no vote. Its `update` begins a new table."""
        return any(
            scaler._per_optimizer_states is not before  # noqa: SLF001 - the only trace of a skipped step
            or any(state["stage"] is OptState.STEPPED for state in before.values())
            for scaler, before in self._scalers
        )
