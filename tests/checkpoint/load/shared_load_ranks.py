"""Four processes that load together while disks, connections and ranks fail; and all other cases.

    python -m tests.checkpoint.load.shared_load_ranks DIRECTORY CASE ...

They are forked after torch was imported. Each writes DIRECTORY/RANK.json: what came of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.checkpoint.load.shared_load_cases import (
    LOADS,
    SIZES,
    WORLD,
    bucket,
    equal,
    layouts_of_torch,
    load,
    reading,
    saved,
    whole_read,
)
from torch import distributed as dist
from torch import nn

from outlast.checkpoint import Checkpointer
from outlast.checkpoint.rank_group import RankGroup
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import OutlastError, StorageError


def whatever(root: Path, rank: int, count: str) -> None:
    """Run random wants with slow and failed reads and bit flips: equal, or refused by all."""
    saved(root, 1)
    send = RankGroup.send
    told: dict[str, int] = {}
    for seed in range(int(count)):
        luck, mine = random.Random(seed), random.Random(f"{seed} {rank}")
        share, trouble = luck.random() < 0.9, luck.choice((0.0, 0.0, 0.02, 0.3))
        names = "".join(n for n in SIZES if mine.random() < 0.7)

        def read(self: Folder, directory: str, name: str, at: int, into: memoryview,
                 mine: random.Random = mine, trouble: float = trouble) -> None:  # fmt: skip
            threading.Event().wait(mine.choice((0, 0, 0.002)))
            whole_read(self, directory, name, at, into)
            if mine.random() < trouble / 10:
                raise StorageError("EIO")
            if mine.random() < trouble / 10:
                into[len(into) // 2] ^= 1

        def wire(self: RankGroup, data: memoryview, to: int, number: int,
                 mine: random.Random = mine, trouble: float = trouble) -> Any:  # fmt: skip
            bad = bytearray(data)
            bad[0] ^= mine.random() < trouble
            return send(self, memoryview(bad), to, number)

        RankGroup.send = wire
        seen = load(root, names, share, read, strict=False)
        RankGroup.send = send
        outcomes: list[Any] = [None] * WORLD
        dist.all_gather_object(outcomes, seen.told)
        assert len(set(outcomes)) == 1, (seed, outcomes)
        assert seen.told != "step 1" or equal(seen, 1), (seed, seen)
        told[seen.told[:12]] = told.get(seen.told[:12], 0) + 1
    assert {"step 1", "StorageError"} <= told.keys(), told


def hangs(root: Path, rank: int) -> str:
    saved(root, 1)

    def hanging(self: Folder, directory: str, name: str, at: int, into: memoryview) -> None:
        if rank == 2 and name == "shard-00003":
            self._patience.call(f"{directory}/{name}", threading.Event().wait)
        whole_read(self, directory, name, at, into)

    return load(root, "abc", True, hanging, answer_s=0.5).told


def breaks(root: Path, rank: int, who: str, when: str, how: Callable[[], None]) -> str:
    """Fail one rank at one of its reads."""
    saved(root, 1)
    left = int(when)

    def breaking(self: Folder, directory: str, name: str, at: int, into: memoryview) -> None:
        nonlocal left
        left -= 1
        if rank == int(who) and not left:
            how()
        whole_read(self, directory, name, at, into)

    state = {"model": nn.ParameterDict({n: torch.zeros(s) for n, s in SIZES.items()})}
    with Checkpointer(root, complete=False) as saves, reading(breaking):
        try:
            saves.load(state, share=True)
        except (OutlastError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


def killed(root: Path, rank: int, who: str, when: str) -> str:
    return breaks(root, rank, who, when, lambda: os.kill(os.getpid(), signal.SIGKILL))


def raises(root: Path, rank: int, who: str, when: str) -> str:
    def bug() -> None:
        raise RuntimeError("a bug")

    return breaks(root, rank, who, when, bug)


BREAKS = (killed, raises, hangs, bucket, whatever, layouts_of_torch)


def run(rank: int, root: Path, cases: list[str]) -> dict[str, str]:
    told: dict[str, str] = {}
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    known = {do.__name__: do for do in (*LOADS, *BREAKS)}
    for case in cases:
        name, *words = case.split("=")
        try:
            told[case] = known[name](root / name, rank, *words) or ""
        except Exception:  # noqa: BLE001 - the test fails with it
            told[case] = traceback.format_exc()
            break
    dist.destroy_process_group()
    return told


def main(root: Path, cases: list[str]) -> None:
    children: list[int] = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            told = run(rank, root, cases)
            (root / f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
            sys.exit()
        children.append(child)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
