"""Segments of a run's journal, one for each term, and the entries of them that count.

An owner that was stopped may append to its segment after a later term has read it. So each term
begins its own segment with `TermBegan`: how many entries of each lower term it has read. Entries
behind them were never acted on, and no later term reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast.controller.inputs import AnyEntry, TermBegan


def join_segments(segments: Mapping[int, Sequence[AnyEntry]]) -> tuple[AnyEntry, ...]:
    """Return the entries that count, oldest first, from all entries of each term."""
    counts = count_entries(segments)
    return tuple(entry for term in sorted(counts) for entry in segments[term][: counts[term]])


def count_entries(segments: Mapping[int, Sequence[AnyEntry]]) -> dict[int, int]:
    """Return how many entries of each term count: `TermBegan.read` of the next term.

    The newest segment that begins with TermBegan decides for all lower ones. A term without it is
    an earlier version's, whose launchers never ran beside each other, or has not acted.
    """
    for term in sorted(segments, reverse=True):
        first = segments[term][0] if segments[term] else None
        if isinstance(first, TermBegan):
            lower = {each: first.read.get(each, 0) for each in segments if each < term}
            return lower | {each: len(segments[each]) for each in segments if each >= term}
    return {term: len(entries) for term, entries in segments.items()}
