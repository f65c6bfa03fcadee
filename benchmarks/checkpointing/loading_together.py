"""Ranks that hold the same state and load it together: seconds, and bytes read for all of them.

`python -m checkpointing.loading_together ROOT SIZE_MB ROUNDS WORLD`: prints one line of JSON, a
LoadingTogether. `WORLD` processes on this host speak over gloo; nothing of the files is in the page
cache when a load begins. Ways take turns.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from checkpointing import state
from checkpointing.engines import Dcp, Outlast, forget
from checkpointing.together import spawn
from torch import distributed as dist

from outlast.checkpoint.stores.folder_store import Folder

SLOW_BYTES_PER_S = 400e6  # of a directory that all ranks share


class Loads(msgspec.Struct):
    """Of every round, the slowest rank's seconds, and the bytes that came from the disk."""

    seconds: list[float] = []
    from_disk_bytes: list[float] = []


class LoadingTogether(msgspec.Struct):
    """`slow_alone`, `slow_shared`: where all ranks together get SLOW_BYTES_PER_S."""

    size_bytes: int
    wrong: int = 0  # loads that gave other values
    alone: Loads = msgspec.field(default_factory=Loads)
    shared: Loads = msgspec.field(default_factory=Loads)
    dcp: Loads = msgspec.field(default_factory=Loads)
    slow_alone: Loads = msgspec.field(default_factory=Loads)
    slow_shared: Loads = msgspec.field(default_factory=Loads)


class Shared(Outlast):
    """The public face; `share` as it is asked for."""

    share: bool | None = None

    def load(self, step: int | None, into: state.State) -> None:
        if not self._saves.load(into._asdict(), step=step, share=self.share):
            raise SystemExit("there is nothing to load")


@contextmanager
def slow(root: Path) -> Iterator[None]:
    """Within, whoever reads waits for its turn, on all ranks."""
    read = Folder.read
    turns = os.open(root / "turns", os.O_CREAT | os.O_RDWR)

    def in_turn(self: Folder, directory: str, name: str, at: int, into: memoryview) -> None:
        turn = os.open(root / "turns", os.O_RDWR)  # threads of one process wait for each other, too
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
            time.sleep(len(into) / SLOW_BYTES_PER_S)
        finally:
            os.close(turn)
        read(self, directory, name, at, into)

    Folder.read = in_turn
    try:
        yield
    finally:
        Folder.read = read
        os.close(turns)


def rank_of(root: Path, size_mb: float, rounds: int) -> LoadingTogether | None:
    """Load as one rank of those that the environment tells of; the answer is rank 0's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    held = state.make(size_mb)
    found = LoadingTogether(state.size_bytes(held))
    roots = [root / "ours", root / "dcp"]
    for path in roots:
        path.mkdir(exist_ok=True)
    ours, dcp = Shared(roots[0]), Dcp(roots[1])
    for engine in (ours, dcp):
        engine.save(1, held)()
        dist.barrier()
    expected = state.values(held)

    def with_share(share: bool) -> None:
        ours.share = share
        ours.load(1, held)

    ways = {
        "alone": lambda: with_share(False),
        "shared": lambda: with_share(True),
        "dcp": lambda: dcp.load(1, held),
    }
    for _ in range(rounds):
        for name, do in ways.items():
            measure(getattr(found, name), root, held, do)
            found.wrong += not state.equal(held, expected)
        with slow(root):
            for name in ("alone", "shared"):
                measure(getattr(found, f"slow_{name}"), root, held, ways[name])
                found.wrong += not state.equal(held, expected)
    wrong = torch.tensor(found.wrong)
    dist.all_reduce(wrong)
    found.wrong = int(wrong)
    first = dist.get_rank() == 0
    ours.close()
    dist.destroy_process_group()
    return found if first else None


def measure(into: Loads, root: Path, held: state.State, do: Callable[[], None]) -> None:
    state.blank(held)
    if dist.get_rank() == 0:
        forget(root)
    dist.barrier()
    before, begin = _from_disk_bytes(), time.perf_counter()
    do()
    dist.barrier()
    sums = torch.tensor([time.perf_counter() - begin, _from_disk_bytes() - before]).double()
    into.seconds.append(float(sums[0]))
    dist.all_reduce(sums)
    into.from_disk_bytes.append(float(sums[1]))


def _from_disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main(asked: list[str]) -> None:
    root, size_mb, rounds = Path(asked[1]), float(asked[2]), int(asked[3])
    if "RANK" not in os.environ:
        spawn("checkpointing.loading_together", asked[1:], int(asked[4]))
    told = rank_of(root, size_mb, rounds)
    if told:
        print(msgspec.json.encode(told).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv)
