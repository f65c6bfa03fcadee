"""Document 002: Young's interval, walked through for DeepSeek-V3's cluster."""

from __future__ import annotations

import math

from outlast.plan.reproduce import ReproducedFigure, SourceDocument
from outlast.theory import intervals, replicas
from outlast.theory.failures import DAY_S, HOUR_S, expected_failures, job_mtbf_s, preset

SOURCE = SourceDocument(
    "002", "Forging Giants, 11.8: checkpoint strategy and fault tolerance, book-ai.org"
)
GPUS = 2048
MTBF_S = job_mtbf_s(preset("180-days").rate_per_device_s, GPUS)
COST_S = 120.0
RUN_S = 55 * DAY_S
BYTES_PER_PARAMETER = 2 + 4 + 4 + 4
STATE_BYTES = 671e9 * BYTES_PER_PARAMETER
ROUNDED_BYTES = 10e12  # rounded as in the document
NIC_BYTES_PER_S = 5e9
STORAGE_BYTES_PER_S = 80e9
BEST_S = intervals.young(COST_S, MTBF_S)
TABLE = (
    ("5 min", 300.0, "40.0", "2.0", "42.0", "58.0"),
    ("15 min", 900.0, "13.3", "5.9", "19.2", "80.8"),
    ("22.5 min", BEST_S, "8.9", "8.9", "17.8", "82.2"),
    ("1 h", 3600.0, "3.3", "23.7", "27.0", "73.0"),
)
LONG_S = 4 * HOUR_S


def rows() -> list[ReproducedFigure]:
    """Return all figures of this source."""
    return [*_failures(), *_best(), *_table(), *_too_long(), *_shape(), *_state(), *_retention()]


def _failures() -> list[ReproducedFigure]:
    llama_s = job_mtbf_s(preset("llama3-405b").rate_per_device_s, 16_384)
    return [
        SOURCE.check("time between failures, 2,048 GPUs", "2", MTBF_S / HOUR_S, "h"),
        SOURCE.check(
            "failures in 55 days",
            "660",
            expected_failures(MTBF_S, RUN_S),
            "failures",
            "The web edition computes 55 x 24 / 2 with a rounded MTBF; 2.11 h give 626.",
            within=expected_failures(2 * HOUR_S, RUN_S) - expected_failures(MTBF_S, RUN_S),
        ),
        SOURCE.check("Llama 3: time between failures", "3", llama_s / HOUR_S, "h"),
        SOURCE.check(
            "interval shrinks, MTBF 4 h to 1 h",
            "2",
            intervals.young(COST_S, 4 * HOUR_S) / intervals.young(COST_S, HOUR_S),
            "x",
        ),
    ]


def _best() -> list[ReproducedFigure]:
    exact_s = intervals.optimum(COST_S, MTBF_S)
    return [
        SOURCE.check("time of a save, in its table", "120", 0.4 * 300, "s"),
        SOURCE.check(
            "time of a save, 10 TB at 80 GB/s",
            "120",
            replicas.save_s(ROUNDED_BYTES, 1, STORAGE_BYTES_PER_S),
            "s",
            f"120 s are 9.6 TB. 14 bytes per parameter are {STATE_BYTES / 1e12:.1f} TB and"
            f" {replicas.save_s(STATE_BYTES, 1, STORAGE_BYTES_PER_S):.0f} s.",
        ),
        SOURCE.check("best interval", "22.5", BEST_S / 60, "min"),
        SOURCE.check("wasted there", "18", 100 * intervals.waste(BEST_S, COST_S, MTBF_S), "%"),
        SOURCE.answer(
            "best interval, exactly",
            exact_s / 60,
            "min",
            "Work between two saves; Young's interval is first order."
            f" Efficiency is {100 * intervals.efficiency(exact_s, COST_S, MTBF_S):.1f} %, and"
            f" {100 * intervals.efficiency(BEST_S, COST_S, MTBF_S):.1f} % at Young's interval.",
        ),
    ]


def _table() -> list[ReproducedFigure]:
    rows: list[ReproducedFigure] = []
    for label, interval_s, saving, redone, overhead, efficiency in TABLE:
        costs = 100 * COST_S / interval_s
        wasted = 100 * intervals.waste(interval_s, COST_S, MTBF_S)
        lost = wasted - costs
        added = abs(wasted - float(overhead)) > 0.05
        why = "The two terms were rounded before they were added." if added else ""
        work_s = interval_s - COST_S
        exact = intervals.efficiency(work_s, COST_S, MTBF_S)
        rows += [
            SOURCE.check(f"save cost, every {label}", saving, costs, "%"),
            SOURCE.check(f"expected loss, every {label}", redone, lost, "%"),
            SOURCE.check(f"overhead, every {label}", overhead, wasted, "%", why, within=0.1),
            SOURCE.check(
                f"efficiency, every {label}", efficiency, 100 - wasted, "%", why, within=0.1
            ),
            SOURCE.answer(
                f"efficiency, every {label}, exactly",
                100 * exact,
                "%",
                "The save is part of the interval, as in the derivation; the table is first order.",
            ),
        ]
    return rows


def _too_long() -> list[ReproducedFigure]:
    wasted = intervals.waste(LONG_S, COST_S, MTBF_S)
    exact = intervals.efficiency(LONG_S, COST_S, MTBF_S)
    within = intervals.efficiency(LONG_S - COST_S, COST_S, MTBF_S)
    return [
        SOURCE.check("save cost, every 4 h", "0.8", 100 * COST_S / LONG_S, "%"),
        SOURCE.check("expected loss, every 4 h", "94.8", 100 * LONG_S / 2 / MTBF_S, "%"),
        SOURCE.check(
            "overhead, every 4 h",
            ">100",
            100 * wasted,
            "%",
            "0.83 % + 94.81 % = 95.65 %; first order does not hold at twice the MTBF.",
        ),
        SOURCE.check_text(
            "efficiency, every 4 h",
            "negative",
            100 * exact,
            "%",
            False,
            f"Efficiency is never negative: {100 * (1 - wasted):.2f} % to first order, 32.9 %"
            f" exactly ({100 * within:.1f} % with the save within the 4 h). The job runs at a third"
            " of its speed.",
        ),
    ]


def _shape() -> list[ReproducedFigure]:
    def points(factor: float) -> float:
        best = intervals.efficiency(intervals.optimum(COST_S, MTBF_S), COST_S, MTBF_S)
        return 100 * (best - intervals.efficiency(factor * BEST_S, COST_S, MTBF_S))

    double = points(2.0)
    half = points(0.5)
    return [
        SOURCE.check_text(
            "efficiency lost with twice the best interval",
            "a few percent",
            double,
            "points",
            double < 5,
            "",
        ),
        SOURCE.check_text(
            "efficiency lost with half the best interval",
            "a few percent",
            half,
            "points",
            half < 5,
            "",
        ),
        SOURCE.check_text(
            "efficiency lost with four times the best interval, over that with a quarter",
            "far worse",
            points(4.0) / points(0.25),
            "x",
            None,
            f"{points(4.0):.1f} points against {points(0.25):.1f}; to first order the two are"
            " equal.",
        ),
        SOURCE.answer(
            "interval shrinks, a save of a tenth",
            math.sqrt(10),
            "x",
            "The square root of the factor by which a save becomes shorter.",
        ),
        SOURCE.check(
            "a save shrinks, disk to host memory",
            "10",
            20 / 0.4,
            "x",
            "From tens of seconds (20 or more) to a few hundred milliseconds (400 or less) is a"
            " factor of 50 or more.",
        ),
    ]


def _state() -> list[ReproducedFigure]:
    one_nic_s = replicas.save_s(STATE_BYTES, 1, NIC_BYTES_PER_S)
    return [
        SOURCE.answer(
            "bytes per parameter",
            BYTES_PER_PARAMETER,
            "bytes",
            "2 for weights, 3 x 4 for Adam's copies; the document's 9.4 TB follow from that.",
        ),
        SOURCE.check(
            "checkpoint over parameter count",
            "16",
            BYTES_PER_PARAMETER,
            "bytes",
            "The listed fields sum to 14; 16 includes gradients, which a checkpoint omits.",
        ),
        SOURCE.check("state of 671B parameters", "9.4", STATE_BYTES / 1e12, "TB"),
        SOURCE.check(
            "state of 671B parameters, rounded",
            "1e1",
            STATE_BYTES / 1e12,
            "TB",
            "Rounded to tens of TB.",
        ),
        SOURCE.check("saved through one NIC", ">30", one_nic_s / 60, "min"),
        SOURCE.check(
            "all ranks' throughput over one NIC's",
            "1e2",
            GPUS,
            "x",
            "2,048 NICs are three orders of magnitude; the storage's 80 GB/s equal"
            f" {STORAGE_BYTES_PER_S / NIC_BYTES_PER_S:.0f} NICs.",
        ),
    ]


def _retention() -> list[ReproducedFigure]:
    count = RUN_S / BEST_S
    return [
        SOURCE.check("checkpoints in 55 days", "35e2", count, "checkpoints"),
        SOURCE.check("bytes of them", "35", count * ROUNDED_BYTES / 1e15, "PB"),
    ]
