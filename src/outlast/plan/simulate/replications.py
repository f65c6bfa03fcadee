"""Replications of a job in parts, on any executor; ensembles of jobs with the same failures."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from contextlib import closing
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from outlast import __version__
from outlast.errors import OutlastError, UsageError
from outlast.plan.model.answer_values import CAUSES, HIGH, LOW, Quantity, Unit, at_rate
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import GOODPUT_MIN, at_other_rate
from outlast.plan.simulate.compiled_random import is_kept
from outlast.plan.simulate.simulated_job import (
    STATE,
    TALLIES,
    SimulatedJob,
    check_job,
    check_seed,
    fleet,
    parameters,
)
from outlast.plan.simulate.simulation_kernel import replicate
from outlast.process_pool import IN_FLIGHT, PartExecutor, ProcessPool, interruption
from outlast.theory import strategies

ROWS = np.dtype([(name, "f8") for name in TALLIES])
FAILURES_A_PART = 500_000  # some tenths of a second; Ctrl-C takes effect between parts
ROWS_A_PART = 4096  # half a megabyte
HEARD_S = 0.2
COMPILES = (
    "outlast: compiling the simulator takes some seconds, once; the result is cached beside the"
    " installed files, or in the user's cache"
)
ANY_JOB = SimulatedJob(
    work_s=1.0, interval_s=1.0, versions=1, step_s=0.0, memory_cost_s=0.0, cost_s=0.0, flush_s=0.0,
    nodes=1, spares=0, replicas=1, copies=0, window_s=0.0, node_rate=0.0, stay_share=0.0,
    lemons=0.0, lemon_factor=1.0, cure_share=0.0, software_rate=0.0, rack_rate=0.0, rack_nodes=1,
    shape=1.0, scale_s=0.0, age_s=0.0, repair_s=0.0, repair_shape=1.0, detect_s=0.0,
    restart_s=(0.0, 0.0, 0.0), software_from=0, node_from=0, drop=False, failures_max=1,
)  # fmt: skip
_log = logging.getLogger(__name__)
K = TypeVar("K")


class ReplicationPart(msgspec.Struct, frozen=True):
    """Replications `first` to `first + count` of a job. Raises UsageError for a bad seed."""

    job: SimulatedJob
    seed: int
    first: int
    count: int
    version: str = __version__

    def __post_init__(self) -> None:
        check_seed(self.seed)


def parts(job: SimulatedJob, replications: int, seed: int = 0) -> Iterator[ReplicationPart]:
    """Yield all replications in order, in parts whose size depends on the job alone.

    Raises UsageError naming the invalid field of `job`.
    """
    check_job(job, replications)
    size = int(FAILURES_A_PART / max(1.0, expected_failures(job)))
    size = min(max(1, size), ROWS_A_PART)
    return (
        ReplicationPart(job, seed, at, min(size, replications - at))
        for at in range(0, replications, size)
    )


def expected_failures(job: SimulatedJob) -> float:
    """Return a rough number of failures of a replication: a slow run takes twice its work."""
    rate = job.nodes * job.node_rate * (1 + job.lemons * (job.lemon_factor - 1))
    rate += job.software_rate + job.rack_rate * job.nodes / job.rack_nodes
    return min(job.failures_max, 2 * rate * job.work_s)


def run_part(part: ReplicationPart) -> np.ndarray:
    """Return a row of ROWS for each replication, on any machine with the same Outlast.

    Raises UsageError for another version.
    """
    if part.version != __version__:
        raise UsageError(f"requested by outlast {part.version}, but this worker has {__version__}")
    compile_once()
    out = np.empty((part.count, len(TALLIES)))
    job = part.job
    replicate(parameters(job), fleet(job), np.zeros(1, STATE)[0], part.seed, part.first, out)
    return out.view(ROWS)[:, 0]


def compile_once() -> None:
    """Compile the kernel with a message, or load it from the cache; once a process."""
    if replicate.signatures:  # pyright: ignore[reportFunctionMemberAccess]  # Numba's
        return
    if not is_kept(replicate):
        _log.warning(COMPILES)
    out = np.empty((0, len(TALLIES)))
    replicate(parameters(ANY_JOB), fleet(ANY_JOB), np.zeros(1, STATE)[0], 0, 0, out)


def results(
    wanted: Iterable[tuple[K, ReplicationPart]],
    executor: Executor | None = None,
    in_flight: int = IN_FLIGHT,
) -> Generator[tuple[K, ReplicationPart, np.ndarray | Exception], None, None]:
    """Yield the rows or the error of each part, in the order of `wanted`.

    `wanted` is read no further than `in_flight` parts ahead. Ctrl-C ends it between two parts (the
    second time at once), so that its results are complete: fewer parts than wanted mean that it was
    interrupted.
    """
    if isinstance(executor, ProcessPool):
        compile_once()  # or each of its processes would, at the same time
    source = iter(wanted)
    waiting: deque[tuple[K, ReplicationPart, Future[np.ndarray]]] = deque()
    with interruption() as interrupted:
        try:
            while True:
                ahead = 0 if interrupted() else (in_flight if executor else 1) - len(waiting)
                for key, part in islice(source, ahead):
                    waiting.append((key, part, _started(executor, part)))
                if not waiting:
                    return
                key, part, future = waiting[0]
                while not future.done() and not interrupted():
                    wait([future], timeout=HEARD_S)
                if not future.done():
                    return
                waiting.popleft()
                yield key, part, _ended(future)
        finally:
            for _, _, future in waiting:
                future.cancel()


def reason(error: Exception) -> str:
    """Return the error of a part as a sentence; our own errors are sentences already."""
    return str(error) if isinstance(error, OutlastError) else f"{type(error).__name__}: {error}"


def _started(executor: Executor | None, part: ReplicationPart) -> Future[np.ndarray]:
    here: Future[np.ndarray] = Future()
    try:
        if executor is not None:
            return executor.submit(run_part, part)
        here.set_result(run_part(part))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this part's end
        here.set_exception(error)
    return here


def _ended(future: Future[np.ndarray]) -> np.ndarray | Exception:
    try:
        return future.result(timeout=0)
    except BrokenExecutor:
        return OutlastError(
            "a worker process died (killed, possibly out of memory); try again with fewer --workers"
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this part's end
        return error


ROWS_MAX = 10_000_000  # 1.1 GB


def simulate(
    job: SimulatedJob,
    replications: int,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Return a row of ROWS for each replication, in order.

    `wall_s` is infinity for a run that has not finished within the job's `failures_max`. The same
    seed gives the same rows on any executor (None: this process), and the k-th replication of two
    jobs meets the same failures. `on_progress` receives the number of replications done. Ctrl-C
    ends it with a prefix of the replications.

    Raises UsageError naming the invalid field of `job`, and above ROWS_MAX replications.
    """
    if replications > ROWS_MAX:
        raise UsageError(
            f"replications: {replications:,} rows exceed the {ROWS_MAX:,} that memory may hold;"
            " outlast.plan.simulate.replications yields any number of them in parts"
        )
    done: list[np.ndarray] = []
    wanted = ((None, part) for part in parts(job, replications, seed))
    with closing(results(wanted, executor)) as ended:
        for _, _, rows in ended:
            if isinstance(rows, Exception):
                raise rows
            done.append(rows)
            on_progress(sum(map(len, done)))
    return np.concatenate(done) if done else np.empty(0, ROWS)


STRATA = 16
ROUNDS = 8  # rates in each stratum
RUNS_A_RATE = 64  # at most: then there are more rates
GOLDEN = (math.sqrt(5) - 1) / 2
ENSEMBLE_FAILURES_MAX = 20_000  # of a run; its progress by then is extrapolated
FAILURES = 4_000_000  # that some seconds simulate
# Runs in a stratum.
RUNS_MIN = 3
RUNS_MAX = 256
HERE = PartExecutor(None, 1)


class Draw(NamedTuple):
    """A drawn failure rate, as a scenario with it and relative to the mean rate.

    `runs` runs meet it, from `first` on.
    """

    scenario: Scenario
    factor: float
    first: int
    runs: int


class EnsembleRuns(msgspec.Struct, frozen=True):
    """Runs of one job, an entry each.

    `wall_s` is infinity where a run does not end; the seconds in `spent_s` (by CAUSES) are those
    simulated, and add up to wall where a run ended within FAILURES_MAX.
    """

    wall_s: np.ndarray
    failures: np.ndarray
    spent_s: np.ndarray
    capped: np.ndarray


class Ensemble(msgspec.Struct, frozen=True):
    """Runs of all jobs; the k-th runs meet the same failures, at the rate `draw_of[k]`."""

    draws: list[Draw]
    draw_of: np.ndarray
    runs: dict[Strategy, EnsembleRuns]
    interrupted: bool


def draws(scenario: Scenario, runs_a_stratum: int) -> list[Draw]:
    """Return equally likely rates, in rounds of one from each sixteenth of the distribution.

    The first rounds alone are therefore nearly representative.
    """
    rounds = max(min(runs_a_stratum, ROUNDS), math.ceil(runs_a_stratum / RUNS_A_RATE))
    runs = math.ceil(runs_a_stratum / rounds)
    parts: list[Draw] = []
    for number in range(rounds):
        inside = (0.5 + number * GOLDEN) % 1
        for stratum in range(STRATA):
            here = scenario
            if scenario.failures.weight_failures != EXACT:
                here = at_rate(scenario, (stratum + inside) / STRATA)
            factor = here.failures.per_gpu_s / scenario.failures.per_gpu_s
            parts.append(Draw(here, factor, len(parts) * runs, runs))
    return parts


def affordable(
    scenario: Scenario, tuned: Mapping[Strategy, strategies.RecoveryJob], work_s: float
) -> int:
    """Return the runs in a stratum that take some seconds, by theory's number of failures."""
    each = sum(
        min(ENSEMBLE_FAILURES_MAX, met.failures_per_s * work_s / max(met.goodput, GOODPUT_MIN))
        for draw in draws(scenario, 1)
        for name, job in tuned.items()
        for met in [at_other_rate(draw.scenario, name, job)]
    )
    count = min(RUNS_MAX, max(RUNS_MIN, int(FAILURES / max(1.0, each))))
    return count if count < ROUNDS else count - count % ROUNDS


def at_factor(job: SimulatedJob, factor: float) -> SimulatedJob:
    """Return the job with GPU and software failure rates times `factor`; racks keep theirs."""
    return job._replace(
        node_rate=job.node_rate * factor,
        software_rate=job.software_rate * factor,
        scale_s=job.scale_s / factor,
    )


def run_ensemble(
    jobs: Mapping[Strategy, SimulatedJob],
    of: list[Draw],
    *,
    seed: int = 0,
    place: PartExecutor = HERE,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Ensemble:
    """Simulate each of `jobs`, tuned for the mean rate, at each rate.

    `on_progress` receives the number of parts done, and of all. After Ctrl-C the result has the
    complete rounds. Raises UsageError naming the invalid field of a job.
    """
    for job in jobs.values():
        check_job(job)
    done: dict[Strategy, list[np.ndarray]] = {name: [] for name in jobs}
    whole = len(of) * len(jobs)
    with closing(results(_parts(jobs, of, seed), *place)) as ended:
        for number, (name, _, rows) in enumerate(ended, 1):
            if isinstance(rows, Exception):
                raise rows
            done[name].append(rows)
            on_progress(number, whole)
    finished = min(len(parts) for parts in done.values())
    kept = finished if finished == len(of) else finished // STRATA * STRATA
    return Ensemble(
        of[:kept],
        np.repeat(np.arange(kept), [part.runs for part in of[:kept]]),
        {
            name: of_rows(jobs[name], np.concatenate([*parts[:kept], np.empty(0, ROWS)]))
            for name, parts in done.items()
        },
        interrupted=finished < len(of),
    )


def band(name: str, unit: Unit, values: np.ndarray, source: str = "") -> Quantity:
    """Return the median of simulated values, with P5 and P95.

    Each is one of the values, not an interpolation, since some may be infinite.
    """
    low, middle, high = np.quantile(values, (LOW, 0.5, HIGH), method="inverted_cdf")
    return Quantity(
        name=name,
        value=float(middle),
        unit=unit,
        low=float(low),
        high=float(high),
        how="simulated",
        source=source,
    )


def _parts(
    jobs: Mapping[Strategy, SimulatedJob], of: list[Draw], seed: int
) -> Iterator[tuple[Strategy, ReplicationPart]]:
    for draw in of:
        for name, job in jobs.items():
            here = at_factor(job, draw.factor)._replace(failures_max=ENSEMBLE_FAILURES_MAX)
            yield name, ReplicationPart(here, seed, draw.first, draw.runs)


def of_rows(job: SimulatedJob, rows: np.ndarray) -> EnsembleRuns:
    """Summarise rows of a job that was ended after FAILURES_MAX failures."""
    names = ["done_s" if cause == "work" else f"{cause}_s" for cause in CAUSES]
    spent_s = np.stack([rows[name] for name in names])
    elapsed_s = spent_s.sum(axis=0)
    capped = np.isinf(rows["wall_s"])
    with np.errstate(divide="ignore"):
        scale = np.where(capped, job.work_s / rows["done_s"], 1.0)
    wall_s = np.where(capped, elapsed_s * scale, rows["wall_s"])
    wall_s[wall_s > job.work_s / GOODPUT_MIN] = math.inf
    return EnsembleRuns(wall_s, rows["failures"] * scale, spent_s, capped)
