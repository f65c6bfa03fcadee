"""Script of both launchers: each rank records how it was started, then does as ACT says."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

root = Path(os.environ["PROBE"])
name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
attempt, rank = map(int, name.split("-"))


def say(word: str) -> None:
    (root / word).write_text(str(os.getpid()))


def wait_for(word: str) -> None:
    until_s = time.monotonic() + 60
    while not (root / word).exists():
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)


def ended_by(number: int, _frame: object) -> None:
    say(f"{name}-{signal.Signals(number).name}")
    sys.exit(0)


record = {
    "environment": dict(os.environ),
    "argv": sys.argv,
    "name": __name__,
    "cwd": str(Path.cwd()),
    "path": sys.path[0],
    "stdin": str(Path("/proc/self/fd/0").readlink()),
    "leads": os.getpgid(0) == os.getpid() and os.getsid(0) == os.getpid(),
    "handlers": [str(signal.getsignal(number)) for number in (1, 2, 3, 10, 13, 15)],
    "mask": os.umask(0o22),
}
(root / f"{name}.json").write_text(json.dumps(record))
print(f"out of {rank}")
print(f"err of {rank}", file=sys.stderr)
act = os.environ.get("ACT", "")
if act == "restart" and attempt < 2:
    say(f"{name}-ready")
    if rank == 1:
        wait_for(f"{attempt}-0-ready")
        sys.exit(5)
    signal.pause()
if act == "restart all" and attempt < 2:
    say(f"{name}-ready")
    for other in range(int(os.environ["WORLD_SIZE"])):
        wait_for(f"{attempt}-{other}-ready")
    sys.exit(5)
if act == "fail" and rank == 1:
    wait_for(f"{attempt}-0-ready")
    sys.exit(5)
if act in ("fail", "wait") and (rank == 0 or act == "wait"):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ended_by)
    say(f"{name}-ready")
    signal.pause()
if act == "record":
    from torch.distributed.elastic.multiprocessing.errors import record as recorded

    @recorded
    def main() -> None:
        raise ValueError("shard 7 is empty")

    main() if rank == 1 else signal.pause()
if act == "rank 0 ends first":
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False)
    if rank == 0:
        store.set("weights", "here")
        say("first is done")
    else:
        wait_for("first is done")
        first = Path("/proc", (root / "first is done").read_text())
        while first.exists():
            threading.Event().wait(0.01)
        assert store.get("weights") == b"here"
if act in ("env://", "tcp"):
    import torch
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    url = act if act == "env://" else f"tcp://{address}:{port}"
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"total {total.item()}, launched {dist.is_torchelastic_launched()}")
    dist.destroy_process_group()
