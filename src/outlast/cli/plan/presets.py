"""`outlast plan presets`: the published failure rates."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from outlast.cli.output_stream import as_json, say
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.errors import EXIT_DONE
from outlast.plan.model.rates import JOBS_GPUS
from outlast.plan.model.rates import presets as found


def presets(*, json: bool = False) -> int:
    """List published failure rates.

    Where each is from, and what it means for a job; --failures takes them by
    name.

    Parameters
    ----------
    json
        One JSON list instead of a table.
    """
    rates = found()
    if json:
        as_json(rates)
        return EXIT_DONE
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", expand=True)
    table.add_column("", ratio=1)
    for name in ("a GPU and day", "of a GPU", *(f"{gpus:,}" for gpus in JOBS_GPUS)):
        table.add_column(name, justify="right", no_wrap=True)
    for one in rates:
        table.add_row(
            one.name, f"{100 * one.per_gpu_day:.3g} %", span(one.gpu_mtbf_s),
            *(span(one.job_mtbf_s[gpus]) for gpus in JOBS_GPUS),
        )  # fmt: skip
    say("Failures that stop a job: how often, and time between them of a GPU and of jobs")
    say(table)
    for one in rates:
        say(Text(f"{one.name}: {one.source}", "dim"))
    times = max(one.per_gpu_day for one in rates) / min(one.per_gpu_day for one in rates)
    say(Text(
        f"They differ {times:.0f}-fold, so that none is sure: each is taken for known as if from"
        f" {rates[0].weight_failures:g} failures. Count your own: --failures 50kh"
        " --failures-seen 40."
    ))  # fmt: skip
    return EXIT_DONE
