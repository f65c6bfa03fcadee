"""Tables of all commands: one appearance, columns of text and of figures."""

from __future__ import annotations

from rich import box
from rich.console import OverflowMethod
from rich.table import Column, Table


def text_column(
    title: str = "",
    *,
    wrap: bool = True,
    style: str = "",
    ratio: int | None = None,
    width_max: int | None = None,
) -> Column:
    """Return a column of text, aligned to the left.

    A text that is too long is folded; with `wrap` false it is cut, and ends in an ellipsis.
    `ratio`: its part of the width of an expanded table. `width_max`: in characters.
    """
    return Column(
        title,
        overflow=_overflow(wrap=wrap),
        no_wrap=not wrap,
        style=style,
        ratio=ratio,
        max_width=width_max,
    )


def number_column(
    title: str = "", *, wrap: bool = True, style: str = "", width_max: int | None = None
) -> Column:
    """Return a column of figures, aligned to the right. `width_max`: in characters.

    A figure that is too long is folded; with `wrap` false it is cut, and ends in an ellipsis.
    """
    return Column(
        title,
        justify="right",
        overflow=_overflow(wrap=wrap),
        no_wrap=not wrap,
        style=style,
        max_width=width_max,
    )


def _overflow(*, wrap: bool) -> OverflowMethod:
    # Without wrapping, rich would crop a folded text: 1,234,567 would read 1,234.
    return "fold" if wrap else "ellipsis"


def table(*columns: Column, title: str = "", expand: bool = False) -> Table:
    """Return an empty table with these columns and a rule below their titles.

    `expand`: as wide as the terminal; otherwise as wide as its contents.
    """
    return Table(
        *columns,
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        expand=expand,
    )


def listing(*columns: Column) -> Table:
    """Return an empty table without a rule: one line of output is one row, as `ls -l` prints."""
    return Table(*columns, box=None, pad_edge=False, show_edge=False)


def layout_grid(*columns: Column) -> Table:
    """Return an empty table without titles and rule, for names beside their values."""
    return Table(
        *columns,
        box=None,
        padding=(0, 2),
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
        show_header=False,
    )
