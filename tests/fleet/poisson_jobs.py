"""Jobs that fail as a Poisson process with a known rate."""

from __future__ import annotations

import numpy as np
import polars as pl

from outlast.fleet.record_tables import DAY_NS, KIND_OF, NAMES, Tables, schema
from outlast.log_records import JobEnded

T0 = 19_800 * DAY_NS


def poisson_jobs(
    seed: int,
    *,
    per_1000_node_days: float = 6.5,
    jobs: int = 2000,
    days: float = 60,
    gpus: tuple[int, ...] = (8, 64, 256, 512),
    again: float = 0.0,
) -> Tables:
    """Return jobs of up to four days, of which a share fails earlier.

    Jobs that run at the end of the window are RUNNING. `again`: the probability that a failure is
    followed by another, half an hour later, of the same user's job of the same name.
    """
    rng = np.random.default_rng(seed)
    size = rng.choice(gpus, jobs)
    nodes = size // 8
    planned_d = rng.uniform(0.1, 4, jobs)
    fails_d = rng.exponential(1 / (per_1000_node_days / 1000 * nodes))
    start_d = rng.uniform(-4, days, jobs)
    names = np.arange(jobs)
    failed = fails_d < planned_d
    ran_d = np.where(failed, fails_d, planned_d)
    loops = failed & (rng.random(jobs) < again)
    repeats = rng.geometric(0.3, jobs) * loops
    more = np.repeat(np.arange(jobs), repeats)
    start_d = np.concatenate([start_d, (start_d + ran_d)[more] + rng.uniform(0, 0.5, len(more))])
    ran_d = np.concatenate([ran_d, np.full(len(more), 0.02)])
    failed, size = np.concatenate([failed, np.full(len(more), True)]), np.append(size, size[more])
    names = np.append(names, names[more])
    end_d = start_d + ran_d
    kept = (end_d >= 0) & (start_d < days)
    running = end_d >= days
    frame = pl.DataFrame(
        {
            "job": [str(one) for one in range(len(names))],
            "name": [f"job-{one}" for one in names],
            "state": np.where(running, "RUNNING", np.where(failed, "NODE_FAIL", "COMPLETED")),
            "start_ns": T0 + (start_d * DAY_NS).astype(np.int64),
            "t_ns": T0 + (np.minimum(end_d, days) * DAY_NS).astype(np.int64),
            "gpus": size.astype(np.int64),
            "nodes": (size // 8).astype(np.int64),
        }
    ).filter(pl.Series(kept))
    wanted = schema(JobEnded)
    texts = [pl.lit("").alias(n) for n, t in wanted.items() if t == pl.String]
    numbers = [pl.lit(0).alias(n) for n, t in wanted.items() if t == pl.Int64]
    blank = [each for each in (*texts, *numbers) if each.meta.output_name() not in frame.columns]
    jobs_table = frame.with_columns(blank).select(
        pl.col(name).cast(kind) for name, kind in wanted.items()
    )
    frames = {name: pl.LazyFrame(schema=schema(KIND_OF[name])) for name in NAMES.values()}
    frames["jobs"] = jobs_table.lazy()
    return Tables(**frames, since_ns=T0, until_ns=T0 + round(days * DAY_NS) + 1)
