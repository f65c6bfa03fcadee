"""Tables on narrow terminals: cells are folded or visibly truncated, digits are kept."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outlast.terminal_tables import number_column, table, text_column

FIGURE = "1,234,567,890"


def printed(width: int, *, wrap: bool) -> str:
    grid = table(text_column("node"), number_column("failures", wrap=wrap))
    grid.add_row("node-with-a-name", FIGURE)
    console = Console(file=io.StringIO(), width=width)
    console.print(grid)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", range(4, 40))
def test_a_figure_is_never_cropped_silently(width: int) -> None:
    cut = printed(width, wrap=False)
    assert FIGURE in cut or "\u2026" in cut


@pytest.mark.parametrize("width", range(16, 40))
def test_a_folded_figure_keeps_all_digits(width: int) -> None:
    digits = "".join(each for each in printed(width, wrap=True) if each.isdecimal())
    assert digits == FIGURE.replace(",", "")
