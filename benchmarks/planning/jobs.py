"""What is simulated: nodes of 8 GPUs, each of which fails once in 50,000 hours."""

from __future__ import annotations

from outlast.plan.simulate.simulated_job import LIVE, STORAGE, SimulatedJob

HOUR_S, DAY_S = 3600.0, 86_400.0
NODE_RATE = 8 / (50_000 * HOUR_S)


def _job(gpus: int, days: float, source: int) -> SimulatedJob:
    nodes = gpus // 8
    return SimulatedJob(
        work_s=days * DAY_S, interval_s=600.0, versions=1, step_s=0.0, memory_cost_s=0.0,
        cost_s=5.0, flush_s=0.0, nodes=nodes, spares=8 + int(2 * nodes * NODE_RATE * DAY_S),
        replicas=nodes if source == LIVE else 1, copies=0, window_s=30.0, node_rate=NODE_RATE,
        stay_share=0.0, lemons=0.0, lemon_factor=1.0, cure_share=0.0, software_rate=0.0,
        rack_rate=0.0, rack_nodes=1, shape=1.0, scale_s=0.0, age_s=0.0, repair_s=DAY_S,
        repair_shape=1.0, detect_s=60.0, restart_s=(300.0, 300.0, 300.0), software_from=STORAGE,
        node_from=source, drop=False, failures_max=100_000_000,
    )  # fmt: skip


def restarting(gpus: int, days: float) -> SimulatedJob:
    """From a save every ten minutes."""
    return _job(gpus, days, STORAGE)


def migrating(gpus: int, days: float) -> SimulatedJob:
    """To spares, from replicas; a save every minute."""
    return _job(gpus, days, LIVE)._replace(
        interval_s=60.0, detect_s=5.0, restart_s=(10.0, 20.0, 300.0)
    )
