"""Start four ranks and a spare; how long until all have reached their first phase?

Alternates starts with a template process and without; medians over pairs. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import NamedTuple

from harness import OUTLAST, bootstrap_ratio, job, load, median, table, verdict
from workload import WORLD

from outlast.events import LoopBegun, WorkerSpawned, WorkerWarm
from outlast.telemetry.event_store import read_events

SPARES = 1
VARIANTS = {"template": (), "no template": ("--no-template",)}


class Start(NamedTuple):
    """Seconds from the command until all ranks are in their loops (`ranks_s`), and until the spare
    is warm, too (`ready_s`); processor time of the whole job (`cpu_s`)."""

    ranks_s: float
    ready_s: float
    cpu_s: float


def start(flags: tuple[str, ...], steps: int) -> Start:
    """Run a job of small steps."""
    begin_ns, cpu_s = time.time_ns(), _cpu_s()
    command = (*OUTLAST, f"--spares={SPARES}", *flags)
    with job(command, "outlast_job.py", "--steps", steps, "--size", "10ms") as done:
        story = list(read_events(done.folder / "run"))
        begun = [event.t_ns for event in story if isinstance(event, LoopBegun)]
        seats = {event.worker: event.seat for event in story if isinstance(event, WorkerSpawned)}
        warm = [e.t_ns for e in story if isinstance(e, WorkerWarm) and seats[e.worker] < 0]
        if len(begun) != WORLD or len(warm) != SPARES:
            raise SystemExit(
                f"{len(begun)} ranks began, {len(warm)} spares were warm: give more --steps"
            )
        ranks_s, ready_s = ((max(ends) - begin_ns) / 1e9 for ends in (begun, begun + warm))
        return Start(ranks_s, ready_s, _cpu_s() - cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="until the spare is warm")
    args = parser.parse_args()
    runs: dict[str, list[Start]] = {name: [] for name in VARIANTS}
    for turn in range(args.repeats):
        for name, flags in VARIANTS.items():
            runs[name].append(start(flags, args.steps))
            took = f"{name} {runs[name][-1].ready_s:.2f} s"
            print(f"{turn + 1}/{args.repeats} {took}", file=sys.stderr, flush=True)
    rows = [
        (name, *(f"{median([run[column] for run in found]):.2f}" for column in range(3)))
        for name, found in runs.items()
    ]
    table((f"start of {WORLD} ranks and a spare", "ranks s", "spare too s", "job's CPU s"), rows)
    ratios = [
        bootstrap_ratio(*([run[column] for run in runs[name]] for name in reversed(VARIANTS)))
        for column in range(3)
    ]
    figures = {
        "load": load(),
        "runs": runs,
        "ratios": dict(zip(Start._fields, ratios, strict=True)),
    }
    bars = {"first phase, template / no template": (ratios[1].median, 0.5)}
    return verdict("start", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
