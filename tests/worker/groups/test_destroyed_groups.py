"""Recovery after destroy_process_group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

from outlast.errors import UsageError

pytestmark = pytest.mark.process


def _at_the_end(member: Any) -> str:
    member.init()
    world: Any = dist.group.WORLD
    pair: Any = dist.new_group([0, 1])
    dist.barrier()
    if member.rank:  # rank 0 is a joiner: it has not come to its script's last line yet
        dist.destroy_process_group()
    member.groups.sever(1)
    member.connect(2, timeout_s=10.0)
    assert member.groups.vote("the end")
    if member.rank:
        for group in (world, pair) if member.rank == 1 else (world,):
            with pytest.raises(UsageError, match="destroyed"):
                group.allreduce([torch.ones(1)])
    return "healed"


def test_ranks_that_destroyed_their_groups_still_connect(cluster: Any) -> None:
    assert cluster.run(3, _at_the_end) == ["healed"] * 3


def _anew(member: Any) -> list[float]:
    """Destroy everything and begin again: torch gives the same names a second time."""
    member.init()
    dist.barrier()
    dist.destroy_process_group()
    member.join()
    sums = []
    for generation in (1, 2):
        if generation > 1:
            member.groups.sever(1)
            member.connect(generation, timeout_s=10.0)
        one = torch.ones(1)
        dist.all_reduce(one)
        sums.append(one.item())
    return sums


def test_a_script_may_destroy_all_groups_and_make_them_anew(cluster: Any) -> None:
    assert cluster.run(2, _anew) == [[2.0, 2.0]] * 2
