"""`outlast plan fields`: list of the fields of a scenario."""

from __future__ import annotations

from rich import box
from rich.table import Table

from outlast.cli.output_stream import as_json, say
from outlast.errors import EXIT_DONE
from outlast.plan.model.scenario import FIELDS


def fields(*, json: bool = False) -> int:
    """List the fields of a scenario and their defaults.

    As flags, or as keys of a TOML file.

    Parameters
    ----------
    json
        One JSON list instead of a table.
    """
    if json:
        as_json([
            {"key": f.key, "assumed": f.default or None, "group": f.group, "said": f.description}
            for f in FIELDS
        ])  # fmt: skip
        return EXIT_DONE
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "field", "assumed", ""):
        table.add_column(name)
    group = ""
    for field in FIELDS:
        table.add_row(
            field.group if field.group != group else "", field.key, field.default or "(say it)",
            field.description,
        )  # fmt: skip
        group = field.group
    say(table)
    return EXIT_DONE
