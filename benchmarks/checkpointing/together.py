"""One engine saving from several ranks that hold the same state, as data parallelism does.

`python -m checkpointing.together ENGINE ROOT SIZE_MB SAVES WORLD`: prints one line of JSON, a
Together. `WORLD` processes on this host speak over gloo; each one holds all of the state.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from checkpointing import state
from checkpointing.engines import ENGINES, sync
from torch import distributed as dist

ENDS_S = 600.0


class Together(msgspec.Struct):
    """Medians over saves of the slowest rank's seconds; the first save apart."""

    size_bytes: int
    first_s: float
    blocks_s: float
    durable_s: float


def rank_of(name: str, root: Path, size_mb: float, saves: int) -> Together | None:
    """Save as one rank of those that the environment tells of; the answer is rank 0's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    held = state.make(size_mb)
    engine = ENGINES[name](root)
    taken: list[tuple[float, float]] = []
    for step in range(1, saves + 2):
        for tensor in held.tensors().values():
            tensor.view(-1)[0] = step
        dist.barrier()
        begin = time.perf_counter()
        wait = engine.save(step, held)
        blocks_s = time.perf_counter() - begin
        wait()
        dist.barrier()
        if dist.get_rank() == 0:
            sync(root)
        slowest = torch.tensor([blocks_s, time.perf_counter() - begin])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken.append((float(slowest[0]), float(slowest[1])))
        if dist.get_rank() == 0:  # only the newest stays on the disk
            whole = [path for path in root.iterdir() if path.is_dir()]
            for path in sorted(whole, key=lambda path: path.stat().st_mtime)[:-1]:
                shutil.rmtree(path)
        dist.barrier()
    first = dist.get_rank() == 0
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if not first:
        return None
    return Together(
        size_bytes=state.size_bytes(held),
        first_s=taken[0][0],
        blocks_s=statistics.median(blocks_s for blocks_s, _ in taken[1:]),
        durable_s=statistics.median(durable_s for _, durable_s in taken[1:]),
    )


def spawn(module: str, arguments: list[str], world: int) -> NoReturn:
    """Run a module as all ranks of one job, and end as they do."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        codes = [rank.wait(ENDS_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    if "RANK" not in os.environ:
        spawn("checkpointing.together", sys.argv[1:], int(sys.argv[5]))
    told = rank_of(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    if told:
        print(msgspec.json.encode(told).decode(), flush=True)
