"""Optimizers' steps that GradScalers skip in one attempt at a phase."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.amp.grad_scaler import OptState

from outlast.worker.state.tensor_digests import local_shard


class ScalerSteps:
    """Steps of GradScalers since the start of an attempt, with the scale of each at that time."""

    def __init__(self, scalers: Iterable[tuple[torch.amp.GradScaler, float]]) -> None:
        self._before = [
            (scaler, scaler._per_optimizer_states, scale)  # noqa: SLF001 - see `has_ended`
            for scaler, scale in scalers
        ]

    def has_ended(self) -> bool:
        """Return whether `scaler.step` was called, hence, where no vote followed, has skipped its
        optimizer because of infinities. `update` begins a new table."""
        return any(
            scaler._per_optimizer_states is not before  # noqa: SLF001 - the only trace of a skipped step
            or any(state["stage"] is OptState.STEPPED for state in before.values())
            for scaler, before, _ in self._before
        )

    def has_infinity(self) -> bool:
        """Return whether infinities were found in gradients that will be skipped, or were."""
        return any(
            scaler.get_scale() < scale
            or any(
                local_shard(value).item()  # a DTensor's own would be a collective
                for state in scaler._per_optimizer_states.values()  # noqa: SLF001 - no public access
                for value in state["found_inf_per_device"].values()
            )
            for scaler, _, scale in self._before
        )

    def unscales(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a scaler has unscaled this optimizer's gradients, or steps it."""
        return any(id(optimizer) in s._per_optimizer_states for s, _, _ in self._before)  # noqa: SLF001
