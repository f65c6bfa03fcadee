"""One engine's turn, in a process of its own: this machine's limits, then a few saves.

`python -m checkpointing.turn ENGINE ROOT SIZE_MB SAVES KIND`: prints one line of JSON, a Turn.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from checkpointing import limits, state
from checkpointing.engines import ENGINES, Engine, Outlast, nothing_left, sync
from checkpointing.processes import Memory, cpu_s

ALONE_S = 0.6  # of compute, to compare with
STEPS_S = 3.0
ENDS_S = 120.0


class Turn(msgspec.Struct):
    """Medians of one process. Seconds unless the name says otherwise."""

    size_bytes: int
    copy_limit_s: float  # by as many threads as ours uses
    copy_one_s: float
    write_limit_s: float
    first_s: float
    blocks_s: float
    durable_s: float
    extra_memory_bytes: int
    compute_kept: float | None  # of one thread's rate, while a save is written beside it
    cpu_s: float | None  # that the rest of a save took, in all processes


class Compute:
    """Training in small: products of matrices and a little Python, on one thread."""

    def __init__(self) -> None:
        self._matrix = torch.randn(256, 256)
        self.rounds = 0

    def run(self, until: Callable[[], bool]) -> float:
        """Rounds a second."""
        begin, rounds = time.perf_counter(), 0
        while not until():
            for _ in range(10):
                self._matrix = (self._matrix @ self._matrix).mul_(1e-3)
                sum(range(2000))
            rounds += 1
        return rounds / (time.perf_counter() - begin)

    def run_for(self, seconds: float) -> float:
        end = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() > end)


def main(name: str, root: Path, size_mb: float, saves: int, kind: str) -> Turn:
    torch.set_num_threads(1)
    held = state.make(size_mb, kind)
    size = state.size_bytes(held)
    reach = limits.measure(root, size)
    memory = Memory()
    engine = ENGINES[name](root)
    if isinstance(engine, Outlast):
        engine.prepare(held)
    Compute().run_for(STEPS_S)  # of training before the first save
    saver = _Saver(engine, root, held)
    first_s, _ = saver.save()
    with memory:
        saver.save()
    quiet = [saver.save() for _ in range(saves)]
    busy = [] if saver.blocks_alone else [saver.save_beside_compute() for _ in range(saves)]
    engine.close()
    return Turn(
        size_bytes=size,
        copy_limit_s=min(reach.copy_s, reach.copy_two_s),
        copy_one_s=reach.copy_s,
        write_limit_s=reach.write_s,
        first_s=first_s,
        blocks_s=statistics.median(blocks for blocks, _ in quiet),
        durable_s=statistics.median(durable for _, durable in quiet),
        extra_memory_bytes=memory.peak_bytes,
        compute_kept=statistics.median(kept for kept, _ in busy) if busy else None,
        cpu_s=statistics.median(taken for _, taken in busy) if busy else None,
    )


class _Saver:
    """Saves one after the other; only the newest stays on the disk."""

    def __init__(self, engine: Engine, root: Path, held: state.State) -> None:
        self._engine, self._root, self._held = engine, root, held
        self._step = 0
        self._compute = Compute()
        self.blocks_alone = False  # nothing of a save is left when it returns

    def save(self) -> tuple[float, float]:
        """Seconds that it blocks, and until it is durable."""
        self._prepare()
        begin = time.perf_counter()
        wait = self._engine.save(self._step, self._held)
        blocks_s = time.perf_counter() - begin
        self.blocks_alone = wait is nothing_left
        wait()
        sync(self._root)
        return blocks_s, time.perf_counter() - begin

    def save_beside_compute(self) -> tuple[float, float]:
        """The share of compute that is left while it is written, and the CPU time it takes."""
        self._prepare()
        alone = self._compute.run_for(ALONE_S)
        wait = self._engine.save(self._step, self._held)
        ended = threading.Event()
        others_before, mine_before = cpu_s(), time.thread_time()

        def wait_beside() -> None:
            wait()
            ended.set()

        waiter = threading.Thread(target=wait_beside)
        waiter.start()
        beside = self._compute.run(ended.is_set)
        taken_s = cpu_s() - others_before - (time.thread_time() - mine_before)
        waiter.join(ENDS_S)
        return beside / alone, taken_s

    def _prepare(self) -> None:
        self._step += 1
        for path in self._root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix == ".pt":  # the others say who saves here
                path.unlink()
        for tensor in self._held.tensors().values():
            tensor.view(-1)[0] = self._step
        os.sync()


if __name__ == "__main__":
    asked = sys.argv
    turn = main(asked[1], Path(asked[2]), float(asked[3]), int(asked[4]), asked[5])
    print(msgspec.json.encode(turn).decode())
