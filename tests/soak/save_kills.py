"""SIGKILL at random times while two ranks save; committed checkpoints load byte for byte.

python tests/soak/save_kills.py --kills 200              # another seed each time, printed
python tests/soak/save_kills.py --kills 200 --seed 17    # one seed again

A life is a job: two ranks, forked, that save at every step, every third time to the disk, and else
in memory alone. Ranks and keepers are killed, one, two or all of them. After each kill, at once:
the newest checkpoint is the last that was told to be committed, or newer, and every byte of it is
that of its step and life; the same for what keepers still hold in memory. A job of which only
keepers died must go on and commit again, without one failed save; else the next life begins from
what is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from killed_jobs import WORLD, Job, Life, content

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.stores.catalog import Checkpoint, newest_checkpoint
from outlast.checkpoint.stores.folder_store import Folder

STRIKES = {"rank": 3, "keeper": 4, "rank and its keeper": 2, "both keepers": 2, "all": 2}
WITHIN_S = 0.25  # after the life's first commit, or the last kill
DEADLINE_S = 60.0


class Soak:
    """Repeated kills, and checks of the remaining checkpoints."""

    def __init__(self, root: Path, dice: random.Random, elements: int) -> None:
        self.root, self.dice, self.elements = root, dice, elements
        self.store = Folder(root)
        self.token = secrets.token_hex(16)
        self.served: list[ServedKeeper] = [self._serve(rank) for rank in range(WORLD)]
        self.life: Life | None = None
        self.lives, self.told = 0, 0  # `told`: the greatest step that was said to be committed
        self.struck: Counter[str] = Counter()
        self.in_memory = 0  # kills after which memory still held a whole version

    def strike(self) -> None:
        """Kill once, and check all invariants."""
        if not self.life:
            self._begin()
        life = self.life
        assert life
        life.listen_until(lambda: life.told > life.begun, DEADLINE_S, "its first commit")
        life.listen_for(self.dice.uniform(0, WITHIN_S))
        how = self.dice.choices(list(STRIKES), list(STRIKES.values()))[0]
        which = self.dice.randrange(WORLD)
        self.struck[how] += 1
        keepers = {"keeper": [which], "rank and its keeper": [which]}.get(how, [])
        keepers = list(range(WORLD)) if how in ("both keepers", "all") else keepers
        self._kill(life, [] if "rank" not in how and how != "all" else [which], keepers)
        if how in ("keeper", "both keepers"):
            self._look(life)
            life.begun = life.told  # it must get further than that
            life.listen_until(lambda: life.told > life.begun, DEADLINE_S, f"a commit after {how}")
            return
        if how == "all" or self.dice.random() < 0.5:
            life.kill(range(WORLD))
        self._look(life)
        life.end(DEADLINE_S)
        self._look(life)
        self.life = None

    def close(self) -> None:
        if self.life:
            self.life.end(DEADLINE_S)
        for served in self.served:
            served.close(DEADLINE_S)

    def _begin(self) -> None:
        self.lives += 1
        found = newest_checkpoint(self.store, damaged)
        begun = found.place.step if found else 0
        own = self.dice.random() < 0.3  # keepers of the ranks' own: those end with them
        addresses = [] if own else [_address(rank) for rank in range(WORLD)]
        self.life = Life(Job(self.lives, self.root, begun, self.elements, addresses, self.token))

    def _kill(self, life: Life, ranks: list[int], keepers: list[int]) -> None:
        for rank in keepers:
            if life.addresses:
                os.kill(self.served[rank].process.pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    self.served[rank].close(DEADLINE_S)
            else:
                life.kill_keeper(rank)
        life.kill(ranks)
        if life.addresses:
            for rank in keepers:
                self.served[rank] = self._serve(rank)  # as the launcher does

    def _look(self, life: Life) -> None:
        """Check at once, while keepers may still write."""
        life.listen_for(0)
        self.told = max(self.told, life.told)
        found = newest_checkpoint(self.store, damaged, verify=True)
        assert found and found.place.step >= self.told, f"{found and found.place} < {self.told}"
        check(found, self.elements)
        self._forget_before(found.place)
        if not (life.ended and life.addresses):
            return  # keepers speak to one at a time
        copies = MemoryCopies.reach(life.addresses, self.token, "the soak")
        if held := newest_checkpoint(copies, damaged):
            check(held, self.elements)
            self.in_memory += 1
        copies.close()

    def _forget_before(self, place: SavePoint) -> None:
        """Delete old checkpoints, except the newest two."""
        steps = sorted({p.step for p in map(SavePoint.parse, self.store.directories()) if p})
        for name in self.store.directories():
            old = SavePoint.parse(name)
            if old and old.step < place.step and old.step in steps[:-2]:
                shutil.rmtree(self.root / name, ignore_errors=True)

    def _serve(self, rank: int) -> ServedKeeper:
        return ServedKeeper(_address(rank), f"rank {rank}", KeeperSetup(token=self.token))


def check(checkpoint: Checkpoint, elements: int) -> None:
    """Compare every element of every tensor, and both kinds of blobs."""
    place, reader = checkpoint.place, CheckpointReader(checkpoint)
    wanted = [content(place, rank, elements) for rank in range(WORLD)]
    whole = {name: tensor for tensors in wanted for name, tensor in tensors.items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    SaveEngine.read(reader, found)
    for name, tensor in whole.items():
        assert np.array_equal(found[name].numpy(), tensor.numpy()), f"{place}: {name} differs"
    assert reader.blob(0, "shared").decode() == place.directory
    for rank in range(WORLD):
        assert reader.blob(rank, "own").decode() == f"{rank} {place.directory}"


def damaged(said: str) -> None:
    raise AssertionError(said)


def _address(rank: int) -> str:
    return f"@outlast-soak-{os.getpid()}-{rank}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--elements", type=int, default=3_000_000, help="more than a chunk a rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {args.seed}", flush=True)
    root = Path(tempfile.mkdtemp(prefix="outlast-kills-"))
    soak, began = Soak(root, random.Random(args.seed), args.elements), time.monotonic()
    try:
        for done in range(args.kills):
            soak.strike()
            if (done + 1) % 20 == 0:
                print(f"{done + 1} kills, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        soak.close()
    told = ", ".join(f"{count} {how}" for how, count in soak.struck.most_common())
    print(
        f"{args.kills} kills ({told}) in {soak.lives} lives, to step {soak.told}: the newest"
        f" checkpoint loaded each time; memory had a whole version {soak.in_memory} times"
    )
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
