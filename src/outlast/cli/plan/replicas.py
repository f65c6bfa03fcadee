"""`outlast plan replicas`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from outlast.cli.plan.flags import Fields, File, Json
from outlast.cli.plan.saying import known, remarks, table
from outlast.cli.stream import as_json, say
from outlast.errors import EXIT_DONE
from outlast.plan.replicas import Copies
from outlast.plan.replicas import replicas as answered
from outlast.plan.scenario import scenario_of
from outlast.plan.words import figure


def replicas(file: File = None, /, *, json: Json = False, **fields: Fields) -> int:
    """How many copies in memory, and how far they carry.

    How often the last one is lost, and what copies take.
    """
    found = answered(scenario_of(known(fields, replicas), file))
    if json:
        as_json(found)
        return EXIT_DONE
    say(Text(found.question, "bold"))
    say(Text(f"failures: {found.failures}", "dim"))
    say(_rows(found.rows))
    say(table(found.quantities))
    remarks(found)
    return EXIT_DONE


def _rows(rows: Sequence[Copies]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in ("copies", "all lost every", "in a run", "by Epoch AI", "memory a GPU",
                 "network a GPU", "goodput"):  # fmt: skip
        shown.add_column(name, justify="right")
    for one in rows:
        shown.add_row(
            str(one.copies), figure(one.lost_every_s, "s"), figure(one.losses, "times"),
            figure(one.epoch_losses, "times"), figure(one.memory_per_gpu_bytes, "bytes"),
            figure(one.network_per_gpu_bytes_per_s, "bytes/s"), figure(one.goodput, "share"),
        )  # fmt: skip
    return shown
