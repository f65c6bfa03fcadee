"""Reproduction of the figures of five published documents (docs/reproduce.md)."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.errors import UsageError
from outlast.plan.reproduce import (
    failure_arithmetic,
    interval_walkthrough,
    research_clusters,
    scaling_limits,
    strategy_experiment,
)
from outlast.plan.reproduce.reproduced_figure import ReproducedFigure, SourceDocument

_MODULES = (
    scaling_limits,
    failure_arithmetic,
    interval_walkthrough,
    strategy_experiment,
    research_clusters,
)
DOCUMENTS: dict[str, SourceDocument] = {module.SOURCE.key: module.SOURCE for module in _MODULES}


def rows(documents: Iterable[str] = ()) -> list[ReproducedFigure]:
    """Return the figures of the documents with these keys, in the order of DOCUMENTS.

    Without a key, of all. Raises UsageError for an unknown key.
    """
    requested = set(documents)
    unknown = sorted(requested - DOCUMENTS.keys())
    if unknown:
        known = ", ".join(f"{one.key} ({one.citation})" for one in DOCUMENTS.values())
        raise UsageError(f"there is no document {unknown[0]!r}; known are {known}")
    chosen = [module for module in _MODULES if not requested or module.SOURCE.key in requested]
    return [row for module in chosen for row in module.rows()]
