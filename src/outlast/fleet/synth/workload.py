"""What users ask for: when, how many nodes, for how long, and how it ends if nothing breaks."""

from __future__ import annotations

import numpy as np

from outlast.fleet.synth.shapes import GPUS, Shape, Size
from outlast.log_records import JOB_STATES, JobState

CODE: dict[JobState, int] = {state: code for code, state in enumerate(JOB_STATES)}
LOW, NORMAL, HIGH = range(3)
QOS = ("low", "normal", "high")
_BY_HOUR = np.array([2.0] * 8 + [5, 7, 8, 8, 7, 8, 8, 8, 7, 6, 5, 4, 4, 3, 3, 2])
SHORTEST_S = 10.0


class Job:
    """One job of whole nodes, or (`lanes` GPUs wide) a node that is shared by smaller ones."""

    __slots__ = ("attempts", "excluded", "lanes", "left_s", "loops", "number", "outcome", "qos",
                 "requeues", "run", "size", "submit_s")  # fmt: skip

    def __init__(
        self, number: int, submit_s: float, size: int, left_s: float, qos: int, outcome: int
    ) -> None:
        self.number = number
        self.run = number  # the number of the first job of the same run
        self.submit_s = submit_s
        self.size = size  # nodes
        self.left_s = left_s  # of work
        self.qos = qos
        self.outcome = outcome  # a code of JOB_STATES
        self.requeues = 0  # so often it asks to begin anew
        self.loops = 0  # so many attempts crash soon after they began
        self.lanes = 0
        self.attempts = 0
        self.excluded: frozenset[int] = frozenset()


def mean_s(shape: Shape, size: Size) -> float:
    """How long jobs of a size work, in the mean."""
    gpu_s_a_day = GPUS * shape.nodes * shape.utilization * 86400.0
    return gpu_s_a_day * size.gpu_time / (shape.jobs_a_day * size.jobs * size.gpus)


def works_s(shape: Shape, mean: float, many: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal with that mean, none above the limit of the cluster (the mean is kept)."""
    sigma = shape.work_sigma
    normal = np.random.default_rng(0).standard_normal(20_000)
    scale = mean * np.exp(-(sigma**2) / 2)
    for _ in range(20):  # until what the limit cuts off is made good
        cut = np.clip(scale * np.exp(sigma * normal), SHORTEST_S, shape.limit_s).mean()
        scale *= mean / cut
    drawn = scale * np.exp(sigma * rng.standard_normal(many))
    return np.clip(drawn, SHORTEST_S, shape.limit_s)


def arrivals_s(many: int, since_s: float, until_s: float, rng: np.random.Generator) -> np.ndarray:
    """Sorted times, more of them in working hours."""
    days = rng.integers(int(since_s // 86400), max(1, int(np.ceil(until_s / 86400))), many)
    hours = rng.choice(24, many, p=_BY_HOUR / _BY_HOUR.sum())
    drawn = np.floor(days * 86400.0 + hours * 3600.0 + rng.uniform(0, 3600.0, many))
    return np.sort(drawn[drawn < until_s])


def outcomes(shape: Shape, many: int, rng: np.random.Generator) -> np.ndarray:
    """How last attempts end, as codes of JOB_STATES."""
    chances: dict[JobState, float] = {
        "COMPLETED": shape.completed, "FAILED": shape.failed, "TIMEOUT": shape.timeout,
        "OUT_OF_MEMORY": shape.oom,
    }  # fmt: skip
    chances["CANCELLED"] = max(0.0, 1 - sum(chances.values()))
    codes = np.array([CODE[state] for state in chances])
    shares = np.array(list(chances.values()))
    return rng.choice(codes, many, p=shares / shares.sum())


def whole_node_jobs(
    shape: Shape, since_s: float, until_s: float, lemons: dict[int, float],
    rng: np.random.Generator,
) -> list[Job]:  # fmt: skip
    """Of all sizes from a node on, by submit time, numbered from 0. Who excludes nodes knows of
    lemons, or thinks so."""
    parts: list[np.ndarray] = []
    for size in shape.sizes:
        if size.gpus < GPUS:
            continue
        expected = shape.jobs_a_day * size.jobs * (until_s - since_s) / 86400
        submit_s = arrivals_s(int(rng.poisson(expected)), since_s, until_s, rng)
        many = len(submit_s)
        high = rng.random(many) < size.high
        qos = np.where(high, HIGH, np.where(rng.random(many) < 0.4, LOW, NORMAL))
        part = np.stack((
            submit_s, np.full(many, size.gpus // GPUS, float),
            works_s(shape, mean_s(shape, size), many, rng), qos, outcomes(shape, many, rng),
            rng.random(many) < shape.requeued, rng.random(many) < shape.excluding,
        ))  # fmt: skip
        parts.append(part)
    columns = np.concatenate([np.zeros((7, 0)), *parts], axis=1)
    order = np.argsort(columns[0], kind="stable")
    jobs = []
    for number, row in enumerate(columns.T[order].tolist()):
        submit_s, nodes, work_s, qos, outcome, again, excluding = row
        left_s = max(SHORTEST_S, work_s - shape.restart_s)
        job = Job(number, submit_s, int(nodes), left_s, int(qos), int(outcome))
        job.requeues = int(again)
        if excluding:
            job.excluded = _excluded(shape, lemons, rng)
        jobs.append(job)
    return jobs


def _excluded(shape: Shape, lemons: dict[int, float], rng: np.random.Generator) -> frozenset[int]:
    """One to three nodes: as often as not a lemon, else any."""
    known = list(lemons) if lemons and rng.random() < 0.5 else range(shape.nodes)
    many = min(int(rng.integers(1, 4)), len(known))
    return frozenset(int(node) for node in rng.choice(known, many, replace=False))
