"""Lineage of saves: the last save of a job is the newest, and is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.format.manifests import (
    Lineage,
    SavePoint,
    ancestry,
    line_ends,
    resume_lineage,
)
from outlast.checkpoint.upkeep.retention_policy import Keep, KnownCheckpoint, apply_policy

DAY_NS = 86400 * 10**9


def known(place: SavePoint, base: str = "", time_ns: int = 0) -> KnownCheckpoint:
    return KnownCheckpoint(place, time_ns, 1, verified=True, base=base)


class Store:
    """What a directory holds, as one job after the other saves to it."""

    def __init__(self) -> None:
        self.saved: dict[SavePoint, str] = {}
        self.count = 0

    def newest(self) -> SavePoint | None:
        return max(self.saved, key=lambda place: (place.position, place.attempt), default=None)

    def resume(self, loaded: SavePoint | None) -> Lineage:
        base = self.saved.get(loaded, "") if loaded else ""
        return resume_lineage(loaded, base, self.newest(), self.newest())

    def save(self, lineage: Lineage, step: int) -> SavePoint:
        self.count += 1
        place, _, base = lineage.go_on(step, step, f"a{self.count:06d}")
        self.saved[place] = base
        return place

    def prune(self, keep: Keep) -> None:
        items = [known(place, base) for place, base in self.saved.items()]
        for verdict in apply_policy(items, keep, 0):
            if not verdict.keep:
                del self.saved[verdict.place]

    def steps(self) -> list[tuple[int, int]]:
        return sorted((place.line, place.step) for place in self.saved)


def filled(*steps: int) -> Store:
    store = Store()
    lineage = store.resume(None)
    for step in steps:
        store.save(lineage, step)
    return store


def at(store: Store, step: int) -> SavePoint:
    return next(place for place in store.saved if place.step == step)


def test_going_back_keeps_the_new_line_and_the_end_of_the_old_one() -> None:
    store = filled(100, 200, 300)
    lineage = store.resume(at(store, 100))
    for step in (110, 120):
        store.save(lineage, step)
        store.prune(Keep(last=2))
    assert store.steps() == [(0, 300), (1, 110), (1, 120)]
    assert store.newest() == at(store, 120)
    store.prune(Keep(last=2, lines=0))
    assert store.steps() == [(1, 110), (1, 120)]


def test_continuing_from_the_newest_stays_on_its_line() -> None:
    store = filled(100, 200)
    store.save(store.resume(at(store, 200)), 300)
    assert store.steps() == [(0, 100), (0, 200), (0, 300)]


def test_a_new_run_is_newer_than_all_before() -> None:
    store = filled(100, 200)
    store.save(store.resume(None), 10)
    assert store.newest() == at(store, 10)
    assert store.saved[at(store, 10)] == ""


def test_a_save_that_never_ended_is_left_behind() -> None:
    """Its directory is there, without a commit record: it may still get one."""
    store = filled(100)
    newest = store.newest()
    lineage = resume_lineage(newest, "", newest, SavePoint(200, 200, "late"))
    place, parent, base = lineage.go_on(150, 150, "a9")
    assert place.position > SavePoint(200, 200, "late").position
    assert newest and parent == base == newest.directory


def test_a_load_in_the_middle_begins_a_line_once() -> None:
    store = filled(100, 200)
    lineage = store.resume(at(store, 200))
    lineage.loaded(at(store, 100))
    lineage.loaded(at(store, 100))
    store.save(lineage, 250)
    assert store.steps() == [(0, 100), (0, 200), (1, 250)]
    lineage.loaded(at(store, 250))
    store.save(lineage, 300)
    assert store.steps()[-1] == (1, 300)


def test_the_ancestry_of_a_branch_of_a_branch() -> None:
    store = filled(100, 200, 300)
    second = store.resume(at(store, 200))
    for step in (210, 220, 230):
        store.save(second, step)
    store.save(store.resume(at(store, 220)), 225)
    newest_first = sorted(store.saved, key=lambda place: place.position, reverse=True)
    found = ancestry(newest_first, store.saved)
    assert sorted(place.step for place in found) == [100, 200, 210, 220, 225]
    assert [place.step for place in line_ends(newest_first, found)] == [230, 300]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "resume", "back", "new", "load"]),
        st.integers(0, 1000),
    ),
    max_size=40,
)


@given(ACTIONS, st.integers(1, 3), st.none() | st.integers(0, 2))
def test_the_last_save_is_the_newest_and_is_kept(
    actions: list[tuple[str, int]], last: int, lines: int | None
) -> None:
    store, lineage, ran = Store(), Lineage(), list[SavePoint]()
    for action, number in actions:
        there = sorted(store.saved, key=lambda place: place.position)
        some = there[number % len(there)] if there else None
        if action == "save":
            place = store.save(lineage, number)
            ran.append(place)
            assert store.newest() == place
            store.prune(Keep(last=last, lines=lines))
            assert place in store.saved
            # Of what this process has saved, the last ones are there, whatever else is.
            assert set(ran[-last:]) <= store.saved.keys()
        elif action == "load" and some:
            lineage.loaded(some)
            ran.clear()
        else:
            loaded = {"resume": store.newest(), "back": some}.get(action)
            lineage = store.resume(loaded)
            ran.clear()
