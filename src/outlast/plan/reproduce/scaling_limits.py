"""Document 000: how far failures and checkpoints limit the size of a training run."""

from __future__ import annotations

import math

from outlast.plan.reproduce import ReproducedFigure, SourceDocument
from outlast.theory import intervals, replicas, spares
from outlast.theory.failures import DAY_S, HOUR_S, job_mtbf_s, preset, rate_of_mtbf

SOURCE = SourceDocument(
    "000", "Erben and Erdil, Hardware failures won't limit AI scaling, Epoch AI 2024"
)
GPU_MTBF_S = 50_000 * HOUR_S
# Llama 3 405B.
GPUS = 16_384
RUN_DAYS = 54
FAILURES = 419
STOPS = 47
STATE_BYTES = 405e9 * 3 * 4
STORAGE_BYTES_PER_S = 2e12
ROUNDED_SAVE_S = 2.5  # the document's limits use this figure
DATA_PARALLEL = 128
NETWORK_BYTES_PER_S = 50e9
PER_GPU_BYTES = 4e9
COPIES = 4
NODE_RATE_PER_S = 1 / (8000 * HOUR_S)
FLOPS = 989e12
MFU = 0.5
PARAMETERS_ROUNDED = 2e6  # per root of the number of GPUs, as its next equation has it
BREAKS_DOWN = 1 / math.e  # best efficiency where a save takes as long as passes between failures


def rows() -> list[ReproducedFigure]:
    """Return all figures of this source."""
    return [*_failures(), *_saving(), *_limits(), *_copies(), *_models(), *_spares(), *_stops()]


def _mtbf_s(gpus: int) -> float:
    return job_mtbf_s(rate_of_mtbf(GPU_MTBF_S), gpus)


def _save_s() -> float:
    return replicas.save_s(STATE_BYTES, 1, STORAGE_BYTES_PER_S)


def _restore_s() -> float:
    return replicas.save_s(STATE_BYTES, 1, STORAGE_BYTES_PER_S, copies=DATA_PARALLEL)


def _memory_save_s() -> float:
    return replicas.save_s(PER_GPU_BYTES, 1, NETWORK_BYTES_PER_S, copies=COPIES)


def _failures() -> list[ReproducedFigure]:
    gpu_days = GPUS * RUN_DAYS
    measured_s = 1 / preset("llama3-405b").rate_per_device_s
    return [
        SOURCE.check("one GPU's time between failures", "6", GPU_MTBF_S / DAY_S / 365.25, "years"),
        SOURCE.check("time between failures, 16,384 GPUs", "3", _mtbf_s(GPUS) / HOUR_S, "h"),
        SOURCE.check("time between failures, 100,000 GPUs", "30", _mtbf_s(100_000) / 60, "min"),
        SOURCE.check("time between failures, 1M GPUs", "3", _mtbf_s(1_000_000) / 60, "min"),
        SOURCE.check("length of Llama 3's run", "88e4", gpu_days, "GPU days"),
        SOURCE.check("Llama 3: GPU days a failure", "21e2", measured_s / DAY_S, "GPU days"),
        SOURCE.check("Llama 3: GPU hours a failure", "5e4", measured_s / HOUR_S, "GPU hours"),
    ]


def _saving() -> list[ReproducedFigure]:
    cost_s = _save_s()
    mtbf_s = _mtbf_s(GPUS)
    best_s = intervals.young(cost_s, mtbf_s)
    lost = intervals.waste(best_s, cost_s, mtbf_s)
    with_recovery = intervals.waste(best_s, cost_s, mtbf_s, restart_s=_restore_s())
    exact_s = intervals.optimum_safe_saves(cost_s, mtbf_s)
    exact = intervals.segment_safe_saves_s(exact_s, cost_s, mtbf_s) / exact_s - 1
    mfu = 41 * (1 - lost)
    return [
        SOURCE.check("optimizer state of 405B parameters", "4860", STATE_BYTES / 1e9, "GB"),
        SOURCE.check("time of a save", "2.43", cost_s, "s"),
        SOURCE.check(
            "time of a save, in the text",
            "2.5",
            cost_s,
            "s",
            "2.43 s, rounded up to half a second; the scaling limits use 2.5.",
            within=0.1,
        ),
        SOURCE.check("best interval, 16,384 GPUs", "4", best_s / 60, "min"),
        SOURCE.check("time lost to saves and redone work", "2.1", 100 * lost, "%"),
        SOURCE.check(
            "time lost to saves, redone work and recovery",
            "2.1",
            100 * with_recovery,
            "%",
            "The sentence includes recovery, the model does not: 5 minutes per failure add 2.8 %.",
        ),
        SOURCE.answer(
            "time lost, by the code of appendix A",
            100 * exact,
            "% of the work",
            "The code is printed without a result. Saves cannot fail, restarts are instant.",
        ),
        SOURCE.check("MFU left of 41 %", "40.14", mfu, "%"),
        SOURCE.check("MFU lost", "1", 41 - mfu, "points"),
        SOURCE.check("time of a recovery", "5", _restore_s() / 60, "min"),
        SOURCE.check(
            "time of a recovery, in its note 9",
            "5.1",
            _restore_s() / 60,
            "min",
            "128 x 2.43 s are 5.18 min; 5.1 follows from a save rounded to 2.4 s.",
            within=0.1,
        ),
    ]


def _limits() -> list[ReproducedFigure]:
    def half(cost_s: float, *, restart_s: float = 0.0, safe_saves: bool = False) -> float:
        return replicas.gpus_at(0.5, GPU_MTBF_S, cost_s, restart_s=restart_s, safe_saves=safe_saves)

    meets = round(replicas.gpus_at(BREAKS_DOWN, GPU_MTBF_S, ROUNDED_SAVE_S, safe_saves=True))
    there = replicas.best_efficiency(ROUNDED_SAVE_S, _mtbf_s(meets), safe_saves=True)
    exposed = replicas.best_efficiency(ROUNDED_SAVE_S, _mtbf_s(meets))
    memory_s = _memory_save_s()
    return [
        SOURCE.check("GPUs at which a failure comes every 2.5 s", "72e6", meets, "GPUs"),
        SOURCE.check(
            "GPUs at which a failure comes every 2.5 s, in the text", "7e7", meets, "GPUs"
        ),
        SOURCE.check_text(
            "efficiency where a failure comes every 2.5 s",
            "less than half",
            100 * there,
            "%",
            there < 0.5,
            f"1/e if saves cannot fail, as in appendix A; {100 * exposed:.1f} % if they can.",
        ),
        SOURCE.check(
            "GPUs from which failures take more than training",
            "7e7",
            half(ROUNDED_SAVE_S, safe_saves=True),
            "GPUs",
            "At 70 million efficiency is 36.8 %. Half is lost at 27.8 million, if saves cannot fail"
            " and restarts are instant.",
        ),
        SOURCE.check(
            "GPUs from which failures take more than training, failures during saves counted",
            "7e7",
            half(ROUNDED_SAVE_S),
            "GPUs",
            "A save as long as the MTBF mostly fails; restarts are still instant.",
        ),
        SOURCE.check(
            "GPUs from which failures take more than training, its recovery counted",
            "7e7",
            half(_save_s(), restart_s=_restore_s()),
            "GPUs",
            f"Recovery is the limit: 128 replicas read the state for {_restore_s():.0f} s, and"
            " recoveries and saves can fail. If saves cannot fail,"
            f" {half(_save_s(), restart_s=_restore_s(), safe_saves=True):,.0f}.",
        ),
        SOURCE.check("time of a save to 4 peers", "0.32", memory_s, "s"),
        SOURCE.check("that many times faster than storage", "8", ROUNDED_SAVE_S / memory_s, "x"),
        SOURCE.check(
            "GPUs at which a failure comes every 0.32 s",
            "562e6",
            replicas.gpus_at(BREAKS_DOWN, GPU_MTBF_S, memory_s, safe_saves=True),
            "GPUs",
        ),
        SOURCE.check(
            "GPUs from which failures take more than training, memory",
            "56e7",
            half(memory_s, safe_saves=True),
            "GPUs",
            "As for storage: efficiency is 36.8 % there. Half is lost at 217 million, or at"
            f" {half(memory_s) / 1e6:.0f} million if saves can fail.",
        ),
    ]


def _copies() -> list[ReproducedFigure]:
    days_s = 60 * DAY_S

    def runs(members: int) -> float:
        return 1 / replicas.epoch_losses(days_s, 10.0, 1000, members, NODE_RATE_PER_S)

    window_s = 300.0
    real = replicas.loss_rate_per_s(125, 2, NODE_RATE_PER_S, window_s)
    return [
        SOURCE.check(
            "runs to one loss, 2 copies",
            "533",
            runs(2),
            "runs",
            "The document's formula gives 60 times as many; a factor of 60 is missing in both"
            " results.",
        ),
        SOURCE.check(
            "runs to one loss, 3 copies",
            "2.3e9",
            runs(3),
            "runs",
            "As above: the same factor of 60.",
        ),
        SOURCE.check("a third copy's gain", "4.3e6", runs(3) / runs(2), "x"),
        SOURCE.answer(
            "runs to one loss, 2 copies, re-protected in 5 minutes",
            1 / (days_s * real),
            "runs",
            "The window is the time until a new node has the state, not one step; 125 nodes"
            " in pairs, 5 minutes assumed.",
        ),
        SOURCE.check("memory left beside checkpoints", "76", (80e9 - PER_GPU_BYTES) / 1e9, "GB"),
    ]


def _models() -> list[ReproducedFigure]:
    def printed(gpus: float) -> float:
        return PARAMETERS_ROUNDED * math.sqrt(gpus)

    def trained(gpus: float) -> float:
        return replicas.chinchilla_parameters(gpus, FLOPS, MFU, RUN_DAYS * DAY_S)

    def limit(exponent: float, *, by: bool) -> float:
        parameters = trained if by else printed

        def save_s(gpus: float) -> float:
            return replicas.save_s(
                12 * parameters(gpus),
                gpus,
                NETWORK_BYTES_PER_S,
                copies=COPIES,
                network_exponent=exponent,
            )

        return replicas.gpus_at(BREAKS_DOWN, GPU_MTBF_S, save_s, safe_saves=True)

    one_second = replicas.chinchilla_parameters(1.0, FLOPS, MFU, 1.0)
    second = "The relation omits the training time, as if it were one second"
    return [
        SOURCE.check("bytes to send per parameter", "48", COPIES * 3 * 4, "bytes"),
        SOURCE.check(
            "FLOP per squared parameter",
            "120",
            replicas.FLOPS_PER_PARAMETER_TOKEN * replicas.TOKENS_PER_PARAMETER,
            "FLOP",
        ),
        SOURCE.check("parameters per root of GPUs, as printed", "2e6", one_second, "parameters"),
        SOURCE.check(
            "parameters per root of GPUs",
            "2e6",
            trained(1.0),
            "parameters",
            f"{second}; this is for 54 days.",
        ),
        SOURCE.check(
            "largest cluster, linear network, as printed", "9e21", limit(1.0, by=False), "GPUs"
        ),
        SOURCE.check(
            "largest cluster, root network, as printed", "94e9", limit(0.5, by=False), "GPUs"
        ),
        SOURCE.check(
            "largest cluster, linear network",
            "9e21",
            limit(1.0, by=True),
            "GPUs",
            f"{second}; this is for 54 days, and a save as long as the time between failures.",
        ),
        SOURCE.check(
            "largest cluster, root network",
            "94e9",
            limit(0.5, by=True),
            "GPUs",
            f"{second}; with 54 days the limit is a conceivable cluster.",
        ),
    ]


def _spares() -> list[ReproducedFigure]:
    nodes = 1_000_000 / 8
    rate_per_s = 1 / _mtbf_s(1_000_000)
    mean = spares.in_repair(rate_per_s, DAY_S)
    enough = spares.quantile(0.999, mean)
    short = spares.short_share(round(mean), mean)
    return [
        SOURCE.check("nodes of 1M GPUs", "125e3", nodes, "nodes"),
        SOURCE.check("failures of 1M GPUs", "20", rate_per_s * HOUR_S, "an hour"),
        SOURCE.check("nodes in repair, a day each", "480", mean, "nodes"),
        SOURCE.check(
            "nodes in repair, of all",
            "0.3",
            100 * mean / nodes,
            "%",
            "480 of 125,000 are 0.384 %: truncated, not rounded.",
        ),
        SOURCE.check(
            "spares that suffice",
            "480",
            enough,
            "nodes",
            f"480 is the mean in repair, too few {100 * short:.0f} % of the time. The recomputed"
            " number suffices 99.9 % of the time.",
        ),
        SOURCE.check_text(
            "longest repair with spares below 1 %",
            "several days",
            0.01 * nodes / (rate_per_s * DAY_S),
            "days",
            None,
            "With as many spares as nodes in repair on average; three days need 1.15 %.",
        ),
    ]


def _stops() -> list[ReproducedFigure]:
    return [SOURCE.check("days between planned stops of Llama 3", "1", RUN_DAYS / STOPS, "days")]
