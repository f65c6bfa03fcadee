"""`outlast plan fields` and `outlast plan presets`."""

from __future__ import annotations

from rich.text import Text

from outlast.cli.output_stream import echo, print_json
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.errors import EXIT_DONE
from outlast.plan.model.rates import JOBS_GPUS
from outlast.plan.model.rates import presets as found
from outlast.plan.model.scenario import FIELDS
from outlast.terminal_tables import number_column, table, text_column


def presets(*, json: bool = False) -> int:
    """List published failure rates.

    Prints the source of each, and the MTBF of jobs at that rate. --failures accepts
    their names.

    Parameters
    ----------
    json
        Print one JSON list instead of a table.
    """
    rates = found()
    if json:
        print_json(rates)
        return EXIT_DONE
    figures = ("a GPU and day", "of a GPU", *(f"{gpus:,}" for gpus in JOBS_GPUS))
    grid = table(
        text_column(ratio=1), *(number_column(name, wrap=False) for name in figures), expand=True
    )
    for rate in rates:
        job_mtbfs = (span(rate.job_mtbf_s[gpus]) for gpus in JOBS_GPUS)
        grid.add_row(
            rate.name, f"{100 * rate.per_gpu_day:.3g} %", span(rate.gpu_mtbf_s), *job_mtbfs
        )
    echo(
        "Failures that stop a job: rate of a GPU per day, MTBF of a GPU, MTBF of jobs by"
        " number of GPUs"
    )
    echo(grid)
    for one in rates:
        echo(Text(f"{one.name}: {one.source}", "dim"))
    times = max(rate.per_gpu_day for rate in rates) / min(rate.per_gpu_day for rate in rates)
    echo(
        Text(
            f"They differ {times:.0f}-fold: each is weighted like {rates[0].weight_failures:g}"
            " observed failures. Use your own count: --failures 50kh --failures-seen 40."
        )
    )
    return EXIT_DONE


def fields(*, json: bool = False) -> int:
    """List the fields of a scenario and their defaults.

    They are flags of the other commands, and keys of a TOML file.

    Parameters
    ----------
    json
        Print one JSON list instead of a table.
    """
    if json:
        print_json(
            [
                {
                    "key": f.key,
                    "assumed": f.default or None,
                    "group": f.group,
                    "said": f.description,
                }
                for f in FIELDS
            ]
        )
        return EXIT_DONE
    grid = table(*map(text_column, ("", "field", "assumed", "")))
    group = ""
    for field in FIELDS:
        heading = field.group if field.group != group else ""
        grid.add_row(heading, field.key, field.default or "(required)", field.description)
        group = field.group
    echo(grid)
    return EXIT_DONE
