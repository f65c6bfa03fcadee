"""Shapes of synthetic clusters: sizes, shares, and failure rates by node, cause and time.

The paper is Kokolis et al. 2025 (arXiv 2410.21680), sections II and III. Values that it only shows
in figures (GPU time by job size, frequency of each cause) are read off roughly; its sums hold: more
than 66 % (RSC-2: 52 %) of the GPU time in jobs of 256 GPUs and more, more than 90 % of the jobs and
less than 10 % of the GPU time in those of a server and less.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from outlast.errors import UsageError
from outlast.log_records import Symptom

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
GPUS = 8  # in a node


class JobSize(NamedTuple):
    """Jobs of `gpus`: their share of the jobs, of the GPU time, and the share with QOS high."""

    gpus: int
    jobs: float
    gpu_time: float
    high: float = 0.0


class FailureCause(NamedTuple):
    """Cause of hardware failures.

    `share` of the failures; `check`: the check that detects it, "" for none (the node just
    vanishes). `codes` are XIDs, one of which is logged.
    """

    symptom: Symptom
    check: str
    share: float
    codes: tuple[str, ...] = ()


class RateEpisode(NamedTuple):
    """Period, in shares of the window, in which `symptom` occurs `factor` times as often."""

    symptom: Symptom
    since: float
    until: float
    factor: float


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a synthetic cluster; rates are per node-day of running jobs."""

    name: str
    nodes: Annotated[int, msgspec.Meta(ge=4, le=100_000)]
    jobs_a_day: Positive
    utilization: Share
    r_f: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    sizes: tuple[JobSize, ...]
    causes: tuple[FailureCause, ...]
    lemon_share: Share = 0.012
    lemon_factors: tuple[float, float] = (30.0, 60.0)  # times r_f
    node_fail_share: Share = 0.5  # of the detected failures; the others end as FAILED
    preempt_share: Share = 0.11  # of its nodes that a job of QOS high takes from lower ones
    protected_s: Positive = 7200.0  # a job is preempted after that
    work_sigma: Positive = 1.6  # of the logarithm of a job's length
    limit_s: Positive = 7 * 86400.0
    checkpoint_s: Positive = 3600.0
    restart_s: Positive = 300.0
    completed: Share = 0.683  # of the jobs' last attempts, as all of these
    failed: Share = 0.272
    timeout: Share = 0.0068
    oom: Share = 0.0011
    requeued: Share = 0.0228  # of the jobs that request a requeue, once
    resubmit_share: Share = (
        0.03  # of those that end as FAILED, which are resubmitted under another number
    )
    loop_share: Share = 0.01  # of the hardware failures of QOS high that a crash loop follows
    loop_length: Positive = 12.0  # attempts, the mean
    pcie_xid_share: Share = 0.43  # of PCIe errors that come with XID 79
    pcie_ipmi_share: Share = 0.21  # of them with XID 79 and an IPMI critical interrupt
    ib_gpu_share: Share = 0.02  # of InfiniBand failures that come with a GPU failure
    drains_per_day: float = 1e-3  # findings that drain a node after its job
    warnings_per_day: float = 5e-3
    excluding: Share = 0.005  # of the jobs that exclude some nodes
    new_checks: tuple[tuple[Symptom, float], ...] = (("services", 0.33),)  # from then on
    episodes: tuple[RateEpisode, ...] = ()


_CAUSES = (
    FailureCause("ib-link", "ib_link", 0.18),
    FailureCause("filesystem", "mounts", 0.16),
    FailureCause("gpu-memory", "xid", 0.14, ("XID 48", "XID 63", "XID 64", "XID 94", "XID 95")),
    FailureCause("pcie", "pcie", 0.12),
    FailureCause("gpu-unavailable", "xid", 0.07, ("XID 79",)),
    FailureCause("gpu-driver", "xid", 0.06, ("XID 119", "XID 120")),
    FailureCause("nvlink", "nvlink", 0.05, ("XID 74",)),
    FailureCause("ethlink", "eth_link", 0.03),
    FailureCause("main-memory", "main_memory", 0.03),
    FailureCause("services", "services", 0.03),
    FailureCause("other", "", 0.13),
)
RSC1 = ClusterShape(
    name="rsc1",
    nodes=2048,
    jobs_a_day=7200,
    utilization=0.83,
    r_f=6.50e-3,
    causes=_CAUSES,
    sizes=(
        JobSize(1, 0.43, 0.018),
        JobSize(2, 0.06, 0.006),
        JobSize(4, 0.07, 0.012),
        JobSize(8, 0.355, 0.055),
        JobSize(16, 0.03, 0.03, 0.05),
        JobSize(32, 0.02, 0.05, 0.05),
        JobSize(64, 0.014, 0.07, 0.05),
        JobSize(128, 0.010, 0.095, 0.05),
        JobSize(256, 0.006, 0.12, 1.0),
        JobSize(512, 0.003, 0.13, 1.0),
        JobSize(1024, 0.0013, 0.154, 1.0),
        JobSize(2048, 0.0005, 0.14, 1.0),
        JobSize(4096, 0.0002, 0.12, 1.0),
    ),
)
RSC2 = ClusterShape(
    name="rsc2",
    nodes=1024,
    jobs_a_day=4400,
    utilization=0.85,
    r_f=2.34e-3,
    causes=_CAUSES,
    lemon_share=0.017,
    preempt_share=0.06,
    pcie_xid_share=0.63,
    pcie_ipmi_share=0.49,
    ib_gpu_share=0.06,
    sizes=(
        JobSize(1, 0.60, 0.03),
        JobSize(2, 0.07, 0.008),
        JobSize(4, 0.06, 0.012),
        JobSize(8, 0.20, 0.045),
        JobSize(16, 0.025, 0.05, 0.05),
        JobSize(32, 0.017, 0.085, 0.05),
        JobSize(64, 0.012, 0.115, 0.05),
        JobSize(128, 0.008, 0.135, 0.05),
        JobSize(256, 0.005, 0.18, 1.0),
        JobSize(512, 0.002, 0.17, 1.0),
        JobSize(1024, 0.001, 0.17, 1.0),
    ),
)
# As in figure 5: a driver's regression that is fixed, a new check of mounts that detects an old
# problem, and links that fail for some weeks. (In the paper, links of a handful of nodes.)
EVENTFUL = msgspec.structs.replace(
    RSC1,
    name="rsc1-eventful",
    new_checks=(("filesystem", 0.35),),
    episodes=(RateEpisode("gpu-driver", 0.0, 0.15, 8.0), RateEpisode("ib-link", 0.75, 0.85, 6.0)),
)
SHAPES = {shape.name: shape for shape in (RSC1, RSC2, EVENTFUL)}


def resize_shape(shape: ClusterShape, nodes: int) -> ClusterShape:
    """Return the same cluster with other `nodes`, and jobs a day in proportion.

    No job is larger than a quarter of it (a half, below 256 nodes).
    """
    most = GPUS * max(1, nodes // (4 if nodes >= 256 else 2))
    fitting = [size for size in shape.sizes if size.gpus <= most]
    jobs = sum(size.jobs for size in fitting)
    gpu_time = sum(size.gpu_time for size in fitting)
    sizes = tuple(
        size._replace(jobs=size.jobs / jobs, gpu_time=size.gpu_time / gpu_time) for size in fitting
    )
    per_node = shape.jobs_a_day / shape.nodes
    return msgspec.structs.replace(shape, nodes=nodes, jobs_a_day=per_node * nodes, sizes=sizes)


def check_shape(shape: ClusterShape) -> ClusterShape:
    """Return the shape. Raises UsageError for an invalid value."""
    try:
        return msgspec.convert(msgspec.structs.asdict(shape), ClusterShape)
    except msgspec.ValidationError as error:
        raise UsageError(f"shape {shape.name}: {error}") from error


DAY_S = 86400.0
AWAY_DAYS = 0.38  # mean time of an outage after a failure (synthetic_jobs.draw_absence)


class ClusterWindow(NamedTuple):
    """Window of a synthetic cluster's records; times in it are seconds from its begin.

    `nodes`: their names.
    """

    shape: ClusterShape
    days: float
    seed: int
    nodes: list[str]
    since_ns: int

    @property
    def until_ns(self) -> int:
        """End of the window."""
        return self.since_ns + round(self.days * DAY_S) * 10**9


class FailureProcess:
    """Poisson process of node failures at `rates` per second of running jobs, with episodes.

    `rates[node]` is constant; causes vary in episodes, whose factors average to 1 over the window.
    Days are numbered from its begin; before it day 0 continues.
    """

    def __init__(self, shape: ClusterShape, days: float, lemons: dict[int, float]) -> None:
        self.rates = _rates(shape, lemons)
        factors = _factors(shape, max(1, int(np.ceil(days))))
        shares = np.array([cause.share for cause in shape.causes])
        by_day = factors @ shares
        self._weights = (factors * shares / by_day[:, None]).tolist()
        self._plain = not shape.episodes
        speeds = [1.0 if self._plain else float(speed) for speed in by_day]
        self._speeds = speeds
        self._ages = [0.0, *accumulate(DAY_S * speed for speed in speeds)]

    def age(self, t_s: float) -> float:
        """Return the seconds at the mean pace until `t_s`, the unit of exposure."""
        if self._plain:
            return t_s
        day = min(max(int(t_s // DAY_S), 0), len(self._speeds) - 1)
        return self._ages[day] + (t_s - day * DAY_S) * self._speeds[day]

    def when(self, age: float) -> float:
        """Return the time at which the age is `age`."""
        if self._plain:
            return age
        day = min(max(bisect_right(self._ages, age) - 1, 0), len(self._speeds) - 1)
        return day * DAY_S + (age - self._ages[day]) / self._speeds[day]

    def cause(self, t_s: float, rng: random.Random) -> int:
        """Draw the index of the shape's cause of a failure at `t_s`."""
        day = min(max(int(t_s // DAY_S), 0), len(self._weights) - 1)
        weights = self._weights[day]
        return rng.choices(range(len(weights)), weights)[0]


def choose_lemons(shape: ClusterShape, rng: np.random.Generator) -> dict[int, float]:
    """Draw the lemons, with the factor of each over the fleet's rate.

    At most so many that they do not fail more often than all nodes should together.
    """
    low, high = shape.lemon_factors
    lemons = min(round(shape.lemon_share * shape.nodes), int(0.95 * shape.nodes / high))
    chosen = np.sort(rng.choice(shape.nodes, lemons, replace=False)).tolist()
    return dict(zip(chosen, rng.uniform(low, high, lemons).tolist(), strict=True))


def _rates(shape: ClusterShape, lemons: dict[int, float]) -> np.ndarray:
    """Return rates at which running nodes fail at r_f in the mean, since lemons are down more
    often."""
    present = {node: 1 / (1 + factor * shape.r_f * AWAY_DAYS) for node, factor in lemons.items()}
    at_work = shape.nodes - len(lemons) + sum(present.values())
    taken = sum(factor * present[node] for node, factor in lemons.items())
    plain = shape.r_f * max(0.0, at_work - taken) / (shape.nodes - len(lemons))
    rates = np.full(shape.nodes, plain)
    for node, factor in lemons.items():
        rates[node] = factor * shape.r_f
    return rates / DAY_S


def _factors(shape: ClusterShape, days: int) -> np.ndarray:
    """Return the factors by day and cause; the mean over the days is 1 for each cause."""
    edges = np.arange(days + 1) / days
    factors = np.ones((days, len(shape.causes)))
    for column, cause in enumerate(shape.causes):
        for episode in shape.episodes:
            if episode.symptom == cause.symptom:
                inside = [
                    high > episode.since and low < episode.until for low, high in pairwise(edges)
                ]
                factors[inside, column] *= episode.factor
        factors[:, column] /= factors[:, column].mean()
    return factors
