"""torch's reconfigure on groups outside of a run: members leave, come back, and are lost.

Members meet in a store that all share, as in torch's own tests of gloo. Where torch has no
`enable_reconfigure`, the group is made as torch 2.14 makes it.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from outlast.errors import GroupError, UnsupportedError, UsageError
from outlast.worker.groups.backend_registration import open_group

pytestmark = pytest.mark.process

WORLD = 3
WAIT = timedelta(seconds=60)


class Driver:
    """What code for fault tolerance does: exchange handles, and reconfigure."""

    def __init__(self, member: Any, path: Path) -> None:
        self.rank, self.world = member.rank, member.world
        self.store = dist.FileStore(str(path), -1)
        self.group: Any = open_group(
            SimpleNamespace(
                store=dist.PrefixStore("group", self.store),
                group_rank=self.rank,
                group_size=self.world,
                timeout=WAIT,
                group_id="default",
                enable_reconfigure=True,
            )
        )

    def handles(self, key: str) -> list[str]:
        self.store.set(f"{key}/{self.rank}", self.group.get_reconfigure_handle())
        names = [f"{key}/{rank}" for rank in range(self.world)]
        self.store.wait(names, WAIT)
        return [self.store.get(name).decode() for name in names]

    def meet(self, uuid: int, handles: list[str] | set[str]) -> None:
        options = SimpleNamespace(uuid=uuid, handles=handles, timeout=WAIT, hints={})
        assert self.group.reconfigure(options).wait()

    def sum(self) -> float:
        tensor = torch.ones(4) * (self.group.rank() + 1)
        self.group.allreduce([tensor], dist.AllreduceOptions()).wait()
        return tensor[0].item()


def _leaves_and_returns(member: Any, path: Path) -> list[Any]:
    driver = Driver(member, path)
    assert driver.group.supports_reconfigure
    handles = driver.handles("first")
    driver.meet(1, handles)
    found: list[Any] = [driver.sum(), driver.group.size()]
    if member.rank != 1:
        driver.meet(2, [handles[0], handles[2]])
        found += [driver.group.rank(), driver.group.size(), driver.sum()]
    driver.meet(3, set(handles))
    return [*found, driver.group.size(), driver.sum()]


def test_a_member_leaves_and_returns(cluster: Any, tmp_path: Path) -> None:
    first, second, third = cluster.run(WORLD, _leaves_and_returns, tmp_path / "store")
    assert first == [6.0, 3, 0, 2, 3.0, 3, 6.0]
    assert second == [6.0, 3, 3, 6.0]
    assert third == [6.0, 3, 1, 2, 3.0, 3, 6.0]


def _alone_and_together(member: Any, path: Path) -> list[float]:
    driver = Driver(member, path)
    driver.meet(10 + member.rank, [driver.group.get_reconfigure_handle()])
    alone = driver.sum()
    driver.meet(20, driver.handles("all"))
    return [alone, driver.sum()]


def test_each_alone_then_all(cluster: Any, tmp_path: Path) -> None:
    assert cluster.run(WORLD, _alone_and_together, tmp_path / "store") == [[1.0, 6.0]] * WORLD


def _left_at_once(member: Any, path: Path) -> list[float]:
    driver = Driver(member, path)
    found = []
    for uuid in range(0, 100, 10):
        driver.meet(uuid, driver.handles(f"all/{uuid}"))
        driver.meet(uuid + 1 + member.rank, [driver.group.get_reconfigure_handle()])
        found.append(driver.sum())
    return found


def test_a_generation_that_members_leave_at_once(cluster: Any, tmp_path: Path) -> None:
    assert cluster.run(WORLD, _left_at_once, tmp_path / "store") == [[1.0] * 10] * WORLD


def _killed(member: Any, path: Path) -> list[Any]:
    driver = Driver(member, path)
    handles = driver.handles("all")
    driver.meet(1, handles)
    if member.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        driver.sum()
    driver.group.abort()  # rank 0 may still wait for rank 1
    with pytest.raises(GroupError, match="has no connections"):
        driver.sum()
    driver.meet(2, handles[:2])
    return [driver.group.rank(), driver.group.size(), driver.sum()]


def test_survivors_go_on_without_a_killed_member(cluster: Any, tmp_path: Path) -> None:
    cluster.fork(WORLD, _killed, tmp_path / "store")
    with pytest.raises(AssertionError, match="no answer from some"):
        cluster.join()
    assert cluster.results == {0: [0, 2, 3.0], 1: [1, 2, 3.0]}


def _misuse(member: Any, path: Path) -> None:
    driver = Driver(member, path)
    own = driver.group.get_reconfigure_handle()
    with pytest.raises(GroupError, match="call reconfigure first"):
        driver.sum()
    with pytest.raises(UnsupportedError, match="split_group of a group with enable_reconfigure"):
        driver.group.split_group([0])
    with pytest.raises(UsageError, match="0 are of this member"):
        driver.meet(1, ["outlast:0:other"])
    with pytest.raises(UsageError, match="2 are of this member"):
        driver.meet(1, [own, own])
    driver.meet(1, [own])
    with pytest.raises(RuntimeError, match="already used"):
        driver.meet(1, [own])
    assert driver.sum() == 1.0  # the group of before is still there


def test_misuse_is_named_and_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    cluster.run(1, _misuse, tmp_path / "store")


def _in_a_run(member: Any) -> None:
    member.init()
    group: Any = dist.group.WORLD
    assert not group.supports_reconfigure
    with pytest.raises(UnsupportedError, match="the launcher replaces members"):
        group.get_reconfigure_handle()
    with pytest.raises(UnsupportedError, match="the launcher replaces members"):
        group.reconfigure(SimpleNamespace(uuid=1, handles=[], timeout=None, hints={}))
    dist.barrier()


def test_refused_by_name_in_a_run(cluster: Any) -> None:
    cluster.run(2, _in_a_run)


def _by_torch(member: Any, path: Path) -> list[Any]:
    backend: Any = dist
    store = dist.FileStore(str(path), member.world)
    dist.init_process_group(
        "outlast",
        store=store,
        rank=member.rank,
        world_size=member.world,
        enable_reconfigure=True,  # pyright: ignore[reportCallIssue]
    )
    assert backend._supports_reconfigure()
    store.set(f"handle/{member.rank}", backend._get_reconfigure_handle())
    handles = [store.get(f"handle/{rank}").decode() for rank in range(member.world)]
    backend._reconfigure(uuid=7, handles=handles, timeout=WAIT).wait()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if member.rank == 1:
        return []
    backend._reconfigure(uuid=8, handles=handles[:1], timeout=WAIT).wait()
    return [dist.get_rank(), dist.get_world_size()]


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch before 2.14")
def test_driven_by_torch(cluster: Any, tmp_path: Path) -> None:
    assert cluster.run(2, _by_torch, tmp_path / "store") == [[0, 1], []]
