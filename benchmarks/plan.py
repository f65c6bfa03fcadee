"""How many failures a second does the simulator get through, beside SimPy; how quick are answers?

Engines take turns; medians. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from importlib.util import find_spec
from typing import NamedTuple

from harness import HERE, median, table, verdict
from planning.jobs import migrating, restarting

from outlast.config import child_environment
from outlast.plan.simulate.replications import ReplicationPart, run_part, simulate
from outlast.plan.simulate.simulated_job import SimulatedJob

FAILURES = 1_000_000  # about as many a turn
GPUS = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
SCENARIO = ("--gpus", "16384", "--cost", "30s")
COMMANDS = {  # and how many seconds they may take
    ("--help",): 0.2,
    ("interval", *SCENARIO): 0.4,
    ("compare", *SCENARIO): 5.0,
}


class Turn(NamedTuple):
    """`cpu_s` of one core, for so many failures; the time of a run over its work."""

    cpu_s: float
    failures: float
    slowdown: float

    def rate(self) -> float:
        return self.failures / self.cpu_s


def ours(one: SimulatedJob, replications: int, seed: int) -> Turn:
    began_s = time.process_time()
    rows = simulate(one, replications, seed=seed)
    cpu_s = time.process_time() - began_s
    return Turn(cpu_s, float(rows["failures"].sum()), float(rows["wall_s"].mean()) / one.work_s)


def simpys(
    model: Callable[[SimulatedJob, int], tuple[float, int]], one: SimulatedJob, seed: int
) -> Turn:
    began_s = time.process_time()
    wall_s, failures = model(one, seed)
    return Turn(time.process_time() - began_s, failures, wall_s / one.work_s)


def replications_for(one: SimulatedJob, failures: float = FAILURES) -> int:
    return max(1, round(failures / (one.nodes * one.node_rate * one.work_s)))


def engines() -> dict[tuple[str, str], Callable[[int], Turn]]:
    """By cluster and name: one turn of each, given a seed."""
    small, large = restarting(16_384, 54), migrating(1_000_000, 90)
    found: dict[tuple[str, str], Callable[[int], Turn]] = {
        ("16,384 GPUs, 54 days, restart", "outlast"): lambda seed: ours(small, 2000, seed),
        ("1M GPUs, 90 days, migrate", "outlast"): lambda seed: ours(large, 20, seed),
    }
    if find_spec("simpy"):
        from planning.simpy_job import aggregated, node_by_node

        short = migrating(1_000_000, 5)
        found |= {
            ("16,384 GPUs, 54 days, restart", "SimPy, one process"): (
                lambda seed: simpys(aggregated, small, seed)
            ),
            ("16,384 GPUs, 54 days, restart", "SimPy, a process a node"): (
                lambda seed: simpys(node_by_node, small, seed)
            ),
            ("1M GPUs, 90 days, migrate", "SimPy, one process"): (
                lambda seed: simpys(aggregated, short, seed)
            ),
        }
    return found


def in_processes(pool: ProcessPoolExecutor, one: SimulatedJob, replications: int) -> float:
    began_s = time.perf_counter()
    simulate(one, replications, executor=pool)
    return time.perf_counter() - began_s


def apart(pool: ProcessPoolExecutor, one: SimulatedJob, replications: int, processes: int) -> float:
    """The same with no queue between them: each process has its share in one part."""
    share = replications // processes
    began_s = time.perf_counter()
    shares = [
        pool.submit(run_part, ReplicationPart(one, 0, k * share, share)) for k in range(processes)
    ]
    wait(shares)
    return time.perf_counter() - began_s


class Two(NamedTuple):
    """Seconds with two processes over seconds with one; `limit`: what this machine allows two that
    share nothing but it."""

    ours: float
    limit: float


def two_to_one(repeats: int) -> Two:
    """The best of some turns, since whatever else runs takes from two more than from one."""
    one = migrating(1_000_000, 90)
    replications = replications_for(one, 15 * FAILURES)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as single, ProcessPoolExecutor(2, spawn) as double:
        for pool in (single, double):  # each of its processes has the compiled kernel then
            in_processes(pool, one, 40)
        turns = [
            (
                in_processes(single, one, replications), in_processes(double, one, replications),
                apart(single, one, replications, 1), apart(double, one, replications, 2),
            )
            for _ in range(repeats)
        ]  # fmt: skip
    one_s, two_s, one_apart_s, two_apart_s = (min(each) for each in zip(*turns, strict=True))
    return Two(two_s / one_s, two_apart_s / one_apart_s)


def ns_by_size(repeats: int) -> dict[int, float]:
    """Nanoseconds a failure, by GPUs, for jobs of 90 days."""
    jobs = {gpus: migrating(gpus, 90) for gpus in GPUS}
    turns = [
        {gpus: ours(one, replications_for(one), turn) for gpus, one in jobs.items()}
        for turn in range(repeats)
    ]
    return {gpus: median([1e9 / turn[gpus].rate() for turn in turns]) for gpus in GPUS}


def peak_mb(replications: int) -> float:
    """Of a process that simulates so many, and holds their rows."""
    command = [sys.executable, "-m", "planning.peak", str(replications)]
    found = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True)
    return float(found.stdout)


def answer_s(words: tuple[str, ...], repeats: int) -> float:
    """Of a cold process; its first run, which may compile, is not counted."""
    command = [sys.executable, "-m", "outlast", "plan", *words]
    environment = child_environment({"PYTHONDONTWRITEBYTECODE": ""})
    seconds: list[float] = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=environment)
        seconds.append(time.perf_counter() - began_s)
    return median(seconds[1:])


def take_turns(repeats: int) -> dict[tuple[str, str], list[Turn]]:
    engine = engines()
    for (_, name), turn in engine.items():
        if name == "outlast":
            turn(0)  # compiles, where nothing is cached
    turns: dict[tuple[str, str], list[Turn]] = {key: [] for key in engine}
    for number in range(1, repeats + 1):
        for key, turn in engine.items():
            turns[key].append(turn(number))
        print(f"{number}/{repeats}", file=sys.stderr, flush=True)
    rows = []
    for (cluster, name), done in turns.items():
        rate = median([turn.rate() for turn in done])
        ratios = [a.rate() / b.rate() for a, b in zip(turns[cluster, "outlast"], done, strict=True)]
        slowdown = sum(turn.slowdown for turn in done) / repeats
        rows.append((cluster, name, f"{rate:,.0f}", f"{median(ratios):,.0f}", f"{slowdown:.4f}"))
    table(("one core", "engine", "failures/s", "outlast is x times", "time / work"), rows)
    if not find_spec("simpy"):
        print("SimPy: skipped, not installed (pip install simpy)")
    print("AIReSim: skipped, not on PyPI")
    return turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    turns = take_turns(args.repeats)
    ns = ns_by_size(args.repeats)
    print()
    table(("GPUs, 90 days", "ns a failure"), [(f"{n:,}", f"{each:.0f}") for n, each in ns.items()])
    thousand = ours(migrating(1_000_000, 90), 1000, seed=1)
    peaks = {count: peak_mb(count) for count in (100, 10_000)}
    answers = {words: answer_s(words, args.repeats) for words in COMMANDS}
    rates = {" ".join(key): median([turn.rate() for turn in done]) for key, done in turns.items()}
    two = two_to_one(args.repeats)
    figures = {
        "repeats": args.repeats,
        "load_average": os.getloadavg()[0],
        "failures_per_s": rates,
        "ns_by_gpus": ns,
        "two_processes_times_one": 1 / two.ours,
        "two_processes_times_one_apart": 1 / two.limit,
        "peak_mb": peaks,
        "answers_s": {words[0]: each for words, each in answers.items()},
    }
    per_us = {cluster: 1e6 / rates[f"{cluster} outlast"] for cluster, _ in turns}
    limits_us = (0.2, 0.25)
    print(f"two processes that share nothing: {1 / two.limit:.2f} times one on this machine")
    bars = {
        **{
            f"µs a failure: {cluster}": (each, limit)
            for (cluster, each), limit in zip(per_us.items(), limits_us, strict=True)
        },
        "s: 1,000 replications, 1M GPUs, 90 days": (thousand.cpu_s, 15.0),
        "ns a failure: most / least of all sizes": (max(ns.values()) / min(ns.values()), 2.0),
        "s: two processes / one": (two.ours, 1 / 1.7),
        "MB: 10,000 replications more than 100": (peaks[10_000] - peaks[100], 8.0),
        **{f"s: outlast plan {of[0]}": (each, COMMANDS[of]) for of, each in answers.items()},
    }
    return verdict("plan", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
