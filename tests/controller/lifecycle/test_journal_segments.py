"""Entries of a journal that count, where terms have run beside each other."""

from __future__ import annotations

from outlast.controller.inputs import AnyEntry, Opened, TermBegan
from outlast.controller.lifecycle.journal_segments import count_entries, join_segments


def opened(*generations: int) -> list[AnyEntry]:
    return [Opened(generation=each, n=each) for each in generations]


def test_segments_of_earlier_versions_count_as_a_whole() -> None:
    assert join_segments({2: opened(3), 1: opened(1, 2)}) == (*opened(1, 2, 3),)


def test_an_entry_that_was_appended_after_it_was_read_does_not_count() -> None:
    segments = {1: opened(1, 2), 2: [TermBegan(read={1: 1}), *opened(5)]}
    assert join_segments(segments) == (*opened(1), TermBegan(read={1: 1}), *opened(5))


def test_the_newest_term_that_began_decides_for_all_lower_ones() -> None:
    segments: dict[int, list[AnyEntry]] = {1: opened(1, 2, 3), 2: [TermBegan(read={1: 2})]}
    segments[3] = [TermBegan(read=count_entries(segments)), *opened(4)]
    segments[2] += opened(9)  # its owner wakes
    segments[4] = []  # created, and never begun
    assert count_entries(segments) == {1: 2, 2: 1, 3: 2, 4: 0}
    assert [e.generation for e in join_segments(segments) if isinstance(e, Opened)] == [1, 2, 4]


def test_a_segment_that_appears_after_it_was_read_does_not_count() -> None:
    segments = {1: opened(1), 2: opened(8), 3: [TermBegan(read={1: 1})]}
    assert count_entries(segments) == {1: 1, 2: 0, 3: 1}
