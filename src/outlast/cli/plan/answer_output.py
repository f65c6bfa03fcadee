"""Output of answers: figures with units, tables, assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

from rich.table import Table
from rich.text import Text

from outlast.cli.output_stream import echo, print_json
from outlast.errors import UsageError
from outlast.plan.model.answer_values import Answer, Quantity, format_quantity
from outlast.plan.model.model_sizing import Sizing
from outlast.plan.model.scenario import KEYS
from outlast.terminal_tables import number_column, table, text_column

COUNTED = ("GPUs", "nodes")
FORMATS = (".svg", ".png", ".pdf")


def show(found: Answer, *, json: bool) -> None:
    """Print the whole answer, as one JSON object or for people."""
    if json:
        print_json(found)
        return
    echo(Text(found.question, "bold"))
    echo(Text(f"failures: {found.failures}", "dim"))
    echo(quantity_table(found.quantities))
    remarks(found)


def quantity_table(quantities: list[Quantity]) -> Table:
    """Return a table of quantities with their 90 % band and source."""
    grid = table(
        text_column(), number_column("figure"), number_column("90 % band"), text_column("source")
    )
    for one in quantities:
        source = f"{one.how}: {one.source}" if one.source else one.how
        counted = f" {one.unit}" if one.unit in COUNTED and math.isfinite(one.value) else ""
        grid.add_row(one.name, format_quantity(one.value, one.unit) + counted, band(one), source)
    return grid


def remarks(found: Answer | Sizing) -> None:
    """Print warnings and assumptions."""
    for warning in found.warnings:
        echo(Text(f"warning: {warning}", "yellow"))
    if found.assumed:
        texts = ", ".join(f"--{one.key} {one.text}" for one in found.assumed)
        echo(Text(f"assumed: {texts}", "dim"))


def band(one: Quantity) -> str:
    """Format the 90 % band of a quantity; "" where it has none."""
    if one.low is None or one.high is None:
        return ""
    return f"{format_quantity(one.low, one.unit)} to {format_quantity(one.high, one.unit)}"


def check_fields(fields: dict[str, str], command: Callable[..., int]) -> dict[str, str]:
    """Return the fields. Raises UsageError for a misspelt flag of the command's own."""
    own = [
        one.name for one in signature(command).parameters.values() if one.kind is one.KEYWORD_ONLY
    ]
    for name in fields:
        key = name.replace("_", "-")
        close = get_close_matches(key, [*KEYS, *own], n=1)
        if key not in KEYS and close and close[0] in own:
            raise UsageError(f"unknown flag --{key}; did you mean --{close[0]}?")
    return fields


def check_picture(path: Path | None, *modules: str) -> Path | None:
    """Check a figure's path before anything is computed, and return it.

    `modules`: the modules that the figure needs besides matplotlib. Raises UsageError;
    ModuleNotFoundError where one is not installed.
    """
    if path is None:
        return None
    for name in ("matplotlib", *modules):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if path.suffix not in FORMATS:
        raise UsageError(f"--figure {path}: the suffix must be one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--figure {path}: there is no directory {path.absolute().parent}")
    if path.is_dir():
        raise UsageError(f"--figure {path} is a directory")
    return path
