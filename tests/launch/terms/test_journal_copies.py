"""Copies of journals in a store of terms: what a later owner reads of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from outlast.checkpoint.stores.folder_store import Folder
from outlast.controller.inputs import AnyEntry, TermBegan
from outlast.errors import StorageError
from outlast.launch.run_journal import read_segments
from outlast.launch.terms.journal_copies import PIECE_BYTES, JournalCopy, fetch_journals
from outlast.launch.terms.term_store import CheckpointStoreTerms
from outlast.telemetry.segment_files import SegmentWriter, read_records


class LossyStore(CheckpointStoreTerms):
    """A store whose next `lost` answers to `create` are lost; the first of `refused` fail."""

    lost = refused = 0

    def create(self, name: str, value: bytes) -> bool:
        if self.refused:
            self.refused -= 1
            raise StorageError("the store is away")
        found = super().create(name, value)
        if self.lost:
            self.lost -= 1
            raise StorageError("the answer is lost")
        return found


def store_in(folder: Path) -> LossyStore:
    return LossyStore(Folder(folder), "terms-run-journal")


def payloads(directory: Path) -> list[tuple[str, bytes]]:
    return [(one.writer, one.payload) for one in read_records(directory)]


def test_a_later_term_reads_what_earlier_ones_have_copied(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    wide = [bytes([number]) * (PIECE_BYTES // 3) for number in range(1, 9)]
    for term, entries in ((1, [b"a", b"b", *wide]), (3, [b"c"])):
        copy = JournalCopy(store, term)
        for entry in entries:
            copy.add([entry])
        copy.flush()
    fetch_journals(store, 4, tmp_path / "journal")
    first = [("term000001", entry) for entry in (b"a", b"b", *wide)]
    assert payloads(tmp_path / "journal") == [*first, ("term000003", b"c")]
    fetch_journals(store, 3, tmp_path / "journal")
    assert payloads(tmp_path / "journal") == first


def test_entries_that_were_not_copied_are_dropped(tmp_path: Path) -> None:
    """An owner has written them into its own segment, and could not act on them."""
    store, journal = store_in(tmp_path / "store"), tmp_path / "journal"
    writer = SegmentWriter(journal, "term000001", durable=True)
    writer.append_all([b"copied", b"not copied"])
    writer.close()
    copy = JournalCopy(store, 1)
    copy.add([b"copied"])
    copy.flush()
    copy.add([b"not copied"])
    store.refused = 1
    with pytest.raises(StorageError, match="away"):
        copy.flush()
    fetch_journals(store, 2, journal)
    assert payloads(journal) == [("term000001", b"copied")]


def test_a_lost_answer_writes_no_entry_twice(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    copy = JournalCopy(store, 1)
    copy.add([b"first"])
    store.lost = 1
    with pytest.raises(StorageError, match="lost"):
        copy.flush()
    copy.add([b"second"])
    copy.flush()
    fetch_journals(store, 2, tmp_path / "journal")
    assert [entry for _, entry in payloads(tmp_path / "journal")] == [b"first", b"second"]


def test_another_process_in_the_same_term_is_named(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    for entry, is_first in ((b"a", True), (b"b", False)):
        copy = JournalCopy(store, 1)
        copy.add([entry])
        if is_first:
            copy.flush()
        else:
            with pytest.raises(StorageError, match="journal-000001-000000 is of another process"):
                copy.flush()


def test_a_torn_copy_ends_before_its_torn_entry(tmp_path: Path) -> None:
    """The owner died between two pieces of one entry: it has not acted on it."""
    store = store_in(tmp_path / "store")
    copy = JournalCopy(store, 1)
    copy.add([b"whole", b"x" * (2 * PIECE_BYTES)])
    copy.flush()
    Path(tmp_path, "store", "terms-run-journal", "journal-000001-000002").unlink()
    fetch_journals(store, 2, tmp_path / "journal")
    damage: list[str] = []
    found = read_records(tmp_path / "journal", lambda one: damage.append(str(one)))
    assert [one.payload for one in found] == [b"whole"]
    assert damage == []


def test_late_entries_of_an_overtaken_owner_do_not_count(tmp_path: Path) -> None:
    """Term 2 states in its first entry how many entries of term 1 it has read."""
    import msgspec

    store, journal = store_in(tmp_path / "store"), tmp_path / "journal"

    def entry(value: AnyEntry) -> bytes:
        return msgspec.msgpack.encode(value)

    old, new = JournalCopy(store, 1), JournalCopy(store, 2)
    old.add([entry(TermBegan(read={}))])
    old.flush()
    fetch_journals(store, 2, journal)
    read = {term: len(entries) for term, entries in read_segments(journal, pytest.fail).items()}
    new.add([entry(TermBegan(read=read))])
    new.flush()
    late = threading.Thread(target=lambda: (old.add([entry(TermBegan(read={}))]), old.flush()))
    late.start()
    late.join(20)
    fetch_journals(store, 3, journal)
    segments = read_segments(journal, pytest.fail)
    assert {term: len(entries) for term, entries in segments.items()} == {1: 2, 2: 1}
    first = segments[2][0]
    assert isinstance(first, TermBegan) and first.read == {1: 1}
