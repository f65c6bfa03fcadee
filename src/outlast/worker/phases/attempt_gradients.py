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
        self._seen = [
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
        for seen in self._seen:
            if seen.parameter._version != seen.parameter_version:  # noqa: SLF001 - as above
                return seen.parameter
        return None

    def left(self) -> bool:
        """Return whether the attempt, on which no optimizer has voted, leaves gradients to which
        the next phase would add: new ones, or changed ones that are not zero."""
        if self._skipped():
            return False
        return any(
            seen.parameter.grad is not None
            and (seen.gradient is None or self._differs(seen, seen.parameter.grad))
            for seen in self._seen
        )

    @torch.no_grad()
    def put_back(self) -> None:
        """None where there was none, zero elsewhere: a phase begins by clearing what it finds."""
        for seen in self._seen:
            if seen.gradient is None:
                seen.parameter.grad = None
            elif seen.parameter.grad is not None:
                seen.parameter.grad.zero_()

    def _differs(self, seen: _Seen, now: torch.Tensor) -> bool:
        assert seen.gradient is not None
        if seen.gradient() is now and now._version == seen.version:  # noqa: SLF001 - as above
            return False
        if id(seen.parameter) in self._in_buckets():
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
