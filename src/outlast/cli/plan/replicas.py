"""`outlast plan replicas`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from outlast.cli.output_stream import as_json, say
from outlast.cli.plan.answer_output import check_fields, remarks, table
from outlast.cli.plan.scenario_flags import Fields, File, Json
from outlast.errors import EXIT_DONE
from outlast.plan.answers.copy_counts import CopiesRow
from outlast.plan.answers.copy_counts import memory_copies as answered
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.scenario import scenario_of


def replicas(file: File = None, /, *, json: Json = False, **fields: Fields) -> int:
    """Compare numbers of in-memory copies: losses, memory, network.

    Also prints how often the last copy is lost, and the limits of scaling.
    """
    found = answered(scenario_of(check_fields(fields, replicas), file))
    if json:
        as_json(found)
        return EXIT_DONE
    say(Text(found.question, "bold"))
    say(Text(f"failures: {found.failures}", "dim"))
    say(_rows(found.rows))
    say(table(found.quantities))
    remarks(found)
    return EXIT_DONE


def _rows(rows: Sequence[CopiesRow]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in ("copies", "all lost every", "in a run", "by Epoch AI", "memory a GPU",
                 "network a GPU", "goodput"):  # fmt: skip
        grid.add_column(name, justify="right")
    for one in rows:
        grid.add_row(
            str(one.copies),
            format_quantity(one.lost_every_s, "s"),
            format_quantity(one.losses, "times"),
            format_quantity(one.epoch_losses, "times"),
            format_quantity(one.memory_per_gpu_bytes, "bytes"),
            format_quantity(one.network_per_gpu_bytes_per_s, "bytes/s"),
            format_quantity(one.goodput, "share"),
        )
    return grid
