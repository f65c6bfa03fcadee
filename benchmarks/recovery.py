"""Kill a rank; how long until every rank has committed the step that it was in?

Alternates torchrun and the ways in which Outlast replaces a rank; medians. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from harness import OUTLAST, TORCHRUN, Job, Place, Spread, job, load, median, spread, table, verdict

from outlast import events
from outlast.telemetry.event_store import read_events

KILL_AT, STEPS, CHECKPOINT_EVERY = 13, 16, 5
RANK = 1  # that is killed
COPIES = ("--snapshot-every=1", "--copies=2")


class Variant(NamedTuple):
    """A way to recover: flags of the launcher, and how the model is divided. `shrinks`: the others
    go on without the rank."""

    flags: tuple[str, ...]
    parallel: str = "ddp"
    hot: bool = False
    shrinks: bool = False


VARIANTS = {
    "warm spare": Variant(("--spares=1",)),
    "hot spare": Variant(("--spares=1",), hot=True),
    "respawn": Variant(("--spares=0",)),
    "respawn, no template": Variant(("--spares=0", "--no-template")),
    "fewer ranks": Variant(("--spares=0", "--policy=torchft-like"), shrinks=True),
    "warm spare, compiled": Variant(("--spares=1",), "compiled"),
    "hot spare, compiled": Variant(("--spares=1",), "compiled", hot=True),
    "warm spare, HSDP": Variant(("--spares=1",), "hsdp"),
    "hot spares, HSDP": Variant(("--spares=2",), "hsdp", hot=True),  # one for each shard
    "warm spare, FSDP2, copies in memory": Variant(("--spares=1", *COPIES), "fsdp"),
}
TORCHRUN_NAME = "torchrun"
CPU, SIZE = Place(), "400ms"


class Recovery(NamedTuple):
    """One recovery. `build_s`: the joiner's set-up and dry steps; `lost`: committed steps that
    some rank had to commit again."""

    back_s: float
    step_s: float
    build_s: float = 0.0
    copy_s: float = 0.0
    lost: int = 0


def torchrun(place: Place = CPU, size: str = SIZE) -> Recovery:
    """Measure a restart of all ranks from a checkpoint, and one copy of the state."""
    flags = ("--checkpoint-every", CHECKPOINT_EVERY, *_flags(place, size))
    with job((*place.argv(TORCHRUN), "--max-restarts=3"), "plain_job.py", *flags) as done:
        copy_s = done.figures["copy_s"]
        return Recovery(done.back_s(KILL_AT), done.step_s(), copy_s=copy_s, lost=_lost(done))


def outlast(variant: Variant, place: Place = CPU, size: str = SIZE) -> Recovery:
    """Measure the replacement of one rank."""
    flags = ("--parallel", variant.parallel, *_flags(place, size))
    hot = ("--hot-spares",) if variant.hot else ()
    with job((*place.argv(OUTLAST), *variant.flags), "outlast_job.py", *flags, *hot) as done:
        back_s = done.back_s(KILL_AT, without=RANK if variant.shrinks else None)
        return Recovery(back_s, done.step_s(), _build_s(done), lost=_lost(done))


def _flags(place: Place, size: str) -> tuple[object, ...]:
    return ("--steps", STEPS, "--kill-at", KILL_AT, "--size", size, "--device", place.device)


def _build_s(done: Job) -> float:
    """Return the time of the joiner before its first step: the script's set-up, and dry steps."""
    story = read_events(done.folder / "run")
    ready = next((event for event in story if isinstance(event, events.JoinerReady)), None)
    if ready is None:
        return 0.0
    seated = next(
        event
        for event in story
        if isinstance(event, events.WorkerSeated) and event.worker == ready.worker
    )
    dry = [e for e in story if isinstance(e, events.DrySteps) and e.worker == ready.worker]
    dry_ns = sum(event.t_ns - event.t_begin_ns for event in dry)
    return (ready.t_ns - seated.t_ns + dry_ns) / 1e9


def _lost(done: Job) -> int:
    seen = [(line.rank, line.step) for line in done.lines]
    return len(seen) - len(set(seen))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = (TORCHRUN_NAME, *VARIANTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    runs: dict[str, list[Recovery]] = {name: [] for name in names if name in args.only}
    for turn in range(args.repeats):
        for name, found in runs.items():
            found.append(torchrun() if name == TORCHRUN_NAME else outlast(VARIANTS[name]))
            took = f"{name} {found[-1].back_s:.2f} s"
            print(f"{turn + 1}/{args.repeats} {took}", file=sys.stderr, flush=True)
    rows, medians = [], {}
    for name, found in runs.items():
        back = spread([each.back_s for each in found])
        medians[name] = back
        rows.append(
            (
                name,
                f"{back.median:.2f}",
                f"{back.low:.2f} to {back.high:.2f}",
                f"{median([each.step_s for each in found]):.3f}",
                str(sum(each.lost for each in found)),
            )
        )
    table(("after SIGKILL of rank 1 of 4", "median s", "range", "step s", "steps lost"), rows)
    return judge(runs, medians)


def judge(runs: dict[str, list[Recovery]], medians: dict[str, Spread]) -> int:
    """Compare the medians with the bars of all that was run."""
    figures: dict[str, object] = {"load": load(), "medians_s": medians}
    bars: dict[str, tuple[float, float]] = {}
    replaced = [run for name, found in runs.items() if name != TORCHRUN_NAME for run in found]
    if replaced:
        bars["committed steps lost"] = (float(sum(run.lost for run in replaced)), 0.0)
    warm_s = medians["warm spare"].median if "warm spare" in medians else None
    respawn_s = medians["respawn"].median if "respawn" in medians else None
    if warm_s and respawn_s:
        bars["respawn / warm spare"] = (respawn_s / warm_s, 1.3)
    if TORCHRUN_NAME in runs:
        torchrun_s = medians[TORCHRUN_NAME].median
        copy_s = median([run.copy_s for run in runs[TORCHRUN_NAME]])
        figures["state_copy_s"] = copy_s
        for name in [n for n in runs if n == "warm spare" or (n in VARIANTS and VARIANTS[n].hot)]:
            found, is_hot = runs[name], VARIANTS[name].hot
            build_s = 0.0 if is_hot else median([run.build_s for run in found])
            step_s = median([run.step_s for run in found])
            bars[f"{name}, s"] = (medians[name].median, build_s + 2 * step_s + copy_s + 0.2)
        for name in [n for n in runs if n in VARIANTS and VARIANTS[n].shrinks]:
            step_s = median([run.step_s for run in runs[name]])
            bars[f"{name}, s"] = (medians[name].median, 2 * step_s + 0.2)
        for name in [n for n in runs if n in {"warm spare", "respawn"}]:
            bars[f"{name} / torchrun"] = (medians[name].median / torchrun_s, 1 / 5)
    return verdict("recovery", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
