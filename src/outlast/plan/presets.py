"""The published failure rates, and what each means for a job."""

from __future__ import annotations

import msgspec

from outlast.theory.failures import DAY_S, PRESETS, job_mtbf_s

JOBS_GPUS = (1_024, 16_384, 131_072)


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """`per_gpu_day`: failures of a GPU a day that stop a job. `job_mtbf_s`: seconds between the
    failures of a job, by its number of GPUs."""

    name: str
    per_gpu_day: float
    gpu_mtbf_s: float
    job_mtbf_s: dict[int, float]
    weight_failures: float
    source: str


def presets() -> list[Preset]:
    """All of them; they differ more than tenfold."""
    return [
        Preset(
            name=prior.name,
            per_gpu_day=prior.rate_per_device_s * DAY_S,
            gpu_mtbf_s=1 / prior.rate_per_device_s,
            job_mtbf_s={gpus: job_mtbf_s(prior.rate_per_device_s, gpus) for gpus in JOBS_GPUS},
            weight_failures=prior.weight_failures,
            source=prior.source,
        )
        for prior in PRESETS.values()
    ]
