"""Kill a rank every ten seconds; how much longer does the job take than undisturbed?

Alternates disturbed and undisturbed runs of the same job. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import NamedTuple

from harness import OUTLAST, Job, job, load, median, table, verdict
from workload import SIZES, WORLD

from outlast import events
from outlast.telemetry.event_store import read_events

FIRST_S = 20.0  # of the launcher's life: the ranks are in their loops then
GOODPUT = 0.92


class Stretch(NamedTuple):
    """Seconds between the first step that all ranks have committed and the last one.

    `recovery_s`: of these, as the run accounts for it: recoveries and redone work, mean of ranks.
    """

    seconds: float
    kills: int
    lost: int
    recovery_s: float


def stretch(steps: int, size: str, times_s: list[float], *, hot: bool) -> Stretch:
    """Run the job; a rank is killed at each of these seconds of the launcher's life, in turn."""
    faults = [f"--fault=kill:rank={n % WORLD},after={at_s:g}" for n, at_s in enumerate(times_s)]
    flags = ("--steps", steps, "--size", size, *(["--hot-spares"] if hot else []))
    with job((*OUTLAST, "--spares=1", *faults), "outlast_job.py", *flags) as done:
        story = read_events(done.folder / "run")
        kills = sum(isinstance(event, events.FaultInjected) for event in story)
        summary = json.loads((done.folder / "run" / "summary.json").read_bytes())
        buckets = summary["buckets_s"]
        return Stretch(
            _all_done_s(done, steps) - _all_done_s(done, 1),
            kills,
            summary["committed_steps_lost"],
            (buckets["recovery"] + buckets["lost"]) / WORLD,
        )


def _goodput(plain: Stretch, disturbed: Stretch, every_s: float) -> float:
    """Return the share of undisturbed time where kills go on for ever: those of a run end before
    its end."""
    if not disturbed.kills:
        return 1.0
    return 1 - (disturbed.seconds - plain.seconds) / disturbed.kills / every_s


def _all_done_s(done: Job, step: int) -> float:
    """Return when the last rank had committed the step."""
    first: dict[int, int] = {}
    for line in done.lines:
        if line.step == step:
            first.setdefault(line.rank, line.t_ns)
    if len(first) < WORLD:
        raise SystemExit(f"step {step} was not committed by every rank: see {done.folder}")
    return max(first.values()) / 1e9


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
        times_s: list[float] = []
        for name, found in runs.items():
            found.append(stretch(args.steps, args.size, times_s, hot=name == "hot"))
            if name == "undisturbed":  # a rank that is killed behind its last step ends the run
                kills = max(1, int(found[-1].seconds / args.every) - 1)
                times_s = [FIRST_S + number * args.every for number in range(kills)]
            took = f"{name} {found[-1].seconds:.1f} s, {found[-1].kills} kills"
            print(f"{turn + 1}/{args.repeats} {took}", file=sys.stderr, flush=True)
    rows, bars = [], {}
    for name, found in runs.items():
        goodput = median(
            [_goodput(*p, args.every) for p in zip(runs["undisturbed"], found, strict=True)]
        )
        seconds = f"{median([each.seconds for each in found]):.1f}"
        kills = sum(each.kills for each in found)
        own_s = f"{sum(each.recovery_s for each in found) / kills:.2f}" if kills else ""
        rows.append((name, seconds, str(kills), f"{goodput:.3f}", own_s))
        if name != "undisturbed":
            bars[f"{name} spare, disturbed / undisturbed"] = (1 / goodput, 1 / GOODPUT)
    bars["committed steps lost"] = (float(sum(r.lost for found in runs.values() for r in found)), 0)
    table((f"a kill every {args.every:g} s", "median s", "kills", "goodput", "recovery s"), rows)
    return verdict("chaos", {"load": load(), "runs": runs}, bars)


if __name__ == "__main__":
    sys.exit(main())
