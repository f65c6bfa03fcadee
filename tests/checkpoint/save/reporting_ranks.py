"""One of two ranks of test_part_reports.py: `reporting_ranks CASE ROOT STORE RANK`.

Each rank writes to ROOT/../rank-RANK what `wait` raised, and the seconds that it took.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed as dist

from outlast.checkpoint import Checkpointer, CheckpointWarning
from outlast.errors import OutlastError

State = dict[str, torch.Tensor]


def steps(saves: Checkpointer, rank: int, root: Path, state: State) -> None:
    """Give the second save another step on rank 1."""
    saves.save(100 + rank, state)


def unmounted(saves: Checkpointer, rank: int, root: Path, state: State) -> None:
    """Unmount rank 1's directory, which has a mount namespace of its own."""
    if rank == 1:
        subprocess.run(["umount", "--lazy", root], check=True)
    dist.barrier()
    saves.save(100, state)


def moved(saves: Checkpointer, rank: int, root: Path, state: State) -> None:
    """Move the directory of rank 1, which reaches it by a link of its own, out of its reach."""
    if rank == 1:
        root.unlink()
    dist.barrier()
    saves.save(100, state)


def another(saves: Checkpointer, rank: int, root: Path, state: State) -> None:
    """Give rank 1 a copy of the directory with the owner's file in it, as a mirror would be."""
    if rank == 1:
        copy = root.with_name("copy")
        shutil.copytree(root, copy)
        root.unlink()
        root.symlink_to(copy)
    dist.barrier()
    saves.save(100, state)


def raising(saves: Checkpointer, rank: int, root: Path, state: State) -> None:
    """Let rank 1 fail before its save has a place."""
    saves.save(True if rank == 1 else 100, state)  # a step must be a number


def silent(saves: Checkpointer, rank: int, root: Path, state: State) -> None:
    """Never call the second save on rank 1."""
    if rank == 0:
        saves.save(100, state)


CASES: dict[str, Callable[[Checkpointer, int, Path, State], None]] = {
    each.__name__: each for each in (steps, unmounted, moved, another, raising, silent)
}


@contextmanager
def suppressed(errors: list[str]) -> Iterator[None]:
    """Keep the message of an error."""
    try:
        yield
    except OutlastError as error:
        errors.append(str(error))


def main() -> None:
    case, root, store, rank = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    heard = root.with_name(f"rank-{rank}")
    if case in ("moved", "another") and rank == 1:
        link = root.with_name("link")
        link.symlink_to(root)
        root = link
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    state = {"weight": torch.ones(1000)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        limit_s = 30.0 if case == "another" else 120.0
        saves = Checkpointer(root, complete=False, on_failure="raise", save_s=limit_s)
        saves.save(50, state)
        saves.wait()
        dist.barrier()
        begin_s, errors = time.monotonic(), list[str]()
        with suppressed(errors):
            CASES[case](saves, rank, root, state)
            if case == "silent" and rank == 1:
                dist.barrier()  # until rank 0 has waited
                saves.save(150, state)
            saves.wait(25.0 if case == "silent" else None)
        took_s = time.monotonic() - begin_s
        if case == "silent" and rank == 0:
            dist.barrier()
            with suppressed(errors):
                saves.wait()
        dist.barrier()
        with suppressed(errors):
            saves.close()
        noted = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
        heard.write_text("\n".join([f"{took_s:.1f}", *errors, *noted]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
