"""Saves for ever and is killed; after each death the newest checkpoint must load.

`saver.py ROOT times N SEED`: at random times; `saver.py ROOT points`: at every call that changes
the name of a file.
"""

import os
import random
import select
import signal
import sys
from pathlib import Path

import torch

from outlast.checkpoint.store import Draft, clean, newest, prune

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "shutil.rmtree"}
torch.set_num_threads(1)


def save(root: Path, step: int) -> None:
    draft = Draft(root, step, step, 1)
    parts = [
        draft.write("model", {f"w{i}": torch.full((40_000,), float(step)) for i in range(4)}),
        draft.write("seat-0", {"step": step}),
    ]
    draft.complete(parts, "job", 1)
    prune(root, 2)


def check(root: Path, least: int) -> int:
    said: list[str] = []
    found = newest(root, said.append)
    assert not said, said
    assert found is not None, "no checkpoint"
    assert found.step >= least, f"step {found.step} where {least} was complete"
    model = found.load("model")
    assert {float(x) for w in model.values() for x in w.unique()} == {float(found.step)}
    assert found.load("seat-0") == {"step": found.step}
    return found.step


def killed(root: Path, start: int, delay_s: float, point: int) -> tuple[int, bool]:
    """One life: the last step that it said was complete, and whether it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        left = point

        def count(event: str, _: object) -> None:
            nonlocal left
            if event in CHANGES:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        if point:
            sys.addaudithook(count)
        for step in range(start, start + (2 if point else 10_000)):
            save(root, step)
            os.write(writer, f"{step}\n".encode())
        os._exit(0)
    os.close(writer)
    if not point:
        fd = os.pidfd_open(pid)
        select.select([fd], [], [], delay_s)
        os.kill(pid, signal.SIGKILL)
        os.close(fd)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reader) as pipe:
        told = [int(line) for line in pipe]
    return max(told, default=start - 1), os.WIFSIGNALED(status)


def main() -> None:
    root, how = Path(sys.argv[1]), sys.argv[2]
    save(root, 1)
    step, lives = 1, 0
    alive = True
    if how == "times":
        dice = random.Random(int(sys.argv[4]))
        while lives < int(sys.argv[3]):
            lives += 1
            least, _ = killed(root, step + 1, dice.uniform(0.0, 0.05), 0)
            step = check(root, least)
            clean(root)
    else:
        while alive:
            lives += 1
            least, alive = killed(root, step + 1, 0.0, lives)
            step = check(root, least)
            clean(root)
    print(f"{lives} lives, step {step}")


main()
