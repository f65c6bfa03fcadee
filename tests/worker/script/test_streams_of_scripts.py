"""Streams, files and locks that a phase uses: carried, or refused by name, and never waited for."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest
from tests.worker.script.simulated_phases import Session, play, refusal

from outlast.worker.script import reachable_values, value_paths
from outlast.worker.script.value_fingerprints import look_of


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


def test_a_stream_in_memory_that_is_read_on_is_refused() -> None:
    text = refusal("""
        import io
        stream = io.BytesIO(bytes(1000))
        def step(i):
            stream.read(2)
            session.step()
        for i in session.batches(5):
            session.run(step, i)
        """)
    assert "changes played.stream (BytesIO)" in text


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_a_file_that_a_phase_opens_and_reads_on_is_refused(tmp_path: Path) -> None:
    """A successor has not opened it when its state is restored."""
    path = tmp_path / "data"
    path.write_bytes(bytes(1000))
    text = refusal(f"""
        class Reader:
            file = None
        reader = Reader()
        def step(i):
            if reader.file is None:
                reader.file = open({str(path)!r}, "rb")
            reader.file.read(2)
            session.step()
        for i in session.batches(5):
            session.run(step, i)
        """)
    assert "reader.file continues to read" in text and "open it before the first phase" in text


def test_a_memo_that_is_bound_to_none_is_no_error() -> None:
    played = Session()
    play(
        """
        class Memo:
            values = None
        memo = Memo()
        memo.values = {i: object() for i in range(300)}
        def step(i):
            if memo.values is not None:
                memo.values.setdefault(i, 0)
            session.step()
        for i in session.batches(8):
            session.run(step, i)
            if i == 4:
                memo.values = None
        """,
        played,
    )
    assert played.index == 7


def test_the_lock_of_a_shared_value_is_not_taken() -> None:
    value = multiprocessing.Value("i", 3)
    with value.get_lock():
        holder = threading.Thread(target=lambda: looks.append(look_of(value, ())), daemon=True)
        looks: list[object] = []
        holder.start()
        holder.join(20)
        assert looks
