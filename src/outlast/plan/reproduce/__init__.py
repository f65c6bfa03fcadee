"""Every figure that follows from others in five published documents, computed again by
`outlast.theory` (docs/reproduce.md)."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.errors import UsageError
from outlast.plan.reproduce import clusters, experiment, scaling, unreliability, walkthrough
from outlast.plan.reproduce.row import Document, Row

_MODULES = (scaling, unreliability, walkthrough, experiment, clusters)
DOCUMENTS: dict[str, Document] = {module.SOURCE.key: module.SOURCE for module in _MODULES}


def rows(documents: Iterable[str] = ()) -> list[Row]:
    """The figures of the documents with these keys, in the order of DOCUMENTS; without a key, of
    all. Raises UsageError for a key that there is not."""
    asked = set(documents)
    unknown = sorted(asked - DOCUMENTS.keys())
    if unknown:
        known = ", ".join(f"{one.key} ({one.citation})" for one in DOCUMENTS.values())
        raise UsageError(f"there is no document {unknown[0]!r}; known are {known}")
    chosen = [module for module in _MODULES if not asked or module.SOURCE.key in asked]
    return [row for module in chosen for row in module.rows()]
