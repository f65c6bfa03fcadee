"""One of two ranks of test_unlike_ranks.py: `unlike_ranks ROOT STORE RANK WORLD`.

Each rank has something that the other has not, or otherwise: it is refused by name.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.checkpoint_maker import make as make_checkpoint
from torch import distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from outlast.checkpoint import Checkpointer
from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.catalog import checkpoint_places
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import StorageError, UsageError

LARGE = 40_000  # elements, of which ranks write a part each


def make(seed: int = 0, names: tuple[str, ...] = ("a", "b"), width: int = 4) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer}


def refused(root: Path, state: dict[str, Any], match: str, **how: Any) -> None:
    """Expect a refusal on both ranks, at the first save, with nothing written."""
    with Checkpointer(root, **how) as saves, pytest.raises(UsageError, match=match):
        saves.save(1, state)
    dist.barrier()
    assert checkpoint_places(Folder(root)) == []


def failed_at_the_commit(root: Path, rank: int, state: dict[str, Any], name: str) -> None:
    """Differ from the second save on: its commit fails."""
    live = state["live"]
    with Checkpointer(root, complete=False, on_failure="raise") as saves:
        saves.save(1, state)
        saves.wait()
        dist.barrier()
        with torch.no_grad():
            live += rank
        saves.save(2, state)
        if rank:
            saves.wait()
        else:
            with pytest.raises(StorageError, match=rf"hold in common differ: {name} on ranks 0, 1"):
                saves.wait()
        dist.barrier()
        with torch.no_grad():
            live -= rank
        saves.save(3, state)
        saves.wait()
    dist.barrier()
    assert [place.step for place in checkpoint_places(Folder(root))] == [3, 1]


def asked_for_different_loads(root: Path, rank: int) -> None:
    """Request different loads: both ranks raise an error before any tensor changes."""
    with Checkpointer(root) as saves:
        saves.save(1, make())
        saves.save(2, make(1))
        saves.wait()
        dist.barrier()
        fresh = make(7)
        before = [p.clone() for p in fresh["model"].parameters()]
        asked: list[tuple[str, Any, Any]] = [
            ("step", None, 1),
            ("strict", True, False),
            ("cast", True, False),
            ("rename", {}, {"model.a": "model.b", "model.b": "model.a"}),
        ]
        for what, there, here in asked:
            with pytest.raises(UsageError, match=f"{what} differs between ranks"):
                saves.load(fresh, **{what: here if rank else there})
        with pytest.raises(UsageError, match=r"model\.b: rank 1 is to skip it, and rank 0"):
            saves.load(fresh, skip=["model.b"] if rank else [])
        with pytest.raises(UsageError, match=r"rank 0: prepare, rank 1: load"):
            _ = saves.load(fresh) if rank else saves.prepare(fresh)
        assert all(map(torch.equal, before, fresh["model"].parameters()))
        own = {"head": nn.Linear(2, 2)} if rank else {}
        restored = saves.load(fresh | own, skip=list(own), strict=False)
        assert restored and restored.step == 2


def loaded_apart(root: Path, rank: int) -> None:
    """Load checkpoints that differ by host, and rank-local state."""
    # A checkpoint of one name that is not the same on each host.
    apart = root / f"apart{rank}"
    name = SavePoint(1, 1, "a1")
    make_checkpoint(apart, name, {"model.t": np.full(4, rank, np.float32)}, shared=codec.encode({}))
    with (
        Checkpointer(apart, complete=False) as saves,
        pytest.raises(UsageError, match="is not the same checkpoint on all ranks"),
    ):
        saves.load({"model": nn.ParameterDict({"t": torch.zeros(4)})})
    # A small buffer that differs by rank, and whose elements share their memory.
    mask = torch.full((1,), float(rank)).expand(3)
    model = nn.Module()
    model.register_buffer("mask", mask)
    with Checkpointer(root / "mask", complete=False) as saves:
        saves.save(1, {"model": model})
        saves.wait()
        dist.barrier()
        mask[:1] = 7.0
        assert saves.load({"model": model})
        assert mask.tolist() == [float(rank)] * 3


def main() -> None:
    root, store, rank, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    # Replicas that drift apart: a large tensor, a small one, a value.
    failed_at_the_commit(root / "large", rank, {"live": torch.zeros(LARGE)}, "live")
    failed_at_the_commit(root / "small", rank, {"live": torch.zeros(8), "x": 1}, "live")
    values = {"live": torch.zeros(2), "seen": {"loss": 0.5}}
    with Checkpointer(root / "values", complete=False, on_failure="raise") as saves:
        saves.save(1, values)
        saves.wait()
        dist.barrier()
        values["seen"]["loss"] += rank
        saves.save(2, values)
        if rank == 0:
            with pytest.raises(StorageError, match="hold in common differ: seen on ranks 0, 1"):
                saves.wait()
    # From the first save on.
    state = make() | {"best": float(rank)}
    refused(root / "best", state, r"differ by rank, and only rank 0's would be saved: best;")
    small = {"average": torch.full((3,), float(rank))}
    refused(root / "average", make() | small, "do not hold the same: average;")
    state = make()
    state["optimizer"].param_groups[0]["lr"] += rank
    refused(root / "lr", state, "would be saved: optimizer;")
    # Stages of a pipeline under one name.
    names = ("layer", "first") if rank == 0 else ("layer", "last")
    refused(root / "stages", make(rank, names), r"model\.layer\.bias \(ranks 0 and 1 differ\)")
    refused(
        root / "shapes", make(0, names, width=4 + rank),
        r"model\.layer\.weight \(torch\.float32 \(4, 4\) on rank 0, torch\.float32 \(5, 5\) on 1\)",
    )  # fmt: skip
    tied = make(rank, names)
    with torch.no_grad():
        for parameter in tied["model"]["layer"].parameters():
            parameter.fill_(1.0)  # a layer that two stages share, and keep equal
    with Checkpointer(root / "tied", on_failure="raise") as saves:
        saves.save(1, tied)
        saves.wait()
        dist.barrier()
        assert saves.load(make(7, names))
    asked_for_different_loads(root / "loads", rank)
    loaded_apart(root, rank)
    # Moments that lie elsewhere.
    zero = make()
    zero["optimizer"] = ZeroRedundancyOptimizer(
        zero["model"].parameters(), optimizer_class=torch.optim.Adam, lr=0.1
    )
    refused(root / "zero", zero, r"ZeroRedundancyOptimizer, which keeps .* in \.optim")
    # A directory that is each host's own.
    begin_s = time.monotonic()
    refused(root / f"host{rank}", make(), r"rank 1: .*host1 .*is not the directory that rank 0")
    assert time.monotonic() - begin_s < 120
    (root / f"seen-{rank}").write_bytes(codec.encode({"done": True}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
