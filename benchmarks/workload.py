"""What every benchmark trains: 8.7 million parameters, one thread a rank, data from a seed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.utils.data import Dataset

WIDTH, LAYERS, HEAD, WORDS, CONTEXT, BATCH = 384, 4, 64, 2048, 64, 4
WORLD = 4
BLOCK = 5  # steps that a job takes before it hands over to the other one
TURN_S = 180.0  # how long a job waits for its turn


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
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(stream)))


class Noise(Dataset[Tensor]):
    """Sequences of random words; each from its own index, so that nothing need be kept."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Tensor:
        dice = torch.Generator().manual_seed(index)
        return torch.randint(0, WORDS, (CONTEXT + 1,), generator=dice)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Ledger:
    """Lines `rank step t_ns`, one for each step that a rank has behind it; one file for all."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._fd = os.open(folder / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, step: int) -> None:
        os.write(self._fd, f"{self.rank} {step} {time.monotonic_ns()}\n".encode())


class Baton:
    """Two jobs take turns of a few steps, so that both meet the same machine: `path` holds one
    byte a rank, the blocks that it has behind it. Without a path nobody waits."""

    def __init__(self, path: Path | None, turn: int, rank: int) -> None:
        self._fd = os.open(path, os.O_RDWR) if path else -1
        self._mine, self._theirs = turn * WORLD + rank, (1 - turn) * WORLD
        self._turn, self._blocks = turn, 0

    def take(self) -> None:
        """Wait until every rank of the other job has done its block."""
        deadline_s = time.monotonic() + TURN_S
        while self._fd >= 0:
            theirs = os.pread(self._fd, WORLD, self._theirs)
            if min(theirs) >= self._blocks + self._turn:
                return
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the other job gave no turn in {TURN_S:.0f} s")
            time.sleep(0.002)  # the other job measures: stay off its processors

    def give(self) -> None:
        self._blocks += 1
        if self._fd >= 0:
            os.pwrite(self._fd, bytes([self._blocks]), self._mine)


def die_once(folder: Path, rank: int, step: int, *, at: int) -> None:
    """SIGKILL rank 1 in step `at`, once in the job's life; the marker holds the time."""
    if (rank, step) != (1, at):
        return
    try:
        fd = os.open(folder / "killed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    os.write(fd, str(time.monotonic_ns()).encode())
    os.kill(os.getpid(), signal.SIGKILL)
