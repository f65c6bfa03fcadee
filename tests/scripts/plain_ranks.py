"""Ranks of plain torch.distributed, forked from a process that has imported torch.

`run` writes one line of JSON per job to that process and reads one back. A rank has the environment
that torchrun gives it, and `outlast` is the module in plain/. `make soak` compares such ranks with
torchrun's own for every script.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DEADLINE_S = 90


class PlainRanks:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        paths = [str(FOLDER / "plain"), str(FOLDER / "kit"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would ask plain/outlast for our backend
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, script: Path, ranks: int, folder: Path) -> list[int]:
        """Return the exit codes of `script` on `ranks` ranks, which write into `folder`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        self._process.stdin.write(json.dumps([str(script), ranks, str(folder)]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


def serve() -> Path:
    """Fork the ranks of job after job; return the script's path in each rank."""
    for line in sys.stdin:
        script, ranks, folder = json.loads(line)
        pids: list[int] = []
        for rank in range(ranks):
            pids.append(os.fork())
            if pids[-1] == 0:
                become_rank(rank, ranks, Path(folder))
                return Path(script)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    raise SystemExit(0)


def become_rank(rank: int, ranks: int, folder: Path) -> None:
    """Take a rank's environment, its output file, and a deadline."""
    signal.alarm(DEADLINE_S)
    names: dict[str, Any] = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank,
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1,
        "TORCHELASTIC_RUN_ID": "plain", "TORCHELASTIC_RESTART_COUNT": 0, "DIGESTS": folder,
        "PLAIN_RENDEZVOUS": f"file://{folder / 'rendezvous'}",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in names.items()})
    os.chdir(folder)
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    import numpy as np
    import torch._dynamo

    assert np.random and torch._dynamo  # imported once, for all ranks
    gc.freeze()
    path = str(serve())
    sys.argv = [path]
    sys.path[0] = os.path.dirname(path)  # noqa: PTH120 - the interpreter's own way
    runpy.run_path(path, run_name="__main__")
