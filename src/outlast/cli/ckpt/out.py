"""The tables of `outlast ckpt`."""

from __future__ import annotations

from rich.table import Table


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(show_edge=False, pad_edge=False, box=None, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made
