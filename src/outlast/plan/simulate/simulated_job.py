"""Simulated job of a strategy on a scenario, and the memory of the kernel."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np

from outlast.errors import UsageError
from outlast.plan.model.ladder_costs import (
    Strategy,
    fatal_rate_per_s,
    node_rate_per_s,
    pace_of,
    sources,
    spares_of,
    stays_share,
)
from outlast.plan.model.scenario import NEVER_S, Scenario
from outlast.plan.model.strategy_prediction import Prediction, tuned_job
from outlast.theory.numerics import (
    check_not_negative,
    check_positive,
    check_share,
    check_whole,
)
from outlast.theory.strategies import DEPTHS

# Sources of a failed job's state, best first.
LIVE = 0
MEMORY = 1
STORAGE = 2
# Columns of the results, one row for each run.
TALLIES = (
    "wall_s", "done_s", "failures", "incidents", "from_live", "from_memory", "from_storage",
    "stalls", "redo_s", "save_s", "detect_s", "restart_s", "wait_s", "slow_s",
)  # fmt: skip
# Events and slots of the counter-based random numbers, in the kernel and in a narration.
LEMON_EVENT = 1
AGE_EVENT = 2
KIND_SLOT = 0
STAY_SLOT = 1
GAP_SLOT = 2
NODE_SLOT = 3
SLOTS_PER_NODE = 512
CURE_SLOT = 400
RATE_MIN = 1e-300  # a rate of 0 would lose the gap that was drawn
RANDOM = -1.0  # `gap_spread` of a Poisson process
SEED_MAX = 2**63 - 1
RACK_NODES_MAX = 120  # nodes whose repair times fit the slots of one failure
_NOT_NEGATIVE = (
    "step_s", "memory_cost_s", "cost_s", "flush_s", "window_s", "node_rate", "software_rate",
    "rack_rate", "age_s", "repair_s", "repair_shape", "detect_s",
)  # fmt: skip


class SimulatedJob(NamedTuple):
    """Parameters in seconds and rates per second; docs/plan.md explains the simulated job."""

    work_s: float
    interval_s: float  # work from one durable save to the next, at full speed
    versions: int  # memory saves per interval, the last of them at the durable save
    step_s: float  # an interrupted step is repeated; 0: nothing of it is lost
    memory_cost_s: float
    cost_s: float
    flush_s: float  # at most interval_s
    nodes: int
    spares: int
    replicas: int
    copies: int  # nodes that hold each part of a memory version; 0: no memory versions
    window_s: float  # from a recovery until all parts have their copies again
    node_rate: float
    stay_share: float  # share of node failures after which the node stays in the job
    lemons: float
    lemon_factor: float  # failure rate of a lemon over that of a healthy node
    cure_share: float  # share of repairs that cure a lemon
    software_rate: float
    rack_rate: float
    rack_nodes: int
    shape: float  # 1: nodes do not age
    scale_s: float
    age_s: float
    repair_s: float
    repair_shape: float  # 0: always the mean
    detect_s: float
    restart_s: tuple[float, float, float]  # from live state, from memory, from storage
    software_from: int
    node_from: int
    drop: bool
    failures_max: int
    pace: float = 1.0  # seconds that a second of work takes without failures
    gap_spread: float = (
        -1.0
    )  # half-width of uniform gaps between failures, over their mean; -1: Poisson


Parameters: TypeAlias = Any  # a record of PARAMETERS
State: TypeAlias = Any  # a record of STATE
Table: TypeAlias = Any  # an array; in compiled code a pointer to its first element


class SimulatedFleet(NamedTuple):
    """Assignment of nodes to seats: arrays by seat, and columns that are lists or heaps."""

    seat: Table  # -1: empty; 0: a healthy node; n > 0: the n-th lemon
    lemon: Table  # seat of the n-th lemon
    empty: Table  # seats without a node
    lost: Table  # by seat: 0: its part is there; 1: lost; 2: lost and listed in `recent`
    recent: Table  # seats that lost their part or got a node in this window
    live_lost: Table  # by part of a replica: seats that have lost it
    copies_lost: Table  # by part of a memory version
    down: Table  # by replica: its empty seats, if it can be dropped
    spare_lemon: Table  # 0 or 1
    spare_born_s: Table
    repair_s: Table  # heap of the times at which repairs end
    repair_lemon: Table  # whether the node is a lemon after it
    born_s: Table  # by seat; this and the following only if nodes age
    due_s: Table  # by seat: time of its node's failure; infinity without a node
    ageing_s: Table  # heap of failure times
    ageing_seat: Table  # its seat; the entry is stale if due_s of the seat differs


STATE = np.dtype(
    [
        ("key", "u8"), ("now_s", "f8"), ("next_s", "f8"), ("rate", "f8"), ("node_rate", "f8"),
        ("other_rate", "f8"), ("exposed_s", "f8"), ("work_s", "f8"), ("cycle", "i8"),
        ("version", "i8"), ("own_s", "f8"), ("saving_s", "f8"), ("pace", "f8"),
        ("version_s", "f8"), ("cycle_s", "f8"), ("whole_s", "f8"), ("at_storage", "i8"),
        ("flushing", "i8"), ("flushed_s", "f8"),
        ("healthy", "i8"), ("lemons", "i8"),  # seats with such a node
        ("missing", "i8"), ("replicas_lost", "i8"), ("repairing", "i8"), ("free", "i8"),
        ("ageing", "i8"), ("drawn", "i8"), ("recent", "i8"),
        ("live_part", "i8"), ("copies_part", "i8"),  # nodes from one copy of a part to the next
        ("failures", "i8"), ("incidents", "i8"), ("from_live", "i8"), ("from_memory", "i8"),
        ("from_storage", "i8"), ("stalls", "i8"), ("done_s", "f8"), ("redo_s", "f8"),
        ("save_s", "f8"), ("detect_s", "f8"), ("restart_s", "f8"), ("wait_s", "f8"),
        ("slow_s", "f8"),
    ],
    align=True,
)  # fmt: skip


PARAMETERS = np.dtype(
    [
        (name, "i8") if kind in (int, bool) else (name, "f8", () if kind is float else (3,))
        for name, kind in get_type_hints(SimulatedJob).items()
    ],
    align=True,
)


def check_seed(seed: int) -> None:
    """Raise UsageError for an invalid seed."""
    if not 0 <= seed <= SEED_MAX:
        raise UsageError(f"seed {seed}: from 0 to {SEED_MAX:,}")


def check_job(job: SimulatedJob, replications: int = 1) -> None:
    """Raise UsageError naming the invalid field and its range."""
    for name in ("work_s", "interval_s", "shape", "lemon_factor"):
        check_positive(name, getattr(job, name))
    for name in ("nodes", "versions", "replicas", "rack_nodes", "failures_max"):
        check_positive(name, getattr(job, name))
        check_whole(name, getattr(job, name))
    for name in ("spares", "copies"):
        check_whole(name, getattr(job, name))
    check_positive("replications", replications)
    check_whole("replications", replications)
    for name in _NOT_NEGATIVE:
        check_not_negative(name, getattr(job, name))
    for name in ("stay_share", "lemons", "cure_share"):
        check_share(name, getattr(job, name))
    for length_s in job.restart_s:
        check_not_negative("restart_s", length_s)
    if job.shape != 1:
        check_positive("scale_s", job.scale_s)
    if not job.pace >= 1:
        raise UsageError(f"pace must be 1 or above, not {job.pace!r}")
    if job.gap_spread != RANDOM:
        check_share("gap_spread", job.gap_spread)
    if job.flush_s > job.interval_s:
        raise UsageError(
            f"flush_s ({job.flush_s:g}) is above interval_s ({job.interval_s:g}): a save begins"
            " when the last one can be restored"
        )
    if job.nodes % job.replicas:
        raise UsageError(f"replicas ({job.replicas}) must divide nodes ({job.nodes})")
    if job.copies and job.nodes % job.copies:
        raise UsageError(f"copies ({job.copies}) must divide nodes ({job.nodes})")
    if job.rack_nodes > RACK_NODES_MAX:
        raise UsageError(f"rack_nodes is at most {RACK_NODES_MAX}, not {job.rack_nodes}")
    for name in ("software_from", "node_from"):
        if getattr(job, name) not in (LIVE, MEMORY, STORAGE):
            raise UsageError(f"{name} is 0 (live), 1 (memory) or 2 (storage)")
    if job.drop and job.node_from != LIVE:
        raise UsageError("drop continues with live replicas: node_from must be 0")


def parameters(job: SimulatedJob) -> Parameters:
    """Return the job as the kernel's arguments."""
    return np.array([job], PARAMETERS)[0]


def fleet(job: SimulatedJob) -> SimulatedFleet:
    """Allocate memory for the job's nodes, which `begin_fleet` fills."""
    node_count = job.nodes + job.spares
    ages = job.shape != 1
    ageing, entries = (job.nodes, 2 * job.nodes + 1) if ages else (0, 0)
    return SimulatedFleet(
        seat=np.empty(job.nodes, np.int32),
        lemon=np.empty(job.nodes + 1, np.int32),
        empty=np.empty(job.nodes, np.int32),
        lost=np.empty(job.nodes, np.int8),
        recent=np.empty(job.nodes, np.int32),
        live_lost=np.empty(job.nodes // job.replicas, np.int32),
        copies_lost=np.empty(job.nodes // max(1, job.copies), np.int32),
        down=np.empty(job.replicas, np.int32),
        spare_lemon=np.empty(node_count, np.int32),
        spare_born_s=np.empty(node_count),
        repair_s=np.empty(node_count),
        repair_lemon=np.empty(node_count, np.int32),
        born_s=np.empty(ageing),
        due_s=np.empty(ageing),
        ageing_s=np.empty(entries),
        ageing_seat=np.empty(entries, np.int32),
    )


ENDLESS_TIMES = 20
ENDLESS_MIN = 100_000
FAILURES_MAX = 20_000_000  # of a replication; a run with more is called endless


def job_of(scenario: Scenario, strategy: Strategy) -> SimulatedJob:
    """Return the job with the intervals of `predict`. Raises UsageError with the invalid field."""
    saves = tuned_job(scenario, strategy)
    node_rate = node_rate_per_s(scenario)
    lemon_rate_factor = 1 + scenario.lemons * (scenario.lemon_factor - 1)
    racks = scenario.rack_mtbf_s < NEVER_S
    scale_s = 1 / node_rate / math.gamma(1 + 1 / scenario.shape) if node_rate else 0.0
    first = sources(scenario, strategy, memory=saves.snapshots > 0)[0][0]
    best = (LIVE, MEMORY, STORAGE)[DEPTHS.index(first)]
    return SimulatedJob(
        work_s=scenario.work_s,
        interval_s=saves.interval_s,
        versions=max(1, saves.snapshots),
        step_s=scenario.step_s,
        memory_cost_s=saves.snapshot_cost_s,
        cost_s=saves.cost_s + saves.drag * saves.flush_s,
        flush_s=(1 - saves.drag) * saves.flush_s,  # its slowness is in the cost
        nodes=scenario.nodes,
        spares=spares_of(scenario, strategy),
        replicas=scenario.replicas if best == LIVE else 1,
        copies=scenario.copies if saves.snapshots else 0,
        window_s=scenario.window_s,
        node_rate=node_rate / lemon_rate_factor,
        stay_share=stays_share(scenario),
        lemons=scenario.lemons,
        lemon_factor=scenario.lemon_factor,
        cure_share=0.0,
        software_rate=fatal_rate_per_s(scenario),
        rack_rate=1 / scenario.rack_mtbf_s,
        rack_nodes=min(scenario.rack_nodes, scenario.nodes) if racks else 1,
        shape=scenario.shape if node_rate else 1.0,
        scale_s=scale_s * lemon_rate_factor,
        age_s=scenario.age_s,
        repair_s=scenario.repair_s,
        repair_shape=1.0,
        detect_s=scenario.detect_s,
        restart_s=(scenario.pause_s, scenario.restore_s, scenario.restart_s),
        software_from=STORAGE,
        node_from=best,
        drop=strategy == "drop",
        failures_max=FAILURES_MAX,
        pace=pace_of(scenario, strategy),
        gap_spread=RANDOM if scenario.gap_spread is None else scenario.gap_spread,
    )


def bound_failures(job: SimulatedJob, predicted: Prediction) -> SimulatedJob:
    """Limit a job's failures far above theory's number, to detect runs that never end."""
    expected = predicted.outcome.failures_per_s * predicted.wall_s
    bound = ENDLESS_MIN if math.isinf(expected) else max(ENDLESS_MIN, ENDLESS_TIMES * expected)
    return job._replace(failures_max=min(job.failures_max, int(bound)))
