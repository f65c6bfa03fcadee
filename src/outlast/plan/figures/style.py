"""How figures look: in print, in grey, and to those who see few colours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from outlast.core.reasons import span
from outlast.drafts import draft_of
from outlast.errors import StorageError
from outlast.plan.ladders import Strategy

WIDTH_INCH, HEIGHT_INCH = 6.4, 4.0
# Okabe and Ito's colours, told apart by line and marker as well.
LOOK: dict[Strategy, tuple[str, str, str]] = {
    "checkpoint-restart": ("#d55e00", "-", "o"),
    "peer-memory": ("#e69f00", "--", "s"),
    "migrate": ("#0072b2", "-.", "^"),
    "drop": ("#999999", ":", "v"),
    "outlast": ("#009e73", "-", "D"),
}
_RC: Any = {  # matplotlib keeps the type of these keys to itself
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # two prices in a text are no formula
    "svg.hashsalt": "outlast",
}

_TICKS_S = (
    *(0.01, 0.1, 1, 2, 5, 10, 30), *(60 * many for many in (1, 2, 5, 10, 30)),
    *(3600 * many for many in (1, 3, 12)), *(86400 * many for many in (1, 3, 10, 30, 100, 365)),
)  # fmt: skip


def spans(axis: Axis, low_s: float, high_s: float) -> None:
    """Ticks of a logarithmic axis in seconds, where people would set them."""
    axis.set_ticks([one for one in _TICKS_S if low_s <= one <= high_s])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: span(value)))


def save(path: Path, fill: Callable[[Figure], None], height_inch: float = HEIGHT_INCH) -> None:
    """A figure that `fill` draws into, written to `path` by its suffix; the same bytes each time.
    It appears whole or not at all. Raises StorageError when it cannot be written."""
    draft = draft_of(path)
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(WIDTH_INCH, height_inch), layout="constrained")
        fill(figure)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(draft, format=path.suffix[1:], metadata=metadata, dpi=200)
            draft.replace(path)
        except OSError as error:
            raise StorageError(
                f"--figure {path} could not be drawn: {error.strerror or error}"
            ) from error
        finally:
            draft.unlink(missing_ok=True)  # Ctrl-C as well
