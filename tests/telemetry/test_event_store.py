"""Event store: no lost events, no blocked writers, and order by time."""

from __future__ import annotations

import contextlib
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.errors import RunDirError
from outlast.events import AnyEvent, Note, PhaseDone, RunEnded, WorkerWarm
from outlast.telemetry import event_store
from outlast.telemetry.event_store import EventClock, EventReader, EventWriter, follow, read_events
from outlast.telemetry.segment_files import SegmentDamage, SegmentWriter, segment_paths


@contextmanager
def a_full_disk(directory: Path) -> Iterator[None]:
    """Files may not grow beyond what the newest one there has: every append is refused. (That
    holds for the captured stderr too; `first` makes room for it.)"""
    size_bytes = segment_paths(directory)[-1].stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def warm(t_ns: int, worker: str = "w1-0") -> WorkerWarm:
    return WorkerWarm(t_ns=t_ns, worker=worker)


def first(room_bytes: int = 4000) -> Note:
    return Note(t_ns=0, worker="", seat=-1, text="x" * room_bytes)


def test_events_of_all_writers_come_by_time(tmp_path: Path) -> None:
    writers = [EventWriter(tmp_path / "events", f"w1-{k}") for k in range(3)]
    for t_ns in range(30):
        writers[t_ns % 3].emit(warm(t_ns, f"w1-{t_ns % 3}"))
    live = read_events(tmp_path)  # nobody has closed anything yet
    for writer in writers:
        writer.close()
    assert live == read_events(tmp_path)
    assert [event.t_ns for event in live] == list(range(30))


def test_a_stream_has_what_a_poll_has(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, world=3, spares=1).start().steps(4).killed(1).steps(4)
    reader = EventReader(tmp_path)
    assert list(reader.stream()) == read_events(tmp_path) != []
    run.steps(2).end().close()
    new = list(reader.stream(last=True))
    assert new == [event for event in read_events(tmp_path) if event.t_ns >= new[0].t_ns] != []


@pytest.mark.parametrize("name", ["a.000000.seg", "w1-0 (copy).000000.seg", "w1-0.000001.seg"])
def test_events_of_a_copied_segment_are_read_once(tmp_path: Path, name: str) -> None:
    writer = EventWriter(tmp_path / "events", "w1-0")
    for t_ns in range(3):
        writer.emit(warm(t_ns))
    (original,) = segment_paths(tmp_path / "events")
    shutil.copy(original, tmp_path / "events" / name)
    reports: list[SegmentDamage] = []
    reader = EventReader(tmp_path, reports.append)
    polled = reader.poll()
    writer.emit(warm(3))  # the copy ends before this one
    writer.close()
    polled += reader.poll(last=True)
    assert [event.t_ns for event in polled] == [0, 1, 2, 3]
    assert polled == read_events(tmp_path, reports.append)
    assert ["events of both are read once" in report.what for report in reports] == [True, True]


def test_threads_share_a_writer(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events", "launcher")

    def emit(first: int) -> None:
        for t_ns in range(first, first + 300):
            writer.emit(warm(t_ns))

    threads = [threading.Thread(target=emit, args=(1000 * k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    writer.close()
    expected = [t_ns for k in range(6) for t_ns in range(1000 * k, 1000 * k + 300)]
    assert [event.t_ns for event in read_events(tmp_path)] == expected


def test_one_thread_at_a_time_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)
    met: list[int] = []
    append = SegmentWriter.append

    def watched(self: SegmentWriter, payload: bytes) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(together.wait(0.1))  # only two threads inside at once get through
        append(self, payload)

    monkeypatch.setattr(SegmentWriter, "append", watched)
    writer = EventWriter(tmp_path / "events", "launcher")
    threads = [threading.Thread(target=writer.emit, args=(warm(k),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    writer.close()
    assert met == []
    assert len(read_events(tmp_path)) == 2


def test_the_clock_never_goes_back_and_is_unix_time() -> None:
    clock = EventClock()
    readings = [clock.now_ns() for _ in range(1000)]
    assert readings == sorted(readings)
    assert abs(clock.now_ns() - time.time_ns()) < 50e6


def test_a_writer_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(event_store, "RETRY_S", 0.0)
    writer = EventWriter(tmp_path / "events", "launcher")
    writer.emit(first())
    with a_full_disk(tmp_path / "events"):
        for t_ns in range(1, 10):
            writer.emit(warm(t_ns))
    writer.emit(warm(10))
    writer.close()
    assert [event.t_ns for event in read_events(tmp_path)] == list(range(11))
    said = capfd.readouterr().err
    assert said.count("cannot write events") == 1
    assert "the run continues" in said


def test_a_file_system_that_stands_still_stops_nobody_who_emits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, answers = SegmentWriter.append, threading.Event()

    def append(self: SegmentWriter, payload: bytes) -> None:
        assert answers.wait(30)
        writes(self, payload)

    monkeypatch.setattr(SegmentWriter, "append", append)
    monkeypatch.setattr(event_store, "QUEUED_MAX", 20)
    writer = EventWriter(tmp_path / "events", "w0", in_thread=True)
    for t_ns in range(40):
        writer.emit(warm(t_ns))
    assert list(segment_paths(tmp_path / "events")) == []
    answers.set()
    writer.close()
    *found, note = read_events(tmp_path)
    assert {event.t_ns for event in found} >= set(range(20))
    assert isinstance(note, Note) and f"{40 - len(found)} events were dropped" in note.text


def test_a_failed_write_is_not_retried_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    append = SegmentWriter.append

    def watched(self: SegmentWriter, payload: bytes) -> None:
        asked.append(payload)
        append(self, payload)

    monkeypatch.setattr(SegmentWriter, "append", watched)
    writer = EventWriter(tmp_path / "events", "launcher")
    writer.emit(warm(0))
    with a_full_disk(tmp_path / "events"):
        for t_ns in range(1, 100):
            writer.emit(warm(t_ns))
        assert len(asked) == 2
    writer.close()
    assert len(read_events(tmp_path)) == 100


def test_events_dropped_for_a_full_disk_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_store, "RETRY_S", 0.0)
    monkeypatch.setattr(event_store, "BACKLOG_BYTES", 500)
    writer = EventWriter(tmp_path / "events", "launcher")
    writer.emit(warm(0))
    with a_full_disk(tmp_path / "events"):
        for t_ns in range(1, 101):
            writer.emit(warm(t_ns))
        dropped = writer.dropped
        assert 0 < dropped < 100
    writer.emit(warm(101))
    writer.close()
    found = read_events(tmp_path)
    kept = [event.t_ns for event in found if isinstance(event, WorkerWarm)]
    assert kept == [0, *range(1 + dropped, 102)]
    notes = [event.text for event in found if isinstance(event, Note)]
    assert notes == [f"{dropped} events were dropped while they could not be written"]


def test_a_full_disk_under_stderr_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = EventWriter(tmp_path / "events", "launcher")
    writer.emit(warm(0))
    with a_full_disk(tmp_path / "events"):
        writer.emit(warm(1))  # neither the event nor the word about it can be written
        assert "kept in memory" not in capfd.readouterr().err
    writer.close()
    assert len(read_events(tmp_path)) == 2


def test_events_never_written_are_reported_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = EventWriter(tmp_path / "events", "launcher")
    writer.emit(first())
    with a_full_disk(tmp_path / "events"):
        writer.emit(warm(1))
        writer.close()
    assert "the last 1 events were never written" in capfd.readouterr().err


def test_events_of_a_later_version_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events", "launcher")
    writer.emit(warm(1))
    writer.close()
    segments = SegmentWriter(tmp_path / "events", "newer")
    segments.append(msgspec.msgpack.encode({"type": "Teleported", "t_ns": 5}))
    segments.append(b"\xc1")
    segments.close()
    damages: list[SegmentDamage] = []
    assert len(read_events(tmp_path, damages.append)) == 1
    assert ["no known event" in damage.what for damage in damages] == [True, True]


@pytest.mark.parametrize("made", [False, True])
def test_a_directory_without_a_run(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "events").mkdir()
    with pytest.raises(RunDirError, match="holds no events"):
        read_events(tmp_path)


def test_following_sees_everything_once(tmp_path: Path) -> None:
    stop = threading.Event()
    wrote = threading.Event()

    def write() -> None:
        for k in range(3):
            writer = EventWriter(tmp_path / "events", f"w{k}")  # writers appear on the way
            for t_ns in range(50):
                writer.emit(warm(1000 * k + t_ns))
            writer.close()
        wrote.set()

    thread = threading.Thread(target=write)
    seen: list[AnyEvent] = []
    thread.start()
    for event in follow(tmp_path, stop, poll_s=0.01):
        seen.append(event)
        if wrote.is_set():
            stop.set()
    thread.join(30)
    assert sorted(event.t_ns for event in seen) == [
        1000 * k + t_ns for k in range(3) for t_ns in range(50)
    ]


def test_events_before_the_stop_are_followed(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events", "launcher")

    class AtTheLastMoment(threading.Event):
        """When it is asked, the last event has just been written and the stop been set."""

        def is_set(self) -> bool:
            if not super().is_set():
                writer.emit(warm(7))
                self.set()
            return True

    assert [event.t_ns for event in follow(tmp_path, AtTheLastMoment())] == [7]
    writer.close()


def test_following_stops_without_any_event(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert list(follow(tmp_path, stop)) == []


def test_a_torn_worker_does_not_hide_the_others(tmp_path: Path) -> None:
    SyntheticRun(tmp_path).start().steps(3).killed(2).steps(2).end()
    path = next(p for p in segment_paths(tmp_path / "events") if p.name.startswith("w1-2."))
    path.write_bytes(path.read_bytes()[:-5])
    found = read_events(tmp_path)
    assert isinstance(found[-1], RunEnded)
    seats = [event.seat for event in found if isinstance(event, PhaseDone) and event.n == 5]
    assert sorted(seats) == [0, 1, 2, 3]


def test_a_hundred_thousand_events_are_read_in_seconds(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events", "w1-0")
    for n in range(100_000):
        writer.emit(
            PhaseDone(
                t_ns=n,
                worker="w1-0",
                seat=0,
                generation=1,
                n=n,
                step=n,
                kind="step",
                t_begin_ns=n,
                t_vote_ns=n,
            )
        )
    writer.close()
    began_s = time.process_time()
    assert len(read_events(tmp_path)) == 100_000
    assert time.process_time() - began_s < 3  # 0.3 s where it was measured
