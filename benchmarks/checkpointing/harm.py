"""What becomes of what was saved when a bit flips, and when a save is killed.

`python -m checkpointing.harm ENGINE ROOT FLIPS KILLS SEED`: prints one line of JSON, a Harm.
"""

from __future__ import annotations

import contextlib
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from checkpointing import state
from checkpointing.engines import ENGINES, OURS, Dcp, Outlast, TorchSave
from torch.distributed.checkpoint.api import CheckpointException

FLIPPED_MB, KILLED_MB = 60.0, 12.0
SAVES_FIRST = 4
KILL_WITHIN_S = 0.12
READY_S = 60.0
NEWEST = "DCP, newest with .metadata"
IN_PLACE = {OURS: Outlast, "torch.save": TorchSave, "DCP sync": Dcp, NEWEST: Dcp}


class Harm(msgspec.Struct):
    """Of `flips` single-bit flips in the largest file, how many a load noticed, and how many it
    let through; of `kills`, after how many nothing whole could be loaded."""

    flips: int = 0
    noticed: int = 0
    silent: int = 0
    kills: int = 0
    unloadable: int = 0


def flip_bits(name: str, root: Path, flips: int, dice: random.Random) -> tuple[int, int]:
    held = state.make(FLIPPED_MB)
    engine = ENGINES[name](root)
    engine.save(1, held)()
    engine.close()
    largest = max((p for p in root.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    expected, into, noticed, silent = state.values(held), held, 0, 0
    for _ in range(flips):
        with _flipped(largest, dice.randrange(largest.stat().st_size * 8)):
            fine = _loads(name, root, 1, state.blank(into))
            noticed += not fine
            silent += fine and not state.equal(into, expected)
    return noticed, silent


def kill_saves(name: str, root: Path, kills: int, dice: random.Random) -> int:
    """Nothing whole: the load fails, or its tensors are of more than one step."""
    unloadable = 0
    for kill in range(kills):
        folder = root / str(kill)
        folder.mkdir()
        saving = [sys.executable, "-m", "checkpointing.harm", "save", name, str(folder)]
        with subprocess.Popen(saving, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for _ in range(SAVES_FIRST):
                if not process.stdout.readline():
                    raise SystemExit(f"{name} did not save under {folder}")
            select.select([], [], [], dice.uniform(0, KILL_WITHIN_S))
            process.kill()
        into = state.blank(state.make(KILLED_MB))
        step = _step_to_load(name, folder)
        whole = _loads(name, folder, step, into)
        firsts = {tensor.view(-1)[0].item() for tensor in into.tensors().values()}
        unloadable += not whole or len(firsts) != 1
        shutil.rmtree(folder, ignore_errors=True)  # our keeper may be writing the last save yet
    return unloadable


def save_on(name: str, root: Path) -> None:
    """Until it is killed: every tensor full of the step's number; as little is left in place as
    the engine's own way of saving leaves."""
    torch.set_num_threads(1)
    held = state.make(KILLED_MB)
    engine = IN_PLACE[name](root)
    step = 0
    while True:
        step += 1
        for tensor in held.tensors().values():
            tensor.fill_(step % 100)
        engine.save(step if name in (OURS, NEWEST) else 1, held)()
        print(step, flush=True)


def _step_to_load(name: str, folder: Path) -> int | None:
    if name == NEWEST:  # DCP's own mark of a whole checkpoint
        return max(int(path.parent.name) for path in folder.glob("*/.metadata"))
    return None if name == OURS else 1


def _loads(name: str, root: Path, step: int | None, into: state.State) -> bool:
    engine = {**ENGINES, **IN_PLACE}[name](root)
    try:
        engine.load(step, into)
    except (Exception, CheckpointException):  # noqa: BLE001 - whatever it raises, it has noticed
        return False
    finally:
        engine.close()
    return True


@contextlib.contextmanager
def _flipped(path: Path, bit: int) -> Iterator[None]:
    _flip(path, bit)
    try:
        yield
    finally:
        _flip(path, bit)


def _flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def main(name: str, root: Path, flips: int, kills: int, seed: int) -> Harm:
    torch.set_num_threads(1)
    dice = random.Random(seed)
    harm = Harm()
    if name in ENGINES:
        (root / "flips").mkdir()
        harm.flips = flips
        harm.noticed, harm.silent = flip_bits(name, root / "flips", flips, dice)
    if name in IN_PLACE:
        harm.kills = kills
        harm.unloadable = kill_saves(name, root, kills, dice)
    return harm


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save_on(sys.argv[2], Path(sys.argv[3]))
    asked = sys.argv
    found = main(asked[1], Path(asked[2]), int(asked[3]), int(asked[4]), int(asked[5]))
    print(msgspec.json.encode(found).decode())
