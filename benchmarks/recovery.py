"""Kill a rank; how long until every rank has committed the step that it was in?

Alternates torchrun, a warm spare, and a respawn; medians. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys

from harness import OUTLAST, TORCHRUN, Job, job, median, table, verdict

from outlast import events
from outlast.telemetry.event_store import read_events

KILL_AT, STEPS, CHECKPOINT_EVERY = 13, 16, 5


def torchrun() -> tuple[float, float, float]:
    """(recovery, median step, one copy of the state) in seconds."""
    flags = ("--steps", STEPS, "--kill-at", KILL_AT, "--checkpoint-every", CHECKPOINT_EVERY)
    with job((*TORCHRUN, "--max-restarts=3"), "plain_job.py", *flags) as done:
        return done.back_s(KILL_AT), done.step_s(), done.figures["copy_s"]


def outlast(spares: int) -> tuple[float, float, float, int]:
    """(recovery, median step, the joiner's build and dry steps) in seconds, and steps lost."""
    command = (*OUTLAST, f"--spares={spares}")
    with job(command, "outlast_job.py", "--steps", STEPS, "--kill-at", KILL_AT) as done:
        return done.back_s(KILL_AT), done.step_s(), _build_s(done), _steps_lost(done)


def _build_s(done: Job) -> float:
    """What the joiner does before its first step: the script's set-up, and its dry steps."""
    story = read_events(done.folder / "run")
    ready = next(event for event in story if isinstance(event, events.JoinerReady))
    seated = next(
        event
        for event in story
        if isinstance(event, events.WorkerSeated) and event.worker == ready.worker
    )
    dry = [e for e in story if isinstance(e, events.DrySteps) and e.worker == ready.worker]
    dry_ns = sum(event.t_ns - event.t_begin_ns for event in dry)
    return (ready.t_ns - seated.t_ns + dry_ns) / 1e9


def _steps_lost(done: Job) -> int:
    """Committed steps that any rank had to commit again."""
    seen = [(line.rank, line.step) for line in done.lines]
    return len(seen) - len(set(seen))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("torchrun", "outlast"), help="one side alone")
    args = parser.parse_args()
    old: list[tuple[float, float, float]] = []
    warm: list[tuple[float, float, float, int]] = []
    cold: list[tuple[float, float, float, int]] = []
    for turn in range(args.repeats):
        if args.only != "outlast":
            old.append(torchrun())
        if args.only != "torchrun":
            warm.append(outlast(spares=1))
            cold.append(outlast(spares=0))
        print(f"{turn + 1}/{args.repeats}", file=sys.stderr, flush=True)
    rows = []
    for name, runs in (("torchrun", old), ("warm spare", warm), ("respawn", cold)):
        seconds = [run[0] for run in runs]
        if runs:
            step_s = median([run[1] for run in runs])
            spread = f"{min(seconds):.2f} .. {max(seconds):.2f}"
            rows.append((name, f"{median(seconds):.2f}", spread, f"{step_s:.3f}"))
    table(("after SIGKILL of rank 1 of 4", "median s", "range", "step s"), rows)
    if args.only:
        return 0
    return judge(old, warm, cold)


def judge(
    old: list[tuple[float, float, float]],
    warm: list[tuple[float, float, float, int]],
    cold: list[tuple[float, float, float, int]],
) -> int:
    """Medians against the bars."""
    torchrun_s, warm_s, cold_s = (median([run[0] for run in runs]) for runs in (old, warm, cold))
    step_s, build_s = median([r[1] for r in warm]), median([r[2] for r in warm])
    copy_s = median([r[2] for r in old])
    figures = {
        "repeats": len(warm),
        "torchrun_s": torchrun_s,
        "warm_spare_s": warm_s,
        "respawn_s": cold_s,
        "step_s": step_s,
        "joiner_build_and_dry_steps_s": build_s,
        "state_copy_s": copy_s,
        "warm_to_torchrun": warm_s / torchrun_s,
        "respawn_to_torchrun": cold_s / torchrun_s,
    }
    bars = {
        "committed steps lost": (float(sum(r[3] for r in warm + cold)), 0.0),
        "warm spare, s": (warm_s, build_s + 2 * step_s + copy_s + 0.2),
        "warm spare / torchrun": (figures["warm_to_torchrun"], 1 / 4),
        "respawn / torchrun": (figures["respawn_to_torchrun"], 1 / 2),
    }
    return verdict("recovery", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
