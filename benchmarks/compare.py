"""The same job and the same faults under Outlast and its rivals; see docs/compare.md.

Needs the packages of benchmarks/rivals/requirements.txt: `make compare` installs them into an
environment of their own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from harness import Spread, bootstrap_ratio, load, spread, table, verdict
from matplotlib.figure import Figure
from rivals.paces import Block, alternate
from rivals.systems import PLAIN, SYSTEMS, System
from rivals.trial import SIGNALS, Fault, Reference, Trial, faults, run_trial

from outlast import figure_style

OURS = ("Outlast", "Outlast, tuned")
LIMIT_S = {"": 300.0, "kill": 60.0, "stop": 60.0}
CLOCKS = ("wall_s", "cpu_s")
Trials = dict[str, list[Trial]]
Blocks = dict[str, list[Block]]


def turn(
    systems: list[System], fault: Fault | None, reference: Reference | None, found: Trials
) -> Reference | None:
    """Run each system once with the same fault; return what the plain script has trained."""
    for system in systems:
        kind = fault.kind if fault else ""
        trial, trained = run_trial(system, fault, reference, LIMIT_S[kind])
        found[system.name].append(trial)
        if system.name == PLAIN and reference is None:
            reference = trained
        took = f"{trial.next_commit_s:.2f} s to the next commit" if trial.next_commit_s else "-"
        print(f"{kind or 'undisturbed'}: {system.name}: {took}; {trial.end}", file=sys.stderr)
    return reference


def seconds(values: list[float | None]) -> str:
    """Return a median with its range; how often it never came to that."""
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    figure = spread(known)
    missing = f", {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{figure.median:.2f} ({figure.low:.2f} to {figure.high:.2f}{missing})"


def overhead(below: list[Block], above: list[Block], clock: str) -> Spread:
    """Return the steps of one system over those of another, turn by turn."""
    pairs = ([getattr(block, clock) for block in blocks] for blocks in (below, above))
    return bootstrap_ratio(*pairs)


def show(systems: list[System], runs: dict[str, Trials], blocks: Blocks) -> None:
    """Print a table for each kind of fault, and one of what a user must do and what steps cost."""
    for kind, found in runs.items():
        rows = []
        for system in systems:
            trials = found[system.name]
            differences = [t.difference_max for t in trials if t.difference_max is not None]
            rows.append(
                (
                    system.name,
                    seconds([t.next_commit_s for t in trials]),
                    seconds([t.regained_s for t in trials]),
                    str(max(t.redone for t in trials)),
                    f"{max(t.samples_lost for t in trials)}, "
                    f"{max(t.samples_repeated for t in trials)}",
                    f"{max(differences):.2g}" if differences else "unknown",
                    "; ".join(dict.fromkeys(t.end for t in trials)),
                )
            )
        print(f"\nfault: {kind or 'none'}\n")
        head = ("system", "next commit, s", "broken step, s", "commits redone",
                "samples lost, twice", "weights differ by", "ended by")  # fmt: skip
        table(head, rows)
    rows = []
    for system in systems:
        added, removed = system.lines_changed()
        commands = system.commands(Path("FOLDER"), ())
        mine, plain = blocks.get(system.name), blocks.get(PLAIN)
        ratios = [overhead(plain, mine, clock) for clock in CLOCKS] if mine and plain else []
        rows.append(
            (
                system.name,
                system.version(),
                *(f"{r.median:.3f} ({r.low:.3f} to {r.high:.3f})" for r in ratios),
                *([""] * (len(CLOCKS) - len(ratios))),
                f"+{added} -{removed}",
                str(len(commands)),
            )
        )
    print()
    table(("system", "version", "step", "processor time", "lines", "commands"), rows)


def judge(systems: list[System], runs: dict[str, Trials], blocks: Blocks) -> int:
    """Compare the medians with the bars."""
    rivals = [s.name for s in systems if s.name not in (*OURS, PLAIN)]
    bars: dict[str, tuple[float, float]] = {}
    for name in OURS if runs else ():
        wrong = sum(not t.is_equal for found in runs.values() for t in found[name])
        bars[f"{name}: runs that lost, repeated or differ"] = (float(wrong), 0.0)
    if kills := runs.get("kill"):
        best_s = min(
            statistics.median([t.next_commit_s or math.inf for t in kills[name]]) for name in rivals
        )
        for name in OURS:
            back_s = statistics.median([t.regained_s or math.inf for t in kills[name]])
            bars[f"{name}: broken step / next commit of the best rival"] = (back_s / best_s, 0.5)
    if blocks:
        wall = {name: overhead(blocks[PLAIN], blocks[name], "wall_s").median for name in rivals}
        cheapest = min(rivals, key=lambda name: wall[name])
        ratio = overhead(blocks[cheapest], blocks[OURS[0]], "wall_s")
        name = f"undisturbed step over that of {cheapest} ({ratio.low:.3f} to {ratio.high:.3f})"
        bars[f"Outlast: {name}"] = (ratio.median, 1.0)
    script = next(s for s in systems if s.name == OURS[0])
    bars["Outlast: lines added"] = (float(script.lines_changed()[0]), 6.0)
    figures: dict[str, Any] = {
        "load": load(),
        "blocks": {name: [b._asdict() for b in found] for name, found in blocks.items()},
        "trials": {kind: {n: [t._asdict() for t in ts] for n, ts in found.items()}
                   for kind, found in runs.items()},
    }  # fmt: skip
    return verdict("compare", figures, bars)


def draw(path: Path, systems: list[System], kills: Trials) -> None:
    """Draw each recovery as a point: time to the next commit, and until the broken step is back."""

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for place, system in enumerate(reversed(systems)):
            colour = "#0072B2" if system.name in OURS else "#555555"
            for what, marker in (("next_commit_s", "|"), ("regained_s", "o")):
                known = [v for t in kills[system.name] if (v := getattr(t, what)) is not None]
                axes.plot(known, [place] * len(known), marker, color=colour, alpha=0.8)
        axes.set_yticks(range(len(systems)), [system.name for system in reversed(systems)])
        axes.set_xscale("log")
        axes.set_xticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("seconds from SIGKILL: | next commit, ● broken step back on all ranks")
        axes.grid(axis="x", linewidth=0.3)

    figure_style.save(path, fill, height_inch=2.8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--turns", type=int, default=5, help="runs of each system with a SIGKILL")
    parser.add_argument("--stops", type=int, default=1, help="runs of each with a SIGSTOP")
    parser.add_argument("--paces", type=int, default=20, help="turns of 20 undisturbed steps")
    parser.add_argument("--seed", type=int, default=0, help="draws rank, step and time of faults")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--figure", type=Path, help="an .svg or .png of the recoveries")
    args = parser.parse_args()
    systems = [s for s in SYSTEMS if s.name in (*args.only, PLAIN)]
    runs: dict[str, Trials] = {}
    reference = None
    if args.turns + args.stops:
        runs[""] = {s.name: [] for s in systems}
        reference = turn(systems, None, None, runs[""])
    for kind, count in zip(SIGNALS, (args.turns, args.stops), strict=True):
        if not count:
            continue
        runs[kind] = {s.name: [] for s in systems}
        for at, fault in enumerate(faults(kind, args.seed, count)):
            turned = systems[at % len(systems) :] + systems[: at % len(systems)]
            turn(turned, fault, reference, runs[kind])
    blocks = alternate(systems, args.paces) if args.paces else {}
    show(systems, runs, blocks)
    if args.figure and args.turns:
        draw(args.figure, systems, runs["kill"])
    return judge(systems, runs, blocks) if set(OURS) < set(args.only) else 0


if __name__ == "__main__":
    sys.exit(main())
