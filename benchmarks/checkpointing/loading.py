"""Loading into tensors that exist: ours verified against DCP's, from the disk and from memory.

`python -m checkpointing.loading ROOT SIZE_MB ROUNDS`: prints one line of JSON, a Loading.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from checkpointing import limits, state
from checkpointing.engines import DcpTwoFiles, Outlast, forget

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.replicas.memory_copies import MemoryCopies
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.checkpoint.stores.catalog import newest_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import StoreSource

ENDS_S = 120.0


class Loading(msgspec.Struct):
    """Seconds of every round, each system in turn. Cold: nothing of it in the page cache."""

    size_bytes: int
    read_limit: list[float] = []
    ours_cold: list[float] = []
    dcp_cold: list[float] = []
    ours_warm: list[float] = []
    dcp_warm: list[float] = []
    from_disk: list[float] = []
    from_memory: list[float] = []
    wrong: int = 0  # loads that gave other values


def load_from_disk(root: Path, held: state.State, rounds: int, found: Loading) -> None:
    """Public face against public face; who begins changes each round."""
    roots = [root / "ours", root / "dcp"]
    for path in roots:
        path.mkdir()
    engines = [Outlast(roots[0]), DcpTwoFiles(roots[1])]
    for engine in engines:
        engine.save(1, held)()
    expected, into = state.values(held), held
    cold, warm = (found.ours_cold, found.dcp_cold), (found.ours_warm, found.dcp_warm)
    for turn in range(rounds):
        forget(root)
        shard = next(roots[0].glob("step-*/shard-00000"))
        found.read_limit.append(_limit_s(shard))
        for which in (0, 1) if turn % 2 else (1, 0):
            for taken in (cold[which], warm[which]):
                state.blank(into)
                taken.append(_timed(lambda which=which: engines[which].load(1, into)))
                found.wrong += not state.equal(into, expected)
    _put_back(into, expected)
    for engine in engines:
        engine.close()


def roll_back(root: Path, held: state.State, rounds: int, found: Loading) -> None:
    """The same version out of a keeper's memory, as a job does whose processes are gone, and from
    the disk: the same reader for both."""
    address, token = f"@outlast-bench-{os.getpid()}", secrets.token_hex(16)
    served = ServedKeeper(address, "the benchmark", KeeperSetup(token=token))
    folder = root / "returned"
    settings = SaveSettings(root=folder, rank=0, world=1, job="", arenas=1, save_s=ENDS_S)
    keeper = KeeperClient.connect(address, token)
    engine = SaveEngine(settings, lambda message: [message], keeper)
    save = engine.save(SaveRequest(SavePoint(1, 1, "a"), held.tensors()))
    assert engine.wait(save, ENDS_S).kind == "committed"
    engine.close(ENDS_S)
    expected, into = state.values(held), held

    def from_memory() -> None:
        copies = MemoryCopies.reach([address], token, "the benchmark")
        _read(copies, into)
        copies.close()

    for turn in range(rounds):
        both = [
            (found.from_memory, from_memory),
            (found.from_disk, lambda: _read(Folder(folder), into)),
        ]
        for taken, do in both if turn % 2 else reversed(both):
            state.blank(into)
            taken.append(_timed(do))
            found.wrong += not state.equal(into, expected)
    served.close(ENDS_S)


def _read(source: StoreSource, into: state.State) -> None:
    checkpoint = newest_checkpoint(source, lambda damage: sys.exit(damage))
    assert checkpoint
    SaveEngine.read(CheckpointReader(checkpoint), into.tensors())


def _put_back(into: state.State, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in into.tensors().items():
        tensor.copy_(values[name])


def _limit_s(shard: Path) -> float:
    buffer = memoryview(limits.memory(limits.SLICE_BYTES))
    return _timed(lambda: limits.read(shard, buffer))


def _timed(do: Callable[[], object]) -> float:
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def main(root: Path, size_mb: float, rounds: int) -> Loading:
    torch.set_num_threads(1)
    held = state.make(size_mb)
    found = Loading(size_bytes=state.size_bytes(held))
    load_from_disk(root, held, rounds, found)
    roll_back(root, held, rounds, found)
    return found


if __name__ == "__main__":
    loading = main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    print(msgspec.json.encode(loading).decode())
