"""Reproduction of the figures of five published documents (docs/reproduce.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from importlib import import_module
from types import ModuleType

import msgspec

from outlast.errors import UsageError

CLOSE = 1e-9  # relative: a figure that ends in exactly half a unit may be rounded either way
# Modules with a SOURCE and its `rows`, imported when they are needed: they import this one.
_MODULES = (
    "scaling_limits",
    "failure_arithmetic",
    "interval_walkthrough",
    "strategy_experiment",
    "research_clusters",
)


class ReproducedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A published figure and its reproduction.

    `says`: the printed figure; text or a bound where it is no number, None where none is printed.
    `ours`: None where it is infinite, which JSON cannot express. `agrees`: None where there is
    nothing to compare. `why`: one or two sentences, empty where the agreement needs none.
    """

    document: str
    quantity: str
    says: float | str | None
    ours: float | None
    unit: str
    agrees: bool | None
    why: str


class SourceDocument(msgspec.Struct, frozen=True):
    """Source of reproduced figures; `key` is the number that selects its rows."""

    key: str
    citation: str

    def check(
        self,
        quantity: str,
        printed: str,
        ours: float,
        unit: str,
        why: str = "",
        *,
        within: float = 0.0,
    ) -> ReproducedFigure:
        """Return a figure that agrees if ours rounds to `printed`: within half a unit of its last
        digit.

        Write a figure given as "about" with its significant digits ("88e4" for 880,000); a prefix
        "<" or ">" makes it a bound. `within`, with a `why`, is the largest error from the
        document's own intermediate rounding.
        """
        if printed[0] in "<>":
            bound = float(printed[1:])
            text = printed
            agrees = ours < bound if printed[0] == "<" else ours > bound
        else:
            exact = Decimal(printed)
            unit_in_last = Decimal(1).scaleb(int(exact.as_tuple().exponent))
            text = float(exact)
            slack = max(float(unit_in_last) / 2, within)
            agrees = abs(ours - text) <= slack + CLOSE * abs(text)
        return self._row(quantity, text, ours, unit, agrees, why)

    def check_text(
        self, quantity: str, printed: str, ours: float, unit: str, agrees: bool | None, why: str
    ) -> ReproducedFigure:
        """Return a figure that the document gives in words; the caller judges the agreement."""
        return self._row(quantity, printed, ours, unit, agrees, why)

    def answer(self, quantity: str, ours: float, unit: str, why: str) -> ReproducedFigure:
        """Return an answer that the document leaves to its reader; `why`: the assumptions."""
        return self._row(quantity, None, ours, unit, None, why)

    def _row(
        self,
        quantity: str,
        says: float | str | None,
        ours: float,
        unit: str,
        agrees: bool | None,
        why: str,
    ) -> ReproducedFigure:
        return ReproducedFigure(
            document=self.key,
            quantity=quantity,
            says=says,
            ours=float(ours) if math.isfinite(ours) else None,
            unit=unit,
            agrees=agrees,
            why=why,
        )


def source_documents() -> dict[str, SourceDocument]:
    """Return the documents by their keys."""
    return {key: module.SOURCE for key, module in _modules().items()}


def rows(keys: Iterable[str] = ()) -> list[ReproducedFigure]:
    """Return the figures of the documents with these keys, in the order of `source_documents`.

    Without a key, of all. Raises UsageError for an unknown key.
    """
    requested = set(keys)
    modules = _modules()
    unknown = sorted(requested - modules.keys())
    if unknown:
        known = ", ".join(
            f"{key} ({source.citation})" for key, source in source_documents().items()
        )
        raise UsageError(f"unknown document {unknown[0]!r}; known are {known}")
    chosen = [module for key, module in modules.items() if not requested or key in requested]
    return [row for module in chosen for row in module.rows()]


def _modules() -> dict[str, ModuleType]:
    modules = [import_module(f"{__name__}.{name}") for name in _MODULES]
    return {module.SOURCE.key: module for module in modules}
