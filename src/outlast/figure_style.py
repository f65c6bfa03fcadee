"""Style of figures: readable in print, in grey, and with colour blindness.

Needs matplotlib (extra `figures`); nothing imports this module at load.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from outlast.atomic_files import open_draft
from outlast.errors import StorageError

WIDTH_INCH, HEIGHT_INCH = 6.4, 4.0
RC: Any = {  # matplotlib keeps the type of these keys to itself
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # two prices in a text are no formula
    "svg.hashsalt": "outlast",
}


def save(path: Path, fill: Callable[[Figure], None], height_inch: float = HEIGHT_INCH) -> None:
    """Write a figure that `fill` draws to `path`, in the format of its suffix.

    The same input gives the same bytes. The file appears complete or not at all. Raises
    StorageError when it cannot be written.
    """
    with mpl.rc_context(RC):
        figure = _filled(fill, height_inch)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        try:
            with open_draft(path) as draft:
                figure.savefig(draft, format=path.suffix[1:], metadata=metadata, dpi=200)
        except OSError as error:
            raise StorageError(
                f"--figure {path} could not be drawn: {error.strerror or error}"
            ) from error


def svg(fill: Callable[[Figure], None], name: str, height_inch: float = HEIGHT_INCH) -> str:
    """Return a figure as an SVG element for a page, with its texts as text.

    `name` keeps its identifiers apart from those of other figures.
    """
    text = io.StringIO()
    with mpl.rc_context({**RC, "svg.fonttype": "none"}):
        _filled(fill, height_inch).savefig(text, format="svg", metadata={"Date": None})
    _, tag, rest = text.getvalue().partition("<svg")
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", tag + rest)


def _filled(fill: Callable[[Figure], None], height_inch: float) -> Figure:
    figure = Figure(figsize=(WIDTH_INCH, height_inch), layout="constrained")
    fill(figure)
    return figure
