"""Registration of the backend "outlast" at torch.distributed for a process with a seat."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from outlast.errors import UsageError
from outlast.worker.groups.group_registry import GroupRegistry
from outlast.worker.groups.stable_group import BACKEND, StableGroup


def register(groups: GroupRegistry) -> None:
    """Make "outlast" a torch.distributed backend, served by `groups`. Once a process: torch keeps
    its backends for ever. Raises UsageError the second time."""
    known = dist.Backend._plugins.get(BACKEND.upper())  # noqa: SLF001 - torch has no question for it
    if known is not None and known.creator_fn.__module__ == __name__:
        raise UsageError("the backend 'outlast' is registered already; a process has one seat")

    def create(options: Any, _: Any) -> StableGroup:
        return groups.adopt(
            str(options.group_id),
            tuple(options.global_ranks_in_group),
            options.group_rank,
            options.group_size,
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    list_as_self_recording()


def list_as_self_recording() -> None:
    """Keep torch's flight recorder away from stable groups, which it cannot be attached to.

    torch 2.15 attaches it to groups whose backend is not listed. Inner groups record themselves.
    """
    if (recording := getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)) is not None:
        recording.add(BACKEND)
