"""Scripts that need torch, each in a process forked from one that has imported it."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DEADLINE_S = 60  # of each script; SIGALRM then

Words = Sequence[str]  # a script's path, and its arguments


class Left(NamedTuple):
    """Result of a script. `code` is as in subprocess."""

    code: int
    out: str
    err: str


def rear(
    folder: Path, batches: Sequence[Sequence[Words]], *flags: str, fds: Sequence[int] = ()
) -> list[list[Left]]:
    """Run batch after batch, the scripts of each concurrently; the interpreter has `flags`."""
    command = [sys.executable, *flags, __file__, str(folder), json.dumps(batches)]
    subprocess.run(command, pass_fds=fds, check=True, timeout=DEADLINE_S * (1 + len(batches)))
    return [[_left(folder, b, n) for n in range(len(batch))] for b, batch in enumerate(batches)]


def _left(folder: Path, batch: int, number: int) -> Left:
    code, out, err = (
        (folder / f"{batch}-{number}.{k}").read_text() for k in ("code", "out", "err")
    )
    return Left(int(code), out, err)


def _born(folder: Path, batches: list[list[list[str]]]) -> list[str]:
    """Return a script and its arguments in each child; the parent waits for all, and ends."""
    for b, batch in enumerate(batches):
        pids: list[int] = []
        for n, words in enumerate(batch):
            pids.append(os.fork())
            if pids[-1] == 0:
                signal.alarm(DEADLINE_S)
                for stream, kind in ((1, "out"), (2, "err")):
                    file = os.open(folder / f"{b}-{n}.{kind}", os.O_WRONLY | os.O_CREAT)
                    os.dup2(file, stream)
                    os.close(file)
                return words
        for n, pid in enumerate(pids):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            (folder / f"{b}-{n}.code").write_text(str(code))
    raise SystemExit(0)


if __name__ == "__main__":
    import torch

    import outlast

    assert outlast.init  # imported when it is looked at
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first one imports half of torch
    gc.freeze()  # what is common to all is nobody's garbage; their own is looked for at their end
    atexit.unregister(gc.freeze)
    sys.argv = _born(Path(sys.argv[1]), json.loads(sys.argv[2]))
    __file__ = sys.argv[0]
    exec(compile(Path(__file__).read_bytes(), __file__, "exec", dont_inherit=True))
