"""One rank killed, an undisturbed step, and a save, on a device: beside torch's own, in turn.

`--device cpu` runs the same on processors and gloo, which tests the benchmark. Several ranks share
a GPU where there are fewer GPUs than ranks, as NCCL 2.30 and newer allow. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import overhead
import recovery
import torch
from checkpointing.engines import Outlast, TorchSave, sync
from checkpointing.state import FULL_MB, make, size_bytes
from harness import Place, Spread, bootstrap_ratio, load, median, spread, table, verdict
from workload import SIZES, WORLD, wait_for

from outlast.errors import OutlastError

SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
SHARING_NCCL = (2, 30)
BLOCK = 10  # steps of a turn
HEAD = ("measured", "median", "95 %", "limit")


class Row(NamedTuple):
    """A figure, and the limit of its median or of its interval's upper end."""

    name: str
    figure: Spread
    limit: float | None = None
    is_upper_end: bool = False

    def cells(self) -> tuple[str, ...]:
        limit = "" if self.limit is None else f"{self.limit:.4g}"
        low, high = self.figure.low, self.figure.high
        return (self.name, f"{self.figure.median:.4g}", f"{low:.4g} to {high:.4g}", limit)


def place_of(device: str) -> Place:
    """Return four ranks on the GPUs that there are, or fewer where they cannot share one. Exits
    where no two ranks have room."""
    if device == "cpu":
        return Place()
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU that torch can use; --device cpu needs none")
    devices, nccl = torch.cuda.device_count(), nccl_version()
    if devices >= WORLD:
        return Place(device)
    if nccl >= SHARING_NCCL:
        os.environ.update({name: os.environ.get(name, each) for name, each in SHARED_GPU.items()})
        return Place(device)
    if devices < 2:
        raise SystemExit(f"NCCL {nccl} has one rank a GPU, and there is one GPU; 2.30 can share it")
    return Place(device, devices)


def recoveries(place: Place, args: argparse.Namespace) -> list[Row]:
    """Kill a rank under torchrun and under Outlast in turn, until all have committed its step.

    A spare opens no context on the GPU of a rank, so that hot spares need a GPU of their own.
    """
    names = ["warm spare", "respawn"]
    if place.device == "cpu" or torch.cuda.device_count() > place.ranks:
        names.append("hot spare")
    plain: list[recovery.Recovery] = []
    ours: dict[str, list[recovery.Recovery]] = {name: [] for name in names}
    for turn in range(args.repeats):
        plain.append(recovery.torchrun(place, args.size))
        for name, runs in ours.items():
            runs.append(recovery.outlast(recovery.VARIANTS[name], place, args.size))
        say(f"recovery {turn + 1}/{args.repeats}")
    copy_s = median([run.copy_s for run in plain])
    warm_s = [run.back_s for run in ours["warm spare"]]
    plain_s = [run.back_s for run in plain]
    rows = [Row("torchrun, s", spread(plain_s))]
    for name, runs in ours.items():
        back_s = [run.back_s for run in runs]
        build_s = 0.0 if name == "hot spare" else median([run.build_s for run in runs])
        limit_s = build_s + 2 * median([run.step_s for run in runs]) + copy_s + 0.2
        rows.append(Row(f"{name}, s", spread(back_s), limit_s if name != "respawn" else None))
        rows.append(Row(f"{name} / torchrun", bootstrap_ratio(plain_s, back_s), 1 / 5))
    respawn_s = [run.back_s for run in ours["respawn"]]
    rows.append(Row("respawn / warm spare", bootstrap_ratio(warm_s, respawn_s), 1.3))
    lost = [float(run.lost) for runs in ours.values() for run in runs]
    return [*rows, Row("committed steps lost", Spread(sum(lost), min(lost), max(lost)), 0.0)]


def steps(place: Place, args: argparse.Namespace) -> list[Row]:
    """Compare undisturbed steps with those of plain DDP, in turns of a few."""
    variant = overhead.Variant("ddp", args.size, BLOCK)
    plain, ours = overhead.side_by_side(variant, args.turns, args.small, place)
    return [
        Row("step of plain DDP, s", spread(plain.turns_s)),
        Row("step, s", spread(ours.turns_s)),
        Row("step / plain DDP", bootstrap_ratio(plain.turns_s, ours.turns_s), 1.02, True),
        Row("small all-reduce / plain", bootstrap_ratio([plain.small_s], [ours.small_s]), 1.1),
    ]


def saves(place: Place, args: argparse.Namespace) -> list[Row]:
    """Save a state of the device with `torch.save` and with ours, beside one copy to the host.

    A save blocks until the step behind it could run: its copies have ended on the device. The first
    turn makes what is made once, and does not count.
    """
    state, device = make(args.size_mb), torch.device(place.device)
    state.model.to(device)
    for moments in state.optimizer.state.values():
        moments.update({key: moments[key].to(device) for key in ("exp_avg", "exp_avg_sq")})
    copy = copy_to_host(device, size_bytes(state))
    copy_s, blocks_s, durable_s, plain_s = (list[float]() for _ in range(4))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder)
        ours, plain = Outlast(path / "outlast"), TorchSave(path)
        ours.prepare(state)
        for step in range(1, args.saves + 2):
            copy_s.append(seconds(device, copy))
            begin = time.perf_counter()
            wait = ours.save(step, state)
            wait_for(device)
            blocks_s.append(time.perf_counter() - begin)
            wait()
            sync(path)
            durable_s.append(time.perf_counter() - begin)
            plain_s.append(seconds(device, lambda: plain.save(0, state)))
        ours.close()
    copy_s, blocks_s, durable_s, plain_s = copy_s[1:], blocks_s[1:], durable_s[1:], plain_s[1:]
    return [
        Row(f"copy of {size_bytes(state) / 1e9:.3g} GB to the host, s", spread(copy_s)),
        Row("a save blocks, s", spread(blocks_s)),
        Row("a save blocks / copy", bootstrap_ratio(copy_s, blocks_s), 1.10),
        Row("a save is durable, s", spread(durable_s)),
        Row("torch.save blocks, s", spread(plain_s)),
        Row("a save blocks / torch.save", bootstrap_ratio(plain_s, blocks_s)),
    ]


def seconds(device: torch.device, do: Callable[[], object]) -> float:
    """Time one call, and what it gave the device to do."""
    begin = time.perf_counter()
    do()
    wait_for(device)
    return time.perf_counter() - begin


def copy_to_host(device: torch.device, size: int) -> Callable[[], object]:
    """Return one copy of that many bytes, from a GPU into pinned memory."""
    there = torch.ones(size, dtype=torch.uint8, device=device)
    here = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return lambda: here.copy_(there, non_blocking=True)


def versions(place: Place) -> str:
    """Return what the figures hold for."""
    ran = f"torch {torch.__version__}, Python {platform.python_version()}, {place.ranks} ranks"
    if place.device == "cpu":
        return f"no GPU; {ran}, gloo, {os.cpu_count()} cores"
    nccl = ".".join(map(str, nccl_version()))
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{gpus}; {ran}, NCCL {nccl}, CUDA {torch.version.cuda}"


def page(rows: Sequence[Row], ran: str, failed: Sequence[str]) -> str:
    """Return a section in Markdown."""
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    cells = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in rows)]
    lines = [f"| {' | '.join(each)} |" for each in cells]
    lines += [f"\n```text\n{each}\n```" for each in failed]
    today = datetime.datetime.now(datetime.UTC).date()
    return "\n".join(["", "## Benchmarks", "", f"`{command}`, {today}: {ran}.", "", *lines, ""])


def nccl_version() -> tuple[int, ...]:
    nccl: Any = import_module("torch.cuda.nccl")
    return nccl.version()


def say(part: str) -> None:
    print(f"measured: {part}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="gpu", help="of the model")
    parser.add_argument("--repeats", type=int, default=5, help="kills of each kind")
    parser.add_argument("--turns", type=int, default=40, help=f"turns of {BLOCK} steps")
    parser.add_argument("--small", type=int, default=1000, help="small collectives")
    parser.add_argument("--size-mb", type=float, default=FULL_MB, help="of the state to save")
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to save to")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to a page")
    args = parser.parse_args()
    place, load_before = place_of(args.device), load()
    rows: list[Row] = []
    failed: list[str] = []
    for part in (recoveries, steps, saves):
        try:
            rows += part(place, args)
            say(part.__name__)
        except (SystemExit, OutlastError, RuntimeError) as error:  # the others are measured
            failed.append(f"{part.__name__} failed: {error}")
    ran = versions(place)
    print(ran, *failed, sep="\n")
    table(HEAD, [row.cells() for row in rows])
    if args.record:
        with args.record.open("a") as record:
            record.write(page(rows, ran, failed))
    figures = {"ran": ran, "load": load_before} | {row.name: row.figure for row in rows}
    bars = {
        row.name: (row.figure.high if row.is_upper_end else row.figure.median, row.limit)
        for row in rows
        if row.limit is not None
    }
    return verdict("gpu", figures, bars) or bool(failed)


if __name__ == "__main__":
    sys.exit(main())
