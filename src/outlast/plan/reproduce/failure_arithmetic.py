"""Document 001: a textbook's arithmetic of failures, with its exercises answered."""

from __future__ import annotations

import math

from outlast.plan.reproduce import ReproducedFigure, SourceDocument
from outlast.theory import intervals
from outlast.theory.costs import cost_usd
from outlast.theory.failures import (
    DAY_S,
    HOUR_S,
    expected_failures,
    job_mtbf_s,
    no_failure,
    rate_of_daily_probability,
)
from outlast.theory.numerics import find_minimum

SOURCE = SourceDocument(
    "001", "Elastic and fault-tolerant distributed training, 18.1, scalablebook.apartsin.com"
)
RATE_PER_S = rate_of_daily_probability(0.005)
RUN_S = 60 * DAY_S
TABLE = (
    (1, "4788.0", "0.3"),
    (8, "598.5", "2.4"),
    (64, "74.8", "19.2"),
    (512, "9.4", "154.0"),
    (4096, "1.2", "1231.9"),
    (16384, "0.3", "4927.5"),
)


def rows() -> list[ReproducedFigure]:
    """Return all figures of this source."""
    return [*_table(), *_lost(), *_practice(), *_first(), *_second(), *_third()]


def _mtbf_s(gpus: int) -> float:
    return job_mtbf_s(RATE_PER_S, gpus)


def _table() -> list[ReproducedFigure]:
    rows: list[ReproducedFigure] = []
    for gpus, mtbf_h, count in TABLE:
        mtbf_s = _mtbf_s(gpus)
        rows += [
            SOURCE.check(f"MTBF, GPUs: {gpus:,}", mtbf_h, mtbf_s / HOUR_S, "h"),
            SOURCE.check(
                f"failures in 60 days, GPUs: {gpus:,}",
                count,
                expected_failures(mtbf_s, RUN_S),
                "failures",
            ),
        ]
    return rows


def _lost() -> list[ReproducedFigure]:
    gpus = 4096
    mtbf_s = _mtbf_s(gpus)
    failures = expected_failures(mtbf_s, RUN_S)
    scratch = failures * RUN_S / HOUR_S / 2 * gpus
    hourly = failures * 0.5 * gpus
    slower = intervals.segment_s(HOUR_S, 0.0, mtbf_s) / HOUR_S
    first_order = 1 + HOUR_S / mtbf_s / 2
    return [
        SOURCE.check("interruptions of 4,096 GPUs in 60 days", "1231.9", failures, "failures"),
        SOURCE.check("lost without checkpoints, as printed", "3632968665", scratch, "GPU hours"),
        SOURCE.check_text(
            "lost without checkpoints",
            "3632968665",
            math.inf,
            "GPU hours",
            agrees=False,
            why="The run never ends: at an MTBF of"
            f" {mtbf_s / HOUR_S:.2f} h, 60 days without a failure have probability"
            f" e^-{failures:,.0f}. The figure counts the failures of 60 days only.",
        ),
        SOURCE.check("lost with a checkpoint an hour, as printed", "2522895", hourly, "GPU hours"),
        SOURCE.check(
            "lost with a checkpoint an hour",
            "2522895",
            (slower - 1) * RUN_S / HOUR_S * gpus,
            "GPU hours",
            "The figure is first order: it omits failures during redone work."
            f" The run takes {slower:.3f} times its work, not {first_order:.3f} times.",
        ),
        SOURCE.check("reduction, as printed", "1440", scratch / hourly, "x"),
    ]


def _practice() -> list[ReproducedFigure]:
    four_days = no_failure(_mtbf_s(2048), 4 * DAY_S)
    llama = expected_failures(_mtbf_s(16_384), 54 * DAY_S)
    return [
        SOURCE.check_text(
            "chance that 2,048 GPUs run four days without a failure",
            "happened",
            four_days,
            "",
            None,
            "The document reports such a job; at p = 0.005 it would fail every"
            f" {_mtbf_s(2048) / HOUR_S:.1f} h.",
        ),
        SOURCE.check("Llama 3: interruptions, planned and not", "466", 419 + 47, "failures"),
        SOURCE.check(
            "Llama 3: interruptions, by its formula",
            "466",
            llama,
            "failures",
            "p = 0.005 is a teaching figure, ten times Llama 3's rate; 0.0005 would match the"
            " report.",
        ),
        SOURCE.check(
            "Llama 3: interruptions that hardware caused",
            "78",
            100 * 0.78 * 419 / 466,
            "%",
            "The report's 78 % refer to the 419 unexpected interruptions, not to all 466"
            " (arXiv 2407.21783, 3.3.4).",
        ),
    ]


def _first() -> list[ReproducedFigure]:
    gpus = math.floor(_mtbf_s(1) / HOUR_S) + 1
    return [
        SOURCE.answer(
            "exercise 1: fewest GPUs with an MTBF below an hour",
            gpus,
            "GPUs",
            "More GPUs than the MTBF of one GPU has hours, 4,788.0.",
        ),
        SOURCE.check("exercise 1: days between a GPU's faults", "2e2", _mtbf_s(1) / DAY_S, "days"),
    ]


def _second() -> list[ReproducedFigure]:
    mtbf_s = _mtbf_s(4096)
    rows: list[ReproducedFigure] = []
    for label, cost_s, fails_s in (
        ("a save of 1 min", 60.0, mtbf_s),
        ("a save of 5 min", 300.0, mtbf_s),
        ("a save of 1 min, twice the failures", 60.0, mtbf_s / 2),
    ):

        def wasted(interval_s: float, c: float = cost_s, m: float = fails_s) -> float:
            return intervals.waste(interval_s, c, m)

        swept_s = find_minimum(wasted, 1.0, DAY_S)
        exact_s = intervals.optimum(cost_s, fails_s)
        rows += [
            SOURCE.answer(
                f"exercise 2: best interval, {label}",
                swept_s / 60,
                "min",
                "The document gives no save time c. The interval is sqrt(2 c M), first order;"
                f" exactly {exact_s / 60:.1f} min.",
            ),
            SOURCE.answer(
                f"exercise 2: waste there, {label}",
                100 * wasted(swept_s),
                "%",
                "First order, without restarts; the best efficiency is exactly"
                f" {100 * intervals.efficiency(exact_s, cost_s, fails_s):.1f} %.",
            ),
        ]
    return rows


def _third() -> list[ReproducedFigure]:
    gpus = 8000
    window_s = 30 * DAY_S
    usd_per_hour = 2.5
    mtbf_s = _mtbf_s(gpus)
    failures = expected_failures(mtbf_s, window_s)
    budget_h = gpus * window_s / HOUR_S
    recovery_h = failures * 0.25 * gpus
    usd = cost_usd(gpus, recovery_h * HOUR_S / gpus, usd_per_hour)
    scratch_h = failures * window_s / HOUR_S / 2 * gpus
    return [
        SOURCE.answer(
            "exercise 3: interruptions of 8,000 GPUs in 30 days",
            failures,
            "failures",
            f"One every {mtbf_s / 60:.0f} minutes.",
        ),
        SOURCE.answer(
            "exercise 3: spent on recovery",
            recovery_h,
            "GPU hours",
            "15 minutes of all GPUs per interruption.",
        ),
        SOURCE.answer("exercise 3: dollars of that", usd, "USD", "$2.50 a GPU hour."),
        SOURCE.answer(
            "exercise 3: share of the budget",
            100 * recovery_h / budget_h,
            "%",
            "15 of every 36 minutes; training has the rest.",
        ),
        SOURCE.answer(
            "exercise 3: lost from scratch, by the chapter's bound",
            scratch_h,
            "GPU hours",
            "Half the run per interruption.",
        ),
        SOURCE.answer(
            "exercise 3: the same over the budget",
            scratch_h / budget_h,
            "x",
            "More than the budget: the run cannot finish in the window.",
        ),
        SOURCE.answer(
            "exercise 3: chance of 30 days without a failure, as a power of ten",
            -failures / math.log(10),
            "",
            "Without checkpoints the run ends only after 30 days without a failure: never.",
        ),
    ]
