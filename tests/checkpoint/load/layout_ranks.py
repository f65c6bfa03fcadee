"""Four processes that save one model in every layout and load it into every other one.

    python -m tests.checkpoint.load.layout_ranks DIRECTORY

Each process writes DIRECTORY/RANK.json: what went wrong by case, and nothing else. It is forked
after torch was imported, so that this costs one import and not four.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.checkpoint.stores.catalog import newest_checkpoint
from outlast.checkpoint.stores.folder_store import Folder

WORLD = 4
DEADLINE_S = 20.0
Tensors = dict[str, torch.Tensor]


class Model(nn.Module):
    """Tensors with prime dimensions, with a dimension of 1, and one that divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 9)
        self.down = nn.Linear(9, 5)
        self.one = nn.Parameter(torch.randn(1, 3))
        self.brief = nn.Parameter(torch.randn(3, 2).to(torch.bfloat16))
        self.big = nn.Parameter(torch.randn(1031, 129))

    @classmethod
    def made(cls) -> Model:
        torch.manual_seed(17)
        return cls()


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    names = names or tuple("abc"[: len(shape)])
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def in_parallel(model: Model, mesh: DeviceMesh) -> Model:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)  # pyright: ignore[reportReturnType]


def sharded(model: Model, mesh: DeviceMesh, dim: int = 0) -> Model:
    def where(parameter: nn.Parameter) -> Shard:
        return Shard(dim if parameter.ndim > dim and parameter.shape[dim] % WORLD == 0 else 0)

    fully_shard(model, mesh=mesh, shard_placement_fn=where if dim else None)
    return model


def by_hand() -> Tensors:
    """Return DTensors sharded on one tensor dimension by both mesh dimensions, and on two."""
    mesh, model = mesh_of(2, 2), Model.made()
    whole = {name: value.detach() for name, value in model.named_parameters()}
    both = {"up.weight": (Shard(1), Shard(0)), "big": (Shard(1), Shard(1))}
    return {
        name: distribute_tensor(value, mesh, both.get(name, (Shard(0), Shard(0))))
        for name, value in whole.items()
    }


def layouts() -> dict[str, tuple[int, Callable[[], Tensors]]]:
    """Return by name: the number of processes, and the model's tensors on them."""

    def of(model: nn.Module) -> Tensors:
        return {name: value.detach() for name, value in model.named_parameters()}

    flat, pair, grid = mesh_of(4), mesh_of(2), mesh_of(2, 2, names=("dp", "tp"))
    return {
        "alone": (1, lambda: of(Model.made())),
        "ddp": (4, lambda: of(Model.made())),
        "fsdp4": (4, lambda: of(sharded(Model.made(), flat))),
        "fsdp4 by columns": (4, lambda: of(sharded(Model.made(), flat, dim=1))),
        "fsdp2": (2, lambda: of(sharded(Model.made(), pair))),
        "hsdp": (4, lambda: of(sharded(Model.made(), mesh_of(2, 2)))),
        "tp4": (4, lambda: of(in_parallel(Model.made(), flat))),
        "fsdp+tp": (4, lambda: of(sharded(in_parallel(Model.made(), grid["tp"]), grid["dp"]))),
        "by hand": (4, by_hand),
    }


def gathered(message: bytes, group: dist.ProcessGroup | None, world: int) -> list[bytes]:
    """Return every rank's message, without pickle."""
    length = torch.tensor([len(message)])
    lengths = [torch.zeros_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group)
    room = max(int(each) for each in lengths)
    padded = torch.frombuffer(bytearray(message.ljust(room)), dtype=torch.uint8)
    rows = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(rows, padded, group)
    return [bytes(r[: int(n)].tolist()) for r, n in zip(rows, lengths, strict=True)]


class Saver:
    """Save engine of one rank of `world`."""

    def __init__(self, root: Path, rank: int) -> None:
        self.root = root
        self.rank = rank
        groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4)}
        self.groups = {n: group for n, group in groups.items() if rank < n}

    def save(self, name: str, world: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Save into a new directory, and return once it is committed."""
        exchange = partial(gathered, group=self.groups[world], world=world)
        keeper = KeeperClient.start(f"rank {self.rank}")
        settings = SaveSettings(
            root=self.root / name,
            rank=self.rank,
            world=world,
            job="reshape",
            arenas=1,
            save_s=DEADLINE_S,
        )
        engine = SaveEngine(settings, exchange, keeper)
        own, origin = f"own of {self.rank}".encode(), {"layout": name}
        request = SaveRequest(SavePoint(1, 1, "a"), tensors, b"shared", own, origin)
        number = engine.save(request)
        outcome = engine.wait(number, DEADLINE_S)
        engine.close(DEADLINE_S)
        assert outcome.kind == ("written" if self.rank else "committed"), outcome


def reader_of(root: Path) -> CheckpointReader:
    checkpoint = newest_checkpoint(Folder(root), lambda damage: sys.exit(damage), verify=True)
    assert checkpoint, root
    return CheckpointReader(checkpoint)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_load(root: Path, rank: int, expected: Tensors) -> None:
    found = {name: value.clone() for name, value in expected.items()}
    for value in found.values():
        local(value).fill_(7)
    reader = reader_of(root)
    SaveEngine.read(reader, found)
    for name, value in found.items():
        assert torch.equal(local(value), local(expected[name])), name
    assert reader.blob(0, "shared") == b"shared"
    if rank < reader.checkpoint.commit.world:
        assert reader.blob(rank, "own") == f"own of {rank}".encode()


def stages(rank: int) -> Tensors:
    """Return a pipeline: its first two ranks are replicas of one stage, the others of the next."""
    torch.manual_seed(rank // 2)
    return {f"stage{rank // 2}.weight": torch.randn(300, 100)}


def run(rank: int, root: Path) -> dict[str, str]:
    """Return the errors by case."""
    wrong: dict[str, str] = {}
    made: dict[str, tuple[int, Tensors]] = {}
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    saver = Saver(root, rank)

    def case(name: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception:  # noqa: BLE001 - the test that asks for this case fails with it
            wrong[name] = traceback.format_exc()

    for name, (world, make) in (*layouts().items(), ("stages", (WORLD, partial(stages, rank)))):
        if rank < world:
            made[name] = world, make()
            case(f"save {name}", partial(saver.save, name, *made[name]))
        dist.barrier()
    del made["stages"]
    for name, (into, (_, tensors)) in product(layouts(), made.items()):
        case(f"{name} to {into}", partial(check_load, root / name, rank, tensors))
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def main(root: Path) -> None:
    children: list[int] = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            wrong = run(rank, root)
            (root / f"{rank}.json").write_text(json.dumps(wrong), encoding="utf-8")
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
