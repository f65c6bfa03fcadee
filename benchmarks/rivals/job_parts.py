"""What the scripts of all systems share: flags, model, data, and the record of committed steps."""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.utils.data import Dataset

WORDS, CONTEXT, BATCH = 2048, 64, 4
BLOCK = 20  # steps of a turn, where jobs take turns
FIRST_GATE = 5  # steps before the first turn, so that saves fall into the middle of each
TURNS = "turns"  # such a file says that ranks wait; with ".5", that those behind step 5 go on


def arguments() -> argparse.Namespace:
    """Return the flags of the job, which are the same under each system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of one epoch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--tuned", action="store_true", help="faster than the system's defaults")
    torch.set_num_threads(1)
    return parser.parse_args()


class Words(Dataset[Tensor]):
    """Sequences of random words; each from its own index, so that nothing need be kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.count = args.steps * args.ranks * BATCH

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        dice = torch.Generator().manual_seed(index)
        return torch.randint(0, WORDS, (CONTEXT + 1,), generator=dice)


def transformer(args: argparse.Namespace) -> nn.Module:
    """Return the model: four layers, with the same weights on each rank."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        args.width, 8, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True
    )
    blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, args.width), blocks, nn.Linear(args.width, WORDS))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Return the loss of a batch: each word is to be told from the one before it."""
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Record:
    """A line for each step that a rank has committed; one file for all processes of a job."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._folder: Path = args.folder
        self._fd = os.open(args.folder / "record", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, rank: int, step: int, words: Tensor, loss: Tensor) -> None:
        """Write down that `rank` has applied `step` (1 is the first) to the samples `words`."""
        line = {
            "rank": rank,
            "step": step,
            "pid": os.getpid(),
            "samples": [zlib.crc32(sample.numpy().tobytes()) for sample in words],
            "loss": loss.item(),
            "t_ns": time.monotonic_ns(),
        }
        os.write(self._fd, f"{json.dumps(line)}\n".encode())
        if step % BLOCK == FIRST_GATE and (self._folder / TURNS).exists():
            while not (self._folder / f"{TURNS}.{step}").exists():
                time.sleep(0.01)  # NVRx must see Python at work

    def end(self, rank: int, model: nn.Module) -> None:
        """Write down the final weights of `rank`, as one vector."""
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.save(weights, self._folder / f"weights.{rank}")
        os.write(self._fd, f'{{"rank": {rank}, "end": true}}\n'.encode())
