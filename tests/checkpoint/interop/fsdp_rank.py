"""One of two ranks: `fsdp_rank.py DIRECTORY RANK` saves an FSDP2 model through DCP and loads it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.checkpoint.interop.dcp_storage import OutlastReader, OutlastWriter


def made(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.full_tensor().detach().clone() for n, t in model.state_dict().items()}  # type: ignore[attr-defined]


def main(directory: Path, rank: int) -> None:
    dist.init_process_group("gloo", f"file://{directory}/group", rank=rank, world_size=2)
    root = directory / "checkpoints"
    model, optimizer = made(1, 2)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, storage_writer=OutlastWriter(root, 2))
    saved = whole(model)

    other, theirs = made(2, 1)
    weights, moments = get_state_dict(other, theirs)
    into = {"model": weights, "optim": moments}
    dcp.load(into, storage_reader=OutlastReader(root))
    set_state_dict(other, theirs, model_state_dict=weights, optim_state_dict=moments)
    for name, tensor in whole(other).items():
        assert torch.equal(tensor, saved[name]), name
    pairs = zip(optimizer.state.values(), theirs.state.values(), strict=True)
    for one, two in pairs:
        assert torch.equal(one["exp_avg"].to_local(), two["exp_avg"].to_local())
    if rank == 0:
        torch.save(saved, directory / "whole.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # threads of gloo's may abort an interpreter that ends, and this is not about them
