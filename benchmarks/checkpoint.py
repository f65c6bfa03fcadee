"""Checkpoint engines on the same state, in turn: what a save costs, and what survives.

Each turn is a process of its own that measures this machine's limits first; ratios are taken within
it, medians over turns. torchsnapshot and torch_checkpointing take part where they are installed.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from checkpointing.adapters import Adapters
from checkpointing.engines import ENGINES, OURS, Outlast
from checkpointing.harm import IN_PLACE, Harm
from checkpointing.loading import Loading
from checkpointing.loading_together import LoadingTogether, Loads
from checkpointing.state import FULL_MB
from checkpointing.together import Together
from checkpointing.turn import Turn
from harness import HERE, median, table, verdict

BEST = "DCP tuned"
PART_S, TURN_S, QUICK_MB = 900.0, 300.0, 200.0
KEEPER_BYTES = 25e6  # of the keeper's own process, beside the arenas
PARTS = ("saves", "many", "adapters", "ranks", "loads", "harm")
ADAPTERS_SAVES = 6  # two that write what is not trained, then those that link it
MANY_MB = 82.0  # 20,000 tensors of 4 KB
WORLD, RANKS_MB = 4, 400.0
TOGETHER = (OURS, "DCP sync", "DCP async", BEST, "torch_checkpointing")  # those that divide work
Told = TypeVar("Told", Turn, Loading, LoadingTogether, Harm, Together, Adapters)
Bars = dict[str, tuple[float, float]]


class Asked(NamedTuple):
    """How much is measured, and where."""

    folder: Path
    size_mb: float
    rounds: int
    saves: int
    flips: int
    kills: int
    seed: int


class TurnEnded(Exception):  # noqa: N818 - an engine's end, which is a result
    """A process of a turn ended with an error, or too late."""


def run(
    kind: type[Told], asked: Asked, module: str, *arguments: object, limit_s: float = PART_S
) -> Told:
    """One process with an empty folder, which it is the only one to use. Raises TurnEnded."""
    root = Path(tempfile.mkdtemp(prefix="turn-", dir=asked.folder))
    words = [str(root) if argument is Path else str(argument) for argument in arguments]
    command = [sys.executable, "-W", "ignore", "-m", f"checkpointing.{module}", *words]
    process = subprocess.Popen(
        command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TurnEnded(f"{' '.join(command)} did not end in {limit_s:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # a failed engine leaves processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(root, ignore_errors=True)
    if process.returncode:
        raise TurnEnded(f"{' '.join(command)} ended with {process.returncode}:\n{errors[-3000:]}")
    return msgspec.json.decode(output.splitlines()[-1], type=kind)


class Engines:
    """The engines that take turns. One that cannot do what it is asked is told, and left out."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.ended: dict[str, str] = {}

    def turn(self, take: Callable[[str], Told]) -> dict[str, Told]:
        """Give each engine its turn. Raises TurnEnded for our own."""
        told: dict[str, Told] = {}
        for name in list(self.names):
            try:
                told[name] = take(name)
            except TurnEnded as error:
                if name == OURS:
                    raise
                self.names.remove(name)
                self.ended[name] = str(error).strip().splitlines()[-1][:200]
                say(f"{name} is left out: {error}")
        return told

    def of_all(self, turns: Sequence[Mapping[str, Told]]) -> dict[str, list[Told]]:
        """Return the turns of the engines that took all of them, and print why others did not."""
        for name, why in self.ended.items():
            print(f"{name} ended: {why}")
        return {name: [turn[name] for turn in turns] for name in self.names}


def measure_saves(
    asked: Asked, names: Sequence[str], kind: str = "transformer"
) -> dict[str, list[Turn]]:
    engines, turns = Engines(names), list[dict[str, Turn]]()
    for turn in range(asked.rounds):
        turns.append(
            engines.turn(
                lambda name: run(
                    Turn, asked, "turn", name, Path, asked.size_mb, asked.saves, kind,
                    limit_s=TURN_S,
                )
            )
        )  # fmt: skip
        say(f"saves of {kind} {turn + 1}/{asked.rounds}")
    return engines.of_all(turns)


def figures_of(turns: list[Turn]) -> dict[str, float | None]:
    """Medians over turns. Ratios were taken within each."""
    kept = [turn.compute_kept for turn in turns if turn.compute_kept is not None]
    cpu = [turn.cpu_s for turn in turns if turn.cpu_s is not None]
    return {
        "first_s": median([turn.first_s for turn in turns]),
        "blocks_s": median([turn.blocks_s for turn in turns]),
        "blocks_to_copy": median([turn.blocks_s / turn.copy_limit_s for turn in turns]),
        "durable_s": median([turn.durable_s for turn in turns]),
        "durable_to_write": median([turn.durable_s / turn.write_limit_s for turn in turns]),
        "extra_memory": median([turn.extra_memory_bytes / turn.size_bytes for turn in turns]),
        "compute_kept": median(kept) if kept else None,
        "cpu_s": median(cpu) if cpu else None,
    }


def show_saves(turns: Mapping[str, list[Turn]]) -> tuple[dict[str, Any], Bars]:
    every = [turn for told in turns.values() for turn in told]
    size, copy_s = every[0].size_bytes, median([turn.copy_limit_s for turn in every])
    one_s = median([turn.copy_one_s for turn in every])
    write_s = median([turn.write_limit_s for turn in every])
    print(
        f"state {size / 1e9:.2f} GB; limits: memcpy {copy_s:.3f} s ({size / copy_s / 1e9:.1f}"
        f" GB/s, the better of one thread and two; one: {one_s:.3f} s), O_DIRECT write and fsync"
        f" {write_s:.3f} s ({size / write_s / 1e9:.2f} GB/s)\n"
    )
    found = {name: figures_of(told) for name, told in turns.items()}
    head = ("engine", "blocks s", "x memcpy", "durable s", "x disk", "memory x state",
            "compute kept", "CPU s", "first s")  # fmt: skip
    keys = ("blocks_s", "blocks_to_copy", "durable_s", "durable_to_write", "extra_memory",
            "compute_kept", "cpu_s", "first_s")  # fmt: skip
    table(head, [(name, *(cell(row[key]) for key in keys)) for name, row in found.items()])
    print()
    bars: Bars = {}
    if OURS in found:
        ours = turns[OURS]
        memory = [
            (t.extra_memory_bytes - KEEPER_BYTES) / Outlast.arenas / t.size_bytes for t in ours
        ]
        bars = {
            "blocks / memcpy": (figure(found[OURS], "blocks_to_copy"), 1.10),
            "durable / O_DIRECT": (figure(found[OURS], "durable_to_write"), 1.4),
            "memory an arena / state": (round(median(memory), 2), 1.0),
            "compute taken while writing": (1 - figure(found[OURS], "compute_kept"), 0.15),
        }
        if BEST in found:
            pairs = zip(ours, turns[BEST], strict=True)
            ratio = median([one.durable_s / best.durable_s for one, best in pairs])
            bars[f"durable / {BEST}"] = (ratio, 0.6)
    figures = {"size_bytes": size, "copy_limit_s": copy_s, "write_limit_s": write_s}
    return figures | {"saves": found}, bars


def show_many(turns: Mapping[str, list[Turn]]) -> tuple[dict[str, Any], Bars]:
    """As `show_saves`, without bars: no limit of the machine says what a tensor must cost."""
    figures, _ = show_saves(turns)
    return {"many": figures["saves"], "many_size_bytes": figures["size_bytes"]}, {}


def show_adapters(told: Adapters) -> tuple[dict[str, Any], Bars]:
    print(f"{told.size_bytes / 1e9:.2f} GB, of which nine tenths are not trained\n")
    rows = zip(told.written_bytes, told.read_bytes, told.durable_s, strict=True)
    table(
        ("save", "written MB", "read back MB", "durable s"),
        [
            (str(save), cell(written / 1e6), cell(read / 1e6), cell(durable_s))
            for save, (written, read, durable_s) in enumerate(rows, start=1)
        ],
    )
    print()
    share = told.written_bytes[-1] / told.size_bytes
    bars: Bars = {"written of a state that is 0.1 trained": (round(share, 3), 0.12)}
    return {"adapters": msgspec.structs.asdict(told)}, bars


def measure_ranks(asked: Asked, only: str | None) -> tuple[dict[str, Any], Bars]:
    """Engines in turn, each with all ranks at once."""
    names = [name for name in TOGETHER if name in ENGINES and only in (None, name)]
    engines, taken = Engines(names), list[dict[str, Together]]()
    for turn in range(asked.rounds):
        words = (Path, asked.size_mb, asked.saves, WORLD)
        taken.append(
            engines.turn(
                lambda name, words=words: run(
                    Together, asked, "together", name, *words, limit_s=TURN_S
                )
            )
        )
        say(f"ranks {turn + 1}/{asked.rounds}")
    told = engines.of_all(taken)
    keys = ("blocks_s", "durable_s", "first_s")
    found = {
        name: {key: median([getattr(each, key) for each in turns]) for key in keys}
        for name, turns in told.items()
    }
    size = next(iter(told.values()))[0].size_bytes if told else 0
    print(f"{WORLD} ranks that all hold the same {size / 1e9:.2f} GB; the slowest rank's seconds\n")
    head = ("engine", "blocks s", "durable s", "first s")
    table(head, [(name, *(cell(row[key]) for key in keys)) for name, row in found.items()])
    print()
    return {"ranks": found, "ranks_size_bytes": size}, {}


def show_loads(told: Loading) -> tuple[dict[str, Any], Bars]:
    medians = {
        name: median(values)
        for name, values in msgspec.structs.asdict(told).items()
        if isinstance(values, list)
    }
    table(
        ("load into existing tensors", "cold s", "warm s", "verified"),
        [
            ("O_DIRECT read, the limit", cell(medians["read_limit"]), "", ""),
            (OURS, cell(medians["ours_cold"]), cell(medians["ours_warm"]), "yes"),
            ("DCP, two files", cell(medians["dcp_cold"]), cell(medians["dcp_warm"]), "no"),
            (f"{OURS}, engine alone", cell(medians["from_disk"]), "", "yes"),
            (f"{OURS}, from memory", cell(medians["from_memory"]), "", "yes"),
        ],
    )
    print()
    bars: Bars = {
        "loads with wrong values": (told.wrong, 0.0),
        "load cold / DCP": (_paired(told.ours_cold, told.dcp_cold), 1.15),
        "load warm / DCP": (_paired(told.ours_warm, told.dcp_warm), 1.15),
        "from memory / from disk": (_paired(told.from_memory, told.from_disk), 0.2),
    }
    return {"loads": medians}, bars


def show_loads_together(told: LoadingTogether) -> tuple[dict[str, Any], Bars]:
    """Show loads as `show_loads` does, of ranks that all hold the same. Bytes are bars, seconds the
    machine's."""
    rows = {
        f"{OURS}, each alone": told.alone,
        f"{OURS}, shared": told.shared,
        "DCP sync": told.dcp,
        f"{OURS}, each alone, 400 MB/s for all": told.slow_alone,
        f"{OURS}, shared, 400 MB/s for all": told.slow_shared,
    }
    print(f"{WORLD} ranks that all load the same {told.size_bytes / 1e9:.2f} GB, cold\n")

    def read(loads: Loads) -> float:
        return median(loads.from_disk_bytes) / told.size_bytes

    table(
        ("way", "seconds", "from the disk, x state"),
        [(name, cell(median(each.seconds)), cell(read(each))) for name, each in rows.items()],
    )
    print()
    bars: Bars = {
        "shared loads with wrong values": (told.wrong, 0.0),
        "read when shared / state": (round(read(told.shared), 2), 1.02),
        "slow directory, shared / alone": (_paired(told.slow_shared.seconds,
                                                   told.slow_alone.seconds), 0.6),
    }  # fmt: skip
    figures = {name: {"seconds": median(e.seconds), "read": read(e)} for name, e in rows.items()}
    return {"loads_together": figures}, bars


def measure_harm(asked: Asked, only: str | None) -> tuple[dict[str, Any], Bars]:
    names = [name for name in {**ENGINES, **IN_PLACE} if only in (None, name)]
    told: dict[str, Harm] = {}
    for name in names:
        told[name] = run(Harm, asked, "harm", name, Path, asked.flips, asked.kills, asked.seed)
        say(f"harm {name}")
    rows = [
        (
            name,
            f"{harm.noticed} of {harm.flips}" if harm.flips else "-",
            f"{harm.silent}" if harm.flips else "-",
            f"{harm.unloadable} of {harm.kills}" if harm.kills else "-",
        )
        for name, harm in told.items()
    ]
    print(f"seed {asked.seed}")
    table(("engine", "bit flips noticed", "let through", "killed while saving: unloadable"), rows)
    print()
    bars: Bars = {}
    if OURS in told:
        ours = told[OURS]
        bars["bit flips not noticed"] = (float(ours.flips - ours.noticed), 0.0)
        bars["unloadable after a kill"] = (float(ours.unloadable), 0.0)
    return {"harm": {name: msgspec.structs.asdict(harm) for name, harm in told.items()}}, bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=float, default=FULL_MB)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each engine")
    parser.add_argument("--saves", type=int, default=3, help="saves a turn, of each kind")
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--part", choices=PARTS, help="one part alone")
    parser.add_argument("--only", choices=list(ENGINES), help="one engine alone (not loads)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--many-mb", type=float, default=MANY_MB, help="in tensors of 4 KB")
    parser.add_argument("--ranks-mb", type=float, default=RANKS_MB, help="that each rank holds")
    parser.add_argument("--quick", action="store_true", help="small and once: that it works")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="outlast-bench-", dir=args.folder))
    asked = Asked(folder, args.size_mb, args.repeats, args.saves, args.flips, args.kills, args.seed)
    if args.quick:
        asked = asked._replace(size_mb=QUICK_MB, rounds=1, saves=2, flips=3, kills=2)
        args.many_mb, args.ranks_mb = min(args.many_mb, 12.0), min(args.ranks_mb, 60.0)
    names = [name for name in ENGINES if args.only in (None, name)]
    figures: dict[str, Any] = {"repeats": asked.rounds}
    bars: Bars = {}
    if args.part in (None, "saves"):
        _add(figures, bars, show_saves(measure_saves(asked, names)))
    if args.part in (None, "many"):
        small = asked._replace(size_mb=args.many_mb)
        _add(figures, bars, show_many(measure_saves(small, names, "many")))
    if args.part in (None, "adapters") and args.only in (None, OURS):
        words = ("adapters", Path, asked.size_mb, ADAPTERS_SAVES)
        _add(figures, bars, show_adapters(run(Adapters, asked, *words)))
    if args.part in (None, "ranks"):
        _add(figures, bars, measure_ranks(asked._replace(size_mb=args.ranks_mb), args.only))
    if args.part in (None, "loads") and not args.only:
        loading = run(Loading, asked, "loading", Path, asked.size_mb, asked.rounds)
        _add(figures, bars, show_loads(loading))
        words = (Path, args.ranks_mb, asked.rounds, WORLD)
        together = run(LoadingTogether, asked, "loading_together", *words)
        _add(figures, bars, show_loads_together(together))
    if args.part in (None, "harm"):
        _add(figures, bars, measure_harm(asked, args.only))
    shutil.rmtree(folder)
    return verdict("checkpoint", figures, bars)


def _add(figures: dict[str, Any], bars: Bars, found: tuple[dict[str, Any], Bars]) -> None:
    figures |= found[0]
    bars |= found[1]


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median([one / other for one, other in zip(ours, theirs, strict=True)])


def figure(row: Mapping[str, float | None], key: str) -> float:
    found = row[key]
    assert found is not None, key
    return found


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
