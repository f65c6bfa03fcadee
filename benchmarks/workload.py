"""What every benchmark trains: a transformer, one thread a rank, data from a seed."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

HEAD, WORDS, CONTEXT = 32, 2048, 64
WORLD = 4
BLOCK = 5  # steps that a job takes before it hands over to the other one
TURN_S = 180.0  # how long a job waits for its turn


class Size(NamedTuple):
    """Width and layers of the transformer, sequences and words of each in a rank's batch."""

    width: int
    layers: int
    batch: int
    context: int = CONTEXT


# The first has 8.7 million parameters: 104 MB of state with AdamW.
SIZES = {
    "400ms": Size(384, 4, 4),
    "100ms": Size(192, 4, 3),
    "10ms": Size(64, 2, 1, 16),
    "1ms": Size(32, 1, 1, 4),
    "gpu": Size(1024, 8, 8),  # 105 million parameters: 1.3 GB of state
    "sharded": Size(128, 32, 1, 32),  # 33 units of fully_shard: about 100 collectives a step
}
PARALLELISMS = ("ddp", "compiled", "fsdp", "hsdp", "tp")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 384, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(stream)))


def device_of(kind: str) -> torch.device:
    """Return this rank's device, which is torch's current one from here on. GPUs may be shared."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parallel_model(kind: str, size: Size, device: torch.device) -> nn.Module:
    """Return the transformer in one way to divide it, over four ranks if not by DDP, seeded."""
    torch.manual_seed(0)
    model = Transformer(size.width, size.layers).to(device)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "compiled":
        return DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    if kind == "tp":
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    shape = (2, 2) if kind == "hsdp" else (WORLD,)
    names = ("replicate", "shard") if kind == "hsdp" else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the job has under every launcher."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--small", type=int, default=0, help="small collectives to time at the end")
    parser.add_argument("--baton", type=Path, help="take turns with the other job")
    parser.add_argument("--block", type=int, default=BLOCK, help="steps of one turn")
    parser.add_argument("--parallel", choices=PARALLELISMS, default="ddp")
    parser.add_argument("--size", choices=SIZES, default="400ms")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


class Noise(Dataset[Tensor]):
    """Sequences of random words; each from its own index, so that nothing need be kept."""

    def __init__(self, context: int = CONTEXT) -> None:
        self.context = context

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Tensor:
        dice = torch.Generator().manual_seed(index)
        return torch.randint(0, WORDS, (self.context + 1,), generator=dice)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Ledger:
    """Lines `rank step t_ns`, one for each step that a rank has behind it; one file for all."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, rank: int, step: int) -> None:
        os.write(self._fd, f"{rank} {step} {time.monotonic_ns()}\n".encode())


class Baton:
    """Two jobs take turns of a few steps, so that both meet the same machine: `path` holds one
    byte a rank, the blocks that it has behind it. Without a path nobody waits."""

    def __init__(self, path: Path | None, turn: int, ranks: int) -> None:
        self._fd = os.open(path, os.O_RDWR) if path else -1
        self._ranks = ranks
        self._mine, self._theirs = turn * ranks, (1 - turn) * ranks
        self._turn, self._blocks = turn, 0

    def take(self) -> None:
        """Wait until every rank of the other job has done its block."""
        deadline_s = time.monotonic() + TURN_S
        while self._fd >= 0:
            theirs = os.pread(self._fd, self._ranks, self._theirs)
            if min(theirs) >= self._blocks + self._turn:
                return
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the other job gave no turn in {TURN_S:.0f} s")
            time.sleep(0.002)  # the other job measures: stay off its processors

    def give(self, rank: int) -> None:
        self._blocks += 1
        if self._fd >= 0:
            os.pwrite(self._fd, bytes([self._blocks]), self._mine + rank)


def die_once(folder: Path, rank: int) -> None:
    """SIGKILL rank 1, once in the job's life; the marker holds the time."""
    if rank != 1:
        return
    try:
        fd = os.open(folder / "killed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    os.write(fd, str(time.monotonic_ns()).encode())
    os.kill(os.getpid(), signal.SIGKILL)
