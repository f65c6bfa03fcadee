"""`backend="outlast"` in processes that no launcher has started.

Equality with gloo is tested with all other collectives, in test_collective_equality.py.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from outlast.errors import UnsupportedError, UsageError
from outlast.worker.groups import GroupRegistry, register
from outlast.worker.groups.rendezvous import Mailbox

pytestmark = pytest.mark.process


def _init(member: Any, store: Path, **more: Any) -> None:
    files = dist.FileStore(str(store), member.world)
    dist.init_process_group(
        "outlast", store=files, rank=member.rank, world_size=member.world, **more
    )


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_torch_finds_the_backend_by_its_entry_point(group: str) -> None:
    (found,) = importlib.metadata.entry_points(group=group, name="outlast")
    found.load()()
    found.load()()  # torch calls it once for each group of entry points
    assert "outlast" in dist.Backend.backend_list


def test_importing_torch_loads_nothing_else_of_ours() -> None:
    script = "import sys, torch; print(*(name for name in sys.modules if 'outlast' in name))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert sorted(found.stdout.decode().split()) == ["outlast", "outlast.torch_plugin"]


def _seat_after_offer(member: Any) -> str:
    member.init()  # replaces what torch has loaded
    try:
        register(
            GroupRegistry(
                mailbox=Mailbox(lambda *_: None),
                on_trouble=print,
                on_collective=print,
                timeout_s=1.0,
                copy_s=1.0,
            )
        )
    except UsageError as error:
        return str(error)
    return ""


def test_a_seat_replaces_it_once(cluster: Any) -> None:
    assert all("one seat" in text for text in cluster.run(2, _seat_after_offer))


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _twice(member: Any, store: Path) -> list[Any]:
    sums = []
    for turn in range(2):
        _init(member, store.with_suffix(f".{turn}"))
        tensor = torch.ones(2) * (member.rank + turn)
        dist.all_reduce(tensor)
        sums.append(tensor.tolist())
        open_before = _descriptors()
        dist.destroy_process_group()
        assert _descriptors() < open_before  # connections are gone
    return sums


def test_destroyed_and_made_again(cluster: Any, tmp_path: Path) -> None:
    assert cluster.run(3, _twice, tmp_path / "store") == [[[3.0, 3.0], [6.0, 6.0]]] * 3


def _lost_peer(member: Any, store: Path) -> str:
    _init(member, store, timeout=timedelta(seconds=60))
    dist.barrier()
    if member.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_lost_peer_is_torchs_own_error(cluster: Any, tmp_path: Path) -> None:
    cluster.fork(2, _lost_peer, tmp_path / "store")
    with pytest.raises(AssertionError, match="no answer from some"):
        cluster.join()
    assert "Connection" in cluster.results[0]


def _refusal(member: Any, store: Path) -> str:
    _init(member, store)
    try:
        dist.monitored_barrier()
    except (UnsupportedError, ValueError) as error:
        return str(error)
    return ""


def test_what_a_run_refuses_is_refused_here(cluster: Any, tmp_path: Path) -> None:
    assert all("monitored_barrier" in text for text in cluster.run(2, _refusal, tmp_path / "store"))
