"""Commands that formulas answer: `outlast plan interval`, `ettr`, `replicas`, `spares`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from outlast import quantities
from outlast.cli.output_stream import echo, print_json
from outlast.cli.plan.scenario_command import (
    Fields,
    File,
    Json,
    check_fields,
    check_picture,
    quantity_table,
    remarks,
    show,
)
from outlast.errors import EXIT_DONE
from outlast.plan.answers import formula_answers
from outlast.plan.answers.copy_counts import CopiesRow, memory_copies
from outlast.plan.answers.formula_answers import best_interval
from outlast.plan.answers.spare_nodes import SparesRow, spare_nodes
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import scenario_of, span
from outlast.terminal_tables import number_column, table, text_column

HARDLY = 1e-6  # of time: a minute in two years; far below, figures underflow to 0


def interval(
    file: File = None,
    /,
    *,
    strategy: Strategy = "checkpoint-restart",
    json: Json = False,
    figure: Path | None = None,
    **fields: Fields,
) -> int:
    """Compute the best checkpoint interval and the cost of others.

    Parameters
    ----------
    strategy
        Recovery strategy after a failure.
    figure
        Draw goodput by checkpoint interval into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure, "numba")  # it shows runs beside theory
    scenario = scenario_of(check_fields(fields, interval), file)
    show(best_interval(scenario, strategy), json=json)
    if path:
        from outlast.plan.figures.interval_figures import draw_goodput

        draw_goodput(scenario, strategy, path)
    return EXIT_DONE


def ettr(
    file: File = None,
    /,
    *,
    target: str | None = None,
    queue: str = "0",
    json: Json = False,
    figure: Path | None = None,
    **fields: Fields,
) -> int:
    """Compute ETTR, the share of time spent training.

    Effective training time ratio of checkpoint-restart, by each published formula.

    Parameters
    ----------
    target
        ETTR to reach, for example 0.9: prints the interval, restart time and failure rate that it
        needs.
    queue
        Queue time after each failure, for example 10min.
    figure
        Draw ETTR by interval and failure rate into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure)
    scenario = scenario_of(check_fields(fields, ettr), file)
    queue_s = span(f"--queue {queue}", queue)
    goal = None if target is None else quantities.share(f"--target {target}", target)
    show(formula_answers.ettr(scenario, goal, queue_s), json=json)
    if path:
        from outlast.plan.figures.interval_figures import draw_ettr

        draw_ettr(scenario, queue_s, path)
    return EXIT_DONE


def replicas(file: File = None, /, *, json: Json = False, **fields: Fields) -> int:
    """Compare numbers of in-memory copies: losses, memory, network.

    Also prints how often all copies are lost, and the limits of scaling.
    """
    answer = memory_copies(scenario_of(check_fields(fields, replicas), file))
    if json:
        print_json(answer)
        return EXIT_DONE
    echo(Text(answer.question, "bold"))
    echo(Text(f"failures: {answer.failures}", "dim"))
    echo(_copies_table(answer.rows))
    echo(quantity_table(answer.quantities))
    remarks(answer)
    return EXIT_DONE


def _copies_table(rows: Sequence[CopiesRow]) -> Table:
    figures = ("copies", "all lost every", "in a run", "by Epoch AI")
    costs = ("memory a GPU", "network a GPU", "goodput")
    grid = table(*map(number_column, (*figures, *costs)))
    for row in rows:
        grid.add_row(
            str(row.copies),
            format_quantity(row.lost_every_s, "s"),
            format_quantity(row.losses, "times"),
            format_quantity(row.epoch_losses, "times"),
            format_quantity(row.memory_per_gpu_bytes, "bytes"),
            format_quantity(row.network_per_gpu_bytes_per_s, "bytes/s"),
            format_quantity(row.goodput, "share"),
        )
    return grid


def spares(
    file: File = None, /, *, json: Json = False, figure: Path | None = None, **fields: Fields
) -> int:
    """Compute the number of spare nodes with the lowest cost.

    For a job that waits without spares, and for one that continues with fewer
    nodes.

    Parameters
    ----------
    figure
        Draw waiting time and cost by number of spares into this file (.svg, .png, .pdf).
    """
    path = check_picture(figure)
    scenario = scenario_of(check_fields(fields, spares), file)
    answer = spare_nodes(scenario)
    if json:
        print_json(answer)
    else:
        echo(Text(answer.question, "bold"))
        echo(Text(f"failures: {answer.failures}", "dim"))
        echo(quantity_table(answer.quantities))
        echo(_spares_table(answer.rows))
        for sentence in answer.conclusions:
            echo(Text(sentence))
        remarks(answer)
    if path:
        from outlast.plan.figures.cost_figures import draw_spares

        draw_spares(scenario, path)
    return EXIT_DONE


def _spares_table(rows: Sequence[SparesRow]) -> Table:
    figures = ("spares", "short", "job\nwaits", "at a\ncost", "goes on\nat", "at a\ncost")
    grid = table(*(number_column(name, wrap=False) for name in figures), text_column())
    for row in rows:
        grid.add_row(
            f"{row.spares:,}",
            _share(row.short),
            _share(row.stalled),
            format_quantity(row.stalling_usd, "USD"),
            _share(row.up),
            format_quantity(row.dropping_usd, "USD"),
            Text("\n".join(row.names)),
        )
    return grid


def _share(value: float) -> str:
    return "hardly" if value < HARDLY else format_quantity(value, "share")
