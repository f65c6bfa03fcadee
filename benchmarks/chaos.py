"""Kill a rank every ten seconds; how much longer does the job take than undisturbed?

Alternates disturbed and undisturbed runs of the same job. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from harness import OUTLAST, Job, job, load, median, table, verdict
from workload import SIZES, WORLD

from outlast import events
from outlast.telemetry.event_store import read_events

KILLS_MAX = 60
FIRST_S = 10.0  # of the launcher's life: the first ranks are in their loops then
GOODPUT = 0.92


class Stretch(NamedTuple):
    """Seconds between the first step that all ranks have committed and the last one."""

    seconds: float
    kills: int
    lost: int


def stretch(steps: int, size: str, every_s: float, *, hot: bool) -> Stretch:
    """Run the job with a kill every `every_s` seconds, ranks in turn; 0: undisturbed."""
    times = [FIRST_S + number * every_s for number in range(KILLS_MAX)] if every_s else []
    faults = [f"--fault=kill:rank={n % WORLD},after={at_s:g}" for n, at_s in enumerate(times)]
    flags = ("--steps", steps, "--size", size, *(["--hot-spares"] if hot else []))
    with job((*OUTLAST, "--spares=1", *faults), "outlast_job.py", *flags) as done:
        story = read_events(done.folder / "run")
        kills = sum(isinstance(event, events.FaultInjected) for event in story)
        return Stretch(_all_done_s(done, steps) - _all_done_s(done, 1), kills, _lost(done))


def _all_done_s(done: Job, step: int) -> float:
    """Return when the last rank had committed the step."""
    first: dict[int, int] = {}
    for line in done.lines:
        if line.step == step:
            first.setdefault(line.rank, line.t_ns)
    if len(first) < WORLD:
        raise SystemExit(f"step {step} was not committed by every rank: see {done.folder}")
    return max(first.values()) / 1e9


def _lost(done: Job) -> int:
    seen = [(line.rank, line.step) for line in done.lines]
    return len(seen) - len(set(seen))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--size", choices=SIZES, default="10ms")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--spares", nargs="+", choices=("warm", "hot"), default=("warm", "hot"))
    args = parser.parse_args()
    names = ("undisturbed", *args.spares)
    runs: dict[str, list[Stretch]] = {name: [] for name in names}
    for turn in range(args.repeats):
        for name, found in runs.items():
            every_s = 0.0 if name == "undisturbed" else args.every
            found.append(stretch(args.steps, args.size, every_s, hot=name == "hot"))
            took = f"{name} {found[-1].seconds:.1f} s, {found[-1].kills} kills"
            print(f"{turn + 1}/{args.repeats} {took}", file=sys.stderr, flush=True)
    plain = runs["undisturbed"]
    rows, bars = [], {}
    for name, found in runs.items():
        goodputs = [a.seconds / b.seconds for a, b in zip(plain, found, strict=True)]
        seconds = f"{median([each.seconds for each in found]):.1f}"
        kills = sum(each.kills for each in found)
        rows.append((name, seconds, str(kills), f"{median(goodputs):.3f}"))
        if name != "undisturbed":
            bars[f"{name} spare, disturbed / undisturbed"] = (1 / median(goodputs), 1 / GOODPUT)
    bars["committed steps lost"] = (float(sum(r.lost for found in runs.values() for r in found)), 0)
    table((f"a kill every {args.every:g} s", "median s", "kills", "goodput"), rows)
    return verdict("chaos", {"load": load(), "runs": runs}, bars)


if __name__ == "__main__":
    sys.exit(main())
