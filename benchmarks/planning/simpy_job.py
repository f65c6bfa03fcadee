"""The simulator's job in SimPy, in the two ways in which people write it."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import simpy  # pyright: ignore[reportMissingImports]

from outlast.plan.simulate.simulated_job import STORAGE, SimulatedJob

Model = Callable[[SimulatedJob, int], tuple[float, int]]  # a job and a seed: seconds, and failures


def aggregated(job: SimulatedJob, seed: int) -> tuple[float, int]:
    """One process for the job, whose failures come at the rate of all nodes; one for each repair;
    where it stands is computed, as in ours."""
    clock, chance = simpy.Environment(), random.Random(seed)
    spares = simpy.Container(clock, job.nodes + job.spares, job.spares)
    rate, recovery_s = job.nodes * job.node_rate, job.detect_s + job.restart_s[job.node_from]
    cycle_s = job.interval_s + job.cost_s
    failures = 0

    def repair() -> Generator[Any, Any, None]:
        yield clock.timeout(chance.expovariate(1 / job.repair_s))
        yield spares.put(1)

    def run() -> Generator[Any, Any, None]:
        nonlocal failures
        whole_s = job.work_s / job.interval_s * cycle_s
        at_s = 0.0  # where a job that never failed would stand here
        while True:
            next_s = chance.expovariate(rate)
            yield clock.timeout(min(next_s, whole_s - at_s))
            if next_s >= whole_s - at_s:
                return
            at_s += next_s
            if job.node_from == STORAGE:
                at_s -= at_s % cycle_s
            next_s = 0.0
            while next_s < recovery_s:
                failures += 1
                clock.process(repair())
                yield spares.get(1)
                next_s = chance.expovariate(rate)
                yield clock.timeout(min(next_s, recovery_s))

    clock.run(clock.process(run()))
    return clock.now, failures


def node_by_node(job: SimulatedJob, seed: int) -> tuple[float, int]:
    """One process for each seat, which interrupts the job's; each save is an event; there are
    always spares. For a job that restarts from its last save."""
    clock, chance = simpy.Environment(), random.Random(seed)
    recovery_s = job.detect_s + job.restart_s[STORAGE]
    failures = 0

    def seat() -> Generator[Any, Any, None]:
        nonlocal failures
        while True:
            yield clock.timeout(chance.expovariate(job.node_rate))
            failures += 1
            running.interrupt()

    def recover() -> Generator[Any, Any, None]:
        up = False
        while not up:
            try:
                yield clock.timeout(recovery_s)
                up = True
            except simpy.Interrupt:
                pass

    def run() -> Generator[Any, Any, None]:
        done_s = 0.0
        while done_s < job.work_s:
            try:
                yield clock.timeout(job.interval_s + job.cost_s)
                done_s += job.interval_s
            except simpy.Interrupt:
                yield from recover()

    running = clock.process(run())
    for _ in range(job.nodes):
        clock.process(seat())
    clock.run(running)
    return clock.now, failures
