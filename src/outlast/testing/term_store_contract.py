"""Contract of stores of terms: subclass it and give it the store to test.

    class TestMyStore(TermStoreContract):
        @pytest.fixture
        def store(self) -> TermStore:
            return MyStore(...)

Needs pytest. Each test gets an empty store of its own.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outlast.launch.terms.term_store import VALUE_BYTES_MAX, TermStore

CALLERS = 16
PUTS = 50
WITHIN_S = 60.0


class TermStoreContract:
    """Tests of the promises of `outlast.launch.terms.term_store.TermStore`."""

    @pytest.fixture
    def store(self) -> TermStore:
        """Return an empty store; subclasses override it."""
        pytest.fail("a subclass of TermStoreContract must have a fixture `store`")

    def test_an_empty_store_has_no_values(self, store: TermStore) -> None:
        """Nothing is there before the first write, and the store has a name."""
        assert store.where
        assert store.get("term-000001") is None

    def test_a_created_value_is_there_for_good(self, store: TermStore) -> None:
        """A second `create` with another value returns False and changes nothing."""
        assert store.create("term-000001", b"first")
        assert not store.create("term-000001", b"second")
        assert store.get("term-000001") == b"first"

    def test_a_repeated_create_of_one_value_is_its_own(self, store: TermStore) -> None:
        """A caller that repeats a call whose answer was lost learns that it owns the name."""
        assert store.create("term-000001", b"mine")
        assert store.create("term-000001", b"mine")

    def test_a_put_value_replaces_the_one_before(self, store: TermStore) -> None:
        """`put` creates and replaces."""
        for value in (b"1", b"a longer one", b""):
            store.put("beat-000001", value)
            assert store.get("beat-000001") == value

    def test_names_are_apart(self, store: TermStore) -> None:
        """A name that begins with another one is another name."""
        store.put("beat-1", b"one")
        store.put("beat-11", b"eleven")
        assert (store.get("beat-1"), store.get("beat-11")) == (b"one", b"eleven")
        assert store.get("beat") is None

    def test_large_values_come_back_whole(self, store: TermStore) -> None:
        """Any bytes up to the limit are kept as they are."""
        value = bytes(range(256)) * (VALUE_BYTES_MAX // 256)
        store.put("beat-000001", value)
        assert store.create("term-000001", value)
        assert store.get("beat-000001") == store.get("term-000001") == value

    def test_one_of_many_callers_creates(self, store: TermStore) -> None:
        """Check that one of concurrent callers creates a term, and that all read its value."""
        for term in range(10):
            name = f"term-{term:06d}"
            start = threading.Barrier(CALLERS)

            def claim(caller: int, name: str = name, start: threading.Barrier = start) -> bool:
                start.wait(WITHIN_S)
                return store.create(name, b"caller %d" % caller)

            with ThreadPoolExecutor(CALLERS) as pool:
                owners = [at for at, won in enumerate(pool.map(claim, range(CALLERS))) if won]
            assert len(owners) == 1
            assert store.get(name) == b"caller %d" % owners[0]

    def test_a_reader_sees_whole_values_in_order(self, store: TermStore) -> None:
        """A reader beside the writer gets a complete value, never an older one than before."""
        store.put("beat-000001", b"0" * 1000)
        ended = threading.Event()

        def write() -> None:
            for count in range(1, PUTS):
                store.put("beat-000001", b"%d" % (count % 10) * (1000 + count))
            ended.set()

        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write)
            newest = 0
            while not ended.is_set() and not written.done():
                value = store.get("beat-000001")
                assert value is not None
                count = len(value) - 1000
                assert value == b"%d" % (count % 10) * (1000 + count) and count >= newest
                newest = count
            written.result(WITHIN_S)
        assert store.get("beat-000001") == b"%d" % ((PUTS - 1) % 10) * (1000 + PUTS - 1)
