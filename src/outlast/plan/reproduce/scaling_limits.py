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
ROUNDED_SAVE_S = 2.5  # the limits go on with this figure
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
        SOURCE.says("one GPU's time between failures", "6", GPU_MTBF_S / DAY_S / 365.25, "years"),
        SOURCE.says("time between failures, 16,384 GPUs", "3", _mtbf_s(GPUS) / HOUR_S, "h"),
        SOURCE.says("time between failures, 100,000 GPUs", "30", _mtbf_s(100_000) / 60, "min"),
        SOURCE.says("time between failures, 1M GPUs", "3", _mtbf_s(1_000_000) / 60, "min"),
        SOURCE.says("length of Llama 3's run", "88e4", gpu_days, "GPU days"),
        SOURCE.says("Llama 3: GPU days a failure", "21e2", measured_s / DAY_S, "GPU days"),
        SOURCE.says("Llama 3: GPU hours a failure", "5e4", measured_s / HOUR_S, "GPU hours"),
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
        SOURCE.says("optimizer state of 405B parameters", "4860", STATE_BYTES / 1e9, "GB"),
        SOURCE.says("time of a save", "2.43", cost_s, "s"),
        SOURCE.says(
            "time of a save, in the text",
            "2.5",
            cost_s,
            "s",
            "2.43 s, rounded up to a half second; its limits of scale go on with 2.5.",
            within=0.1,
        ),
        SOURCE.says("best interval, 16,384 GPUs", "4", best_s / 60, "min"),
        SOURCE.says("time lost to saves and redone work", "2.1", 100 * lost, "%"),
        SOURCE.says(
            "time lost to saves, redone work and recovery",
            "2.1",
            100 * with_recovery,
            "%",
            "The sentence counts recovery, its model does not: the 5 minutes that it finds for one"
            " are 2.8 % more.",
        ),
        SOURCE.asks(
            "time lost, by the code of appendix A",
            100 * exact,
            "% of the work",
            "Printed without a result. Saves cannot fail, restarts are instant.",
        ),
        SOURCE.says("MFU left of 41 %", "40.14", mfu, "%"),
        SOURCE.says("MFU lost", "1", 41 - mfu, "points"),
        SOURCE.says("time of a recovery", "5", _restore_s() / 60, "min"),
        SOURCE.says(
            "time of a recovery, in its note 9",
            "5.1",
            _restore_s() / 60,
            "min",
            "128 x 2.43 s are 5.18 min; 5.1 comes of a save rounded to 2.4 s.",
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
        SOURCE.says("GPUs at which a failure comes every 2.5 s", "72e6", meets, "GPUs"),
        SOURCE.says("GPUs at which a failure comes every 2.5 s, in the text", "7e7", meets, "GPUs"),
        SOURCE.words(
            "efficiency where a failure comes every 2.5 s",
            "less than half",
            100 * there,
            "%",
            there < 0.5,
            f"1/e if nothing fails while saving, as in its appendix A; {100 * exposed:.1f} % if"
            " failures strike saves, too.",
        ),
        SOURCE.says(
            "GPUs from which failures take more than training",
            "7e7",
            half(ROUNDED_SAVE_S, safe_saves=True),
            "GPUs",
            "At 70 million efficiency is 36.8 %. Half is lost at 27.8 million, where nothing fails"
            " while saving and restarts are instant.",
        ),
        SOURCE.says(
            "GPUs from which failures take more than training, failures during saves counted",
            "7e7",
            half(ROUNDED_SAVE_S),
            "GPUs",
            "A save that takes as long as passes between failures mostly fails; restarts are still"
            " instant.",
        ),
        SOURCE.says(
            "GPUs from which failures take more than training, its recovery counted",
            "7e7",
            half(_save_s(), restart_s=_restore_s()),
            "GPUs",
            f"Recovery is what limits: 128 replicas read the state for {_restore_s():.0f} s, and"
            " failures strike that and saves. If saves cannot fail,"
            f" {half(_save_s(), restart_s=_restore_s(), safe_saves=True):,.0f}.",
        ),
        SOURCE.says("time of a save to 4 peers", "0.32", memory_s, "s"),
        SOURCE.says("that many times faster than storage", "8", ROUNDED_SAVE_S / memory_s, "x"),
        SOURCE.says(
            "GPUs at which a failure comes every 0.32 s",
            "562e6",
            replicas.gpus_at(BREAKS_DOWN, GPU_MTBF_S, memory_s, safe_saves=True),
            "GPUs",
        ),
        SOURCE.says(
            "GPUs from which failures take more than training, memory",
            "56e7",
            half(memory_s, safe_saves=True),
            "GPUs",
            "As for storage: efficiency is 36.8 % there. Half is lost at 217 million, or at"
            f" {half(memory_s) / 1e6:.0f} million if failures strike saves.",
        ),
    ]


def _copies() -> list[ReproducedFigure]:
    days_s = 60 * DAY_S

    def runs(members: int) -> float:
        return 1 / replicas.epoch_losses(days_s, 10.0, 1000, members, NODE_RATE_PER_S)

    window_s = 300.0
    real = replicas.loss_rate_per_s(125, 2, NODE_RATE_PER_S, window_s)
    return [
        SOURCE.says(
            "runs to one loss, 2 copies",
            "533",
            runs(2),
            "runs",
            "Its formula with its numbers gives 60 times as many; a factor of 60 is lost in both of"
            " its results.",
        ),
        SOURCE.says(
            "runs to one loss, 3 copies",
            "2.3e9",
            runs(3),
            "runs",
            "As above: the same factor of 60.",
        ),
        SOURCE.says("a third copy's gain", "4.3e6", runs(3) / runs(2), "x"),
        SOURCE.asks(
            "runs to one loss, 2 copies, re-protected in 5 minutes",
            1 / (days_s * real),
            "runs",
            "The window is the time until a new node holds the state again, not one step; 125 nodes"
            " in pairs, 5 minutes assumed.",
        ),
        SOURCE.says("memory left beside checkpoints", "76", (80e9 - PER_GPU_BYTES) / 1e9, "GB"),
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
    second = "The relation leaves out how long a model is trained, as if for one second"
    return [
        SOURCE.says("bytes to send per parameter", "48", COPIES * 3 * 4, "bytes"),
        SOURCE.says(
            "FLOP per squared parameter",
            "120",
            replicas.FLOPS_PER_PARAMETER_TOKEN * replicas.TOKENS_PER_PARAMETER,
            "FLOP",
        ),
        SOURCE.says("parameters per root of GPUs, as printed", "2e6", one_second, "parameters"),
        SOURCE.says(
            "parameters per root of GPUs",
            "2e6",
            trained(1.0),
            "parameters",
            f"{second}; this is for 54 days.",
        ),
        SOURCE.says(
            "largest cluster, linear network, as printed", "9e21", limit(1.0, by=False), "GPUs"
        ),
        SOURCE.says(
            "largest cluster, root network, as printed", "94e9", limit(0.5, by=False), "GPUs"
        ),
        SOURCE.says(
            "largest cluster, linear network",
            "9e21",
            limit(1.0, by=True),
            "GPUs",
            f"{second}; this is for 54 days, and a save as long as the time between failures.",
        ),
        SOURCE.says(
            "largest cluster, root network",
            "94e9",
            limit(0.5, by=True),
            "GPUs",
            f"{second}; with 54 days the network limits clusters that can be imagined.",
        ),
    ]


def _spares() -> list[ReproducedFigure]:
    nodes = 1_000_000 / 8
    rate_per_s = 1 / _mtbf_s(1_000_000)
    mean = spares.in_repair(rate_per_s, DAY_S)
    enough = spares.quantile(0.999, mean)
    short = spares.short_share(round(mean), mean)
    return [
        SOURCE.says("nodes of 1M GPUs", "125e3", nodes, "nodes"),
        SOURCE.says("failures of 1M GPUs", "20", rate_per_s * HOUR_S, "an hour"),
        SOURCE.says("nodes in repair, a day each", "480", mean, "nodes"),
        SOURCE.says(
            "nodes in repair, of all",
            "0.3",
            100 * mean / nodes,
            "%",
            "480 of 125,000 are 0.384 %: cut off, not rounded.",
        ),
        SOURCE.says(
            "spares that suffice",
            "480",
            enough,
            "nodes",
            f"480 is the mean in repair: short {100 * short:.0f} % of the time. Ours suffice 99.9 %"
            " of the time.",
        ),
        SOURCE.words(
            "longest repair with spares below 1 %",
            "several days",
            0.01 * nodes / (rate_per_s * DAY_S),
            "days",
            None,
            "With as many spares as are in repair on the average; three days take 1.15 %.",
        ),
    ]


def _stops() -> list[ReproducedFigure]:
    return [SOURCE.says("days between planned stops of Llama 3", "1", RUN_DAYS / STOPS, "days")]
