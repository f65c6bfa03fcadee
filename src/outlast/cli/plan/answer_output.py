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


def show(answer: Answer, *, json: bool) -> None:
    """Print the whole answer, as one JSON object or for people."""
    if json:
        print_json(answer)
        return
    echo(Text(answer.question, "bold"))
    echo(Text(f"failures: {answer.failures}", "dim"))
    echo(quantity_table(answer.quantities))
    remarks(answer)


def quantity_table(quantities: list[Quantity]) -> Table:
    """Return a table of quantities with their 90 % band and source."""
    grid = table(
        text_column(), number_column("figure"), number_column("90 % band"), text_column("source")
    )
    for quantity in quantities:
        source = f"{quantity.how}: {quantity.source}" if quantity.source else quantity.how
        counted = (
            f" {quantity.unit}"
            if quantity.unit in COUNTED and math.isfinite(quantity.value)
            else ""
        )
        grid.add_row(
            quantity.name,
            format_quantity(quantity.value, quantity.unit) + counted,
            band(quantity),
            source,
        )
    return grid


def remarks(answer: Answer | Sizing) -> None:
    """Print warnings and assumptions."""
    for warning in answer.warnings:
        echo(Text(f"warning: {warning}", "yellow"))
    if answer.assumed:
        texts = ", ".join(f"--{assumption.key} {assumption.text}" for assumption in answer.assumed)
        echo(Text(f"assumed: {texts}", "dim"))


def band(quantity: Quantity) -> str:
    """Format the 90 % band of a quantity; "" where it has none."""
    if quantity.low is None or quantity.high is None:
        return ""
    ends = (format_quantity(end, quantity.unit) for end in (quantity.low, quantity.high))
    return " to ".join(ends)


def check_fields(fields: dict[str, str], command: Callable[..., int]) -> dict[str, str]:
    """Return the fields. Raises UsageError for a misspelt flag of the command's own."""
    own = [
        parameter.name
        for parameter in signature(command).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
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
