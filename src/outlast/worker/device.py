"""Where a worker computes."""

from __future__ import annotations

import torch


def device_count() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(index: int) -> torch.device:
    """This process's GPU by its local index, else the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(index % torch.cuda.device_count())
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device("cpu")
