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
        SOURCE.says("time between failures, 2,048 GPUs", "2", MTBF_S / HOUR_S, "h"),
        SOURCE.says(
            "failures in 55 days",
            "660",
            expected_failures(MTBF_S, RUN_S),
            "failures",
            "55 x 24 / 2 in the web edition: it goes on with 2 hours, 2.11 give 626.",
            within=expected_failures(2 * HOUR_S, RUN_S) - expected_failures(MTBF_S, RUN_S),
        ),
        SOURCE.says("Llama 3: time between failures", "3", llama_s / HOUR_S, "h"),
        SOURCE.says(
            "interval shrinks, MTBF 4 h to 1 h",
            "2",
            intervals.young(COST_S, 4 * HOUR_S) / intervals.young(COST_S, HOUR_S),
            "x",
        ),
    ]


def _best() -> list[ReproducedFigure]:
    exact_s = intervals.optimum(COST_S, MTBF_S)
    return [
        SOURCE.says("time of a save, in its table", "120", 0.4 * 300, "s"),
        SOURCE.says(
            "time of a save, 10 TB at 80 GB/s",
            "120",
            replicas.save_s(ROUNDED_BYTES, 1, STORAGE_BYTES_PER_S),
            "s",
            f"120 s are 9.6 TB. Its 14 bytes a parameter make {STATE_BYTES / 1e12:.1f} TB and"
            f" {replicas.save_s(STATE_BYTES, 1, STORAGE_BYTES_PER_S):.0f} s.",
        ),
        SOURCE.says("best interval", "22.5", BEST_S / 60, "min"),
        SOURCE.says("wasted there", "18", 100 * intervals.waste(BEST_S, COST_S, MTBF_S), "%"),
        SOURCE.asks(
            "best interval, exactly",
            exact_s / 60,
            "min",
            "Of work between two saves; Young's is the first order."
            f" Efficiency is {100 * intervals.efficiency(exact_s, COST_S, MTBF_S):.1f} % there and"
            f" {100 * intervals.efficiency(BEST_S, COST_S, MTBF_S):.1f} % at Young's.",
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
            SOURCE.says(f"save cost, every {label}", saving, costs, "%"),
            SOURCE.says(f"expected loss, every {label}", redone, lost, "%"),
            SOURCE.says(f"overhead, every {label}", overhead, wasted, "%", why, within=0.1),
            SOURCE.says(
                f"efficiency, every {label}", efficiency, 100 - wasted, "%", why, within=0.1
            ),
            SOURCE.asks(
                f"efficiency, every {label}, exactly",
                100 * exact,
                "%",
                "The save counted into the interval, as its derivation does; the table is first"
                " order.",
            ),
        ]
    return rows


def _too_long() -> list[ReproducedFigure]:
    wasted = intervals.waste(LONG_S, COST_S, MTBF_S)
    exact = intervals.efficiency(LONG_S, COST_S, MTBF_S)
    within = intervals.efficiency(LONG_S - COST_S, COST_S, MTBF_S)
    return [
        SOURCE.says("save cost, every 4 h", "0.8", 100 * COST_S / LONG_S, "%"),
        SOURCE.says("expected loss, every 4 h", "94.8", 100 * LONG_S / 2 / MTBF_S, "%"),
        SOURCE.says(
            "overhead, every 4 h",
            ">100",
            100 * wasted,
            "%",
            "0.83 % and 94.81 % make 95.65 %; and first order does not hold at twice the time"
            " between failures.",
        ),
        SOURCE.words(
            "efficiency, every 4 h",
            "negative",
            100 * exact,
            "%",
            False,
            f"It cannot be negative: {100 * (1 - wasted):.2f} % first order, 32.9 % exactly"
            f" ({100 * within:.1f} % with the save within the 4 h). The job gets through, at a"
            " third of its speed.",
        ),
    ]


def _shape() -> list[ReproducedFigure]:
    def points(factor: float) -> float:
        best = intervals.efficiency(intervals.optimum(COST_S, MTBF_S), COST_S, MTBF_S)
        return 100 * (best - intervals.efficiency(factor * BEST_S, COST_S, MTBF_S))

    double = points(2.0)
    half = points(0.5)
    return [
        SOURCE.words(
            "efficiency lost with twice the best interval",
            "a few percent",
            double,
            "points",
            double < 5,
            "",
        ),
        SOURCE.words(
            "efficiency lost with half the best interval",
            "a few percent",
            half,
            "points",
            half < 5,
            "",
        ),
        SOURCE.words(
            "efficiency lost with four times the best interval, over that with a quarter",
            "far worse",
            points(4.0) / points(0.25),
            "x",
            None,
            f"{points(4.0):.1f} points against {points(0.25):.1f}; to first order the two are"
            " equal.",
        ),
        SOURCE.asks(
            "interval shrinks, a save of a tenth",
            math.sqrt(10),
            "x",
            "The root of the factor by which a save becomes shorter.",
        ),
        SOURCE.says(
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
        SOURCE.asks(
            "bytes per parameter",
            BYTES_PER_PARAMETER,
            "bytes",
            "Weights in 2, three of Adam's in 4 bytes each; its 9.4 TB follow from that.",
        ),
        SOURCE.says(
            "checkpoint over parameter count",
            "16",
            BYTES_PER_PARAMETER,
            "bytes",
            "The fields that it lists sum to 14; 16 counts gradients, which a checkpoint leaves"
            " out.",
        ),
        SOURCE.says("state of 671B parameters", "9.4", STATE_BYTES / 1e12, "TB"),
        SOURCE.says(
            "state of 671B parameters, rounded",
            "1e1",
            STATE_BYTES / 1e12,
            "TB",
            "Rounded to tens of TB.",
        ),
        SOURCE.says("saved through one NIC", ">30", one_nic_s / 60, "min"),
        SOURCE.says(
            "all ranks' throughput over one NIC's",
            "1e2",
            GPUS,
            "x",
            "2,048 NICs are three orders of magnitude, and the 80 GB/s of its storage are"
            f" {STORAGE_BYTES_PER_S / NIC_BYTES_PER_S:.0f} NICs.",
        ),
    ]


def _retention() -> list[ReproducedFigure]:
    count = RUN_S / BEST_S
    return [
        SOURCE.says("checkpoints in 55 days", "35e2", count, "checkpoints"),
        SOURCE.says("bytes of them", "35", count * ROUNDED_BYTES / 1e15, "PB"),
    ]
