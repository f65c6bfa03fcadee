"""One of two ranks of test_checkpointer.py: `checkpointer_ranks ROOT STORE RANK WORLD`.

Writes what it has seen to ROOT/seen-RANK as a value.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from outlast.checkpoint import Checkpointer, CheckpointWarning
from outlast.checkpoint.format import codec
from outlast.errors import CorruptionError, GroupError, MismatchError, UsageError

WIDTH = 16


def make(
    seed: int, *, shard: bool = False, ddp: bool = False, width: int = WIDTH
) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
    model: nn.Module = nn.Sequential(*layers)
    if ddp:
        model = DistributedDataParallel(model, broadcast_buffers=False)
    if shard:
        model = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state: dict[str, Any], steps: int, width: int = WIDTH) -> None:
    """Train on samples from this rank's own generator."""
    for _ in range(steps):
        state["model"](torch.randn(8, width)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()


def seen(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the model and of Adam."""
    named = dict(state["model"].state_dict())
    for index, parameter in enumerate(state["model"].parameters()):
        for key, value in state["optimizer"].state[parameter].items():
            named[f"{index}.{key}"] = value
    return {
        name.removeprefix("module."): (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in named.items()
    }


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def directory(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-{step:09d}-*")
    return found


def replicas(root: Path, rank: int) -> dict[str, Any]:
    """Save DDP at steps 2 and 4, resume with new objects, then damage rank 1's shard and resume."""
    state, position = make(0, ddp=True), {"at": 0}
    torch.manual_seed(100 + rank)
    with Checkpointer(root, on_failure="raise") as saves:
        assert saves.load(state, {"position": position}) is None
        train(state, 2)
        position["at"] = 20 + rank
        saves.save(2, state, {"position": position})
        at_2 = seen(state)
        train(state, 2)
        position["at"] = 40 + rank
        saves.save(4, state, {"position": position})
        at_4 = seen(state)
        train(state, 2)
        at_6 = seen(state)
        saves.wait()
        dist.barrier()
        again, found = make(1, ddp=True), {"at": 0}
        restored = saves.load(again, {"position": found})
        assert restored and restored.step == 4 and restored.notes == ()
        assert found == {"at": 40 + rank}
        train(again, 2)
        assert all(torch.equal(at_6[k], v) for k, v in seen(again).items()), "not the same bits"
        assert saves.load(again, {"position": found}, step=2)
        assert found == {"at": 20 + rank}
        dist.barrier()
        if rank == 0:
            flip(directory(root, 4) / "shard-00001")
        dist.barrier()
        fallen = saves.load(again, {"position": found})
        assert fallen and fallen.step == 2 and "rank" in fallen.notes[0], fallen
        assert "shard-00001" in fallen.notes[0]
        assert all(torch.equal(at_2[k], v) for k, v in seen(again).items())
        dist.barrier()
        if rank == 0:
            flip(directory(root, 4) / "shard-00001")
        dist.barrier()
    return {"at_4": at_4}


def refusals(root: Path, rank: int) -> None:
    """Give one rank invalid arguments: both raise an error, and neither waits for the other."""
    with Checkpointer(root / "refused") as saves:
        state = make(0)
        own = {"o": {"f": print} if rank == 1 else {"f": 1}}
        with pytest.raises(UsageError, match="is a builtin_function"):
            saves.save(1, state, own)
    with Checkpointer(root) as saves:
        other = make(0, width=WIDTH + rank)
        before = seen(other)
        with pytest.raises(MismatchError) as raised:
            saves.load(other, {"position": {}})
        assert "model.0.weight: (16, 16) in the checkpoint, (17, 17) here" in str(raised.value)
        assert all(torch.equal(before[k], v) for k, v in seen(other).items())
        with pytest.raises(UsageError, match="it has 2, 4"):
            saves.load(make(0), {"position": {}}, step=3)
    with Checkpointer(root / "refused") as saves:
        assert saves.load(make(0)) is None


def alone(root: Path, rank: int) -> None:
    """Change tensors on rank 1 alone, or let its save fail: both ranks report it at once."""
    state, extra = make(0), {"more": torch.ones(3)} if rank == 1 else {}
    with Checkpointer(root / "alone", complete=False) as saves:
        saves.save(1, state)
        dist.barrier()
        begin_s = time.monotonic()
        if rank == 0:
            saves.save(2, state)
            with pytest.warns(CheckpointWarning, match=r"step 2 failed .* rank 1: .* \(more\)"):
                saves.wait()
        else:
            with pytest.raises(GroupError, match=r"rank 0 did not take part.* \(more\)"):
                saves.save(2, state | extra)
        dist.barrier()
        if rank == 0:
            saves.save(3, state)
            with pytest.warns(CheckpointWarning, match=r"step 3 failed .* rank 1: .*builtin"):
                saves.wait()
        else:
            with pytest.raises(UsageError, match="is a builtin_function"):
                saves.save(3, state, {"o": {"f": print}})
        saves.save(4, state)
        saves.wait()
        assert time.monotonic() - begin_s < 60, "somebody waited for a deadline"
        dist.barrier()
        restored = saves.load(state)
        assert restored and restored.step == 4


def behind(root: Path, rank: int) -> None:
    """Damage data read by one rank or both: durable storage supplies and repairs it."""
    state, here, far = make(0), root / "behind", root / "far"
    with Checkpointer(here, durable=far, keep="last=1") as saves:
        saves.save(1, state)
    dist.barrier()
    before = seen(state)
    if rank == 0:
        flip(directory(here, 1) / "shard-00001")
    dist.barrier()
    again = make(1)
    with Checkpointer(here, durable=far) as saves:
        restored = saves.load(again)
    assert restored and all(f"read from {far}" in note for note in restored.notes), restored
    assert {note[:6] for note in restored.notes} == {"rank 0", "rank 1"}
    assert all(torch.equal(before[k], v) for k, v in seen(again).items())


def shards(root: Path, rank: int, at_4: dict[str, torch.Tensor]) -> None:
    """Load a DDP save into FSDP2, and save that for one process."""
    state = make(3, shard=True)
    with Checkpointer(root, complete=False) as saves:
        assert saves.load(state)
        found = seen(state)
        assert all(torch.equal(v, found[k]) for k, v in at_4.items() if "running" not in k)
    train(state, 1)
    with Checkpointer(root / "sharded", on_failure="raise") as saves:
        saves.save(5, state)
        saves.wait()
        dist.barrier()
        after = seen(state)
        if rank == 0:
            (root / "sharded" / "seen").write_bytes(codec.encode(after))
        for file in sorted((root / "sharded").glob("step-*/shard-*"))[rank : rank + 1]:
            dist.barrier()
            flip(file)
        dist.barrier()
        with pytest.raises(CorruptionError, match="shard-0000"):
            saves.load(state)
        dist.barrier()
        flip(sorted((root / "sharded").glob("step-*/shard-*"))[rank])


def stage(ranks: list[int], seed: int) -> dict[str, Any]:
    """Return the layers of a pipeline stage, with names of their own."""
    torch.manual_seed(seed)
    layers = nn.ModuleDict({f"layer{rank}": nn.Linear(4, 4) for rank in ranks})
    if 1 in ranks:
        layers["last"] = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(layers.parameters(), max_iter=2)
    return {"model": layers, "optimizer": optimizer, "steps": len(ranks)}


def stages(root: Path, rank: int) -> None:
    """Save ranks with different layers: names that another rank holds are not missing."""
    state = stage([rank], 5 + rank)
    layer = state["model"][f"layer{rank}"]

    def closure() -> torch.Tensor:
        state["optimizer"].zero_grad()
        loss = layer(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    state["optimizer"].step(closure)
    with Checkpointer(root / "stages", on_failure="raise") as saves:
        saves.save(1, state)
        saves.wait()
        dist.barrier()
        again = stage([rank], 9)
        assert saves.load(again)
    for name, value in state["model"].state_dict().items():
        assert torch.equal(again["model"].state_dict()[name], value)
    (before,) = state["optimizer"].state.values()
    (after,) = again["optimizer"].state.values()
    assert before.keys() == after.keys() and torch.equal(before["d"], after["d"])
    if rank == 0:
        return
    weights = state["model"].state_dict()
    (root / "stages" / "seen").write_bytes(codec.encode(dict(weights)))


def main() -> None:
    root, store, rank, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    at_4 = replicas(root, rank)["at_4"]
    if rank == 0:
        (root / "seen").write_bytes(codec.encode(at_4))
    refusals(root, rank)
    alone(root, rank)
    behind(root, rank)
    shards(root, rank, at_4)
    stages(root, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
