"""Bytes written by saves of a state of which nine tenths are not trained.

`python -m checkpointing.adapters ROOT SIZE_MB SAVES`: prints one line of JSON, an Adapters.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import torch
from checkpointing import processes
from torch import nn

from outlast.checkpoint import Checkpointer

PARTS = 10


class Adapters(msgspec.Struct):
    """Bytes that the keeper wrote and read, and seconds until durable, of each save in order."""

    size_bytes: int
    written_bytes: list[int] = []
    read_bytes: list[int] = []
    durable_s: list[float] = []


def transferred() -> tuple[int, int]:
    """Bytes written to and read from disks by the processes that this one has started."""
    written = read = 0
    for pid in processes.family():
        if pid != os.getpid():
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            counts = dict(line.split(": ") for line in lines)
            written += int(counts["write_bytes"])
            read += int(counts["read_bytes"])
    return written, read


@torch.no_grad()
def main() -> None:
    root, size_bytes, saves = Path(sys.argv[1]), float(sys.argv[2]) * 1e6, int(sys.argv[3])
    parts = [nn.Parameter(torch.randn(int(size_bytes / PARTS / 4))) for _ in range(PARTS)]
    for part in parts[1:]:
        part.requires_grad_(False)
    found = Adapters(sum(part.nbytes for part in parts))
    model = nn.ParameterList(parts)
    with Checkpointer(root, complete=False) as checkpointer:
        before = (0, 0)
        for step in range(1, saves + 1):
            parts[0].add_(1)
            begin_s = time.perf_counter()
            checkpointer.save(step, {"model": model})
            checkpointer.wait()
            found.durable_s.append(time.perf_counter() - begin_s)
            after = transferred()
            found.written_bytes.append(after[0] - before[0])
            found.read_bytes.append(after[1] - before[1])
            before = after
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
