"""Votes, gathers and copies in a control group that is a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outlast.errors import GroupError
from outlast.worker.groups import control_group
from outlast.worker.groups.control_group import FAN_OUT, control_blocks, control_members


@pytest.mark.parametrize("world", [1, 2, FAN_OUT, FAN_OUT + 1, 1000, 16384])
def test_blocks_are_small_and_lead_to_the_root(world: int) -> None:
    root = control_blocks(0, world).blocks[-1]
    for rank in range(world):
        blocks, has_top = control_blocks(rank, world)
        assert has_top == (rank in root)
        assert all(rank in block and len(block) <= FAN_OUT for block in blocks)
        assert has_top or blocks[-1] in control_blocks(blocks[-1][0], world).blocks
        assert has_top or blocks[-1][0] < rank  # the first rank passes it on


def test_one_block_is_named_control_and_has_all_ranks() -> None:
    assert control_members(3, range(8)) == {"control": tuple(range(8))}


def _in_a_tree(member: Any) -> dict[str, Any]:
    control_group.FAN_OUT = 2
    member.groups.take_seat(member.rank, member.world, dry=False)
    member.connect(copies=((1, 4), (0, 3)))
    groups = member.groups
    votes = [groups.vote("phase 1"), groups.vote(f"phase {1 + (member.rank == 4)}")]
    gathered = groups.gather_bytes(b"*" * member.rank)
    state = torch.arange(4) * 7
    copied = None
    for donor, joiner in ((1, 4), (0, 3)):
        if member.rank == donor:
            groups.controls().send(state, joiner, 1)
        elif member.rank == joiner:
            copied = torch.zeros(4, dtype=torch.int64)
            groups.controls().recv(copied, donor, 1)
    return {
        "votes": votes,
        "gathered": gathered,
        "copied": copied.tolist() if copied is not None else None,
        "members": sorted(map(list, groups.members().values())),
        "has last works": bool(groups._control._recent),
    }


def test_ranks_vote_gather_and_copy_in_a_tree(cluster: Any) -> None:
    results = cluster.run(5, _in_a_tree)
    for rank, result in enumerate(results):
        assert result["votes"] == [True, False]
        assert result["has last works"], "else gloo's thread frees them, beside a fork"
        assert result["gathered"] == [b"*" * each for each in range(5)]
        assert result["copied"] == ([0, 7, 14, 21] if rank in (3, 4) else None)
    assert results[0]["members"] == [[0, 1], [0, 2], [0, 4]]
    assert results[3]["members"] == [[2, 3]]


def _severed(member: Any) -> str:
    control_group.FAN_OUT = 2
    member.groups.take_seat(member.rank, member.world, dry=False)
    member.connect()
    if member.rank == 3:
        member.say("absent")
        member.told.get(timeout=60)
        return "absent"
    member.say("votes")
    try:
        return str(member.groups.vote("phase 1"))
    except GroupError:
        return "closed"


def test_a_lost_rank_keeps_all_from_winning_and_sever_frees_them(cluster: Any) -> None:
    cluster.fork(5, _severed)
    words = [cluster._words.get(timeout=60)[1] for _ in range(5)]
    assert sorted(words) == ["absent"] + ["votes"] * 4
    cluster.sever(1)
    cluster.tell("go", [3])
    assert cluster.join(timeout_s=60) == ["closed", "closed", "closed", "absent", "closed"]
