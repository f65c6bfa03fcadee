"""Segment files: whole records are read once, and damage is reported."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import RunDirError, UsageError
from outlast.telemetry import segment_files as segments_module
from outlast.telemetry.segment_files import (
    HEADER,
    RECORD,
    SegmentDamage,
    SegmentReader,
    SegmentWriter,
    read_records,
    segment_paths,
)

GOLDEN = Path(__file__).parent / "golden" / "golden.000000.seg"
GOLDEN_PAYLOADS = [b"\x01", b"outlast", bytes(range(256)) * 2]


def _write(directory: Path, payloads: list[bytes], writer: str = "w") -> Path:
    segments = SegmentWriter(directory, writer)
    for payload in payloads:
        segments.append(payload)
    segments.close()
    return segment_paths(directory)[-1]


def _read(where: Path) -> tuple[list[bytes], list[SegmentDamage]]:
    damages: list[SegmentDamage] = []
    return [record.payload for record in read_records(where, damages.append)], damages


@contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond `size_bytes` (EFBIG, after
    writing what fits): a disk that fills up in the middle of a record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_golden_segment_is_read_and_still_written_so(tmp_path: Path) -> None:
    assert _read(GOLDEN) == (GOLDEN_PAYLOADS, [])
    assert _write(tmp_path, GOLDEN_PAYLOADS).read_bytes() == GOLDEN.read_bytes()


@given(payloads=st.lists(st.binary(min_size=1, max_size=300), max_size=12))
def test_appended_records_are_read(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes]
) -> None:
    directory = tmp_path_factory.mktemp("segments")
    segments = SegmentWriter(directory, "w", rotate_bytes=256)
    for payload in payloads:
        segments.append(payload)
    segments.close()
    assert _read(directory) == (payloads, [])


def test_every_cut_leaves_the_whole_records_before_it(tmp_path: Path) -> None:
    data = GOLDEN.read_bytes()
    ends = [HEADER.size]
    for payload in GOLDEN_PAYLOADS:
        ends.append(ends[-1] + RECORD.size + len(payload))
    path = tmp_path / "w.000000.seg"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in ends[1:])
        assert _read(path) == (GOLDEN_PAYLOADS[:whole], []), size


def test_every_flipped_byte_costs_its_own_record_only(tmp_path: Path) -> None:
    payloads = [b"first" * 9, b"second" * 9, b"third" * 9]
    path = _write(tmp_path, payloads)
    data = path.read_bytes()
    at = HEADER.size
    for index, payload in enumerate(payloads):
        end = at + RECORD.size + len(payload)
        for position in range(at, end):
            broken = bytearray(data)
            broken[position] ^= 0x55
            path.write_bytes(broken)
            read, damages = _read(path)
            assert read == payloads[:index] + payloads[index + 1 :], position
            if index < 2 or position >= at + 4:  # the last record's length may say: torn tail
                assert [(damage.path, damage.offset) for damage in damages] == [(path, at)]
                assert damages[0].skipped_bytes == end - at
        at = end


def test_a_hole_of_zeros_is_skipped_and_named(tmp_path: Path) -> None:
    path = _write(tmp_path, [b"a" * 100, b"b" * 5000, b"c" * 5000, b"d" * 100])
    data = bytearray(path.read_bytes())
    start = HEADER.size + RECORD.size + 100
    data[start : start + 6000] = bytes(6000)
    path.write_bytes(data)
    read, damages = _read(path)
    assert read == [b"a" * 100, b"d" * 100]
    assert [(damage.offset, damage.skipped_bytes) for damage in damages] == [(start, 10024)]
    assert f"{path} is damaged at byte {start}" in str(damages[0])


def test_damage_is_a_warning_without_a_handler(tmp_path: Path) -> None:
    path = _write(tmp_path, [b"one", b"two"])
    data = bytearray(path.read_bytes())
    data[HEADER.size + RECORD.size] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="damaged at byte 8"):
        assert [record.payload for record in read_records(tmp_path)] == [b"two"]


@pytest.mark.parametrize(
    ("header", "what"),
    [(HEADER.pack(b"OLSG", 2), "version 2"), (b"\x7fELF1234", "no segment")],
)
def test_another_version_is_refused_by_name(tmp_path: Path, header: bytes, what: str) -> None:
    path = tmp_path / "w.000000.seg"
    path.write_bytes(header + GOLDEN.read_bytes()[HEADER.size :])
    read, damages = _read(tmp_path)
    assert read == []
    assert len(damages) == 1 and what in damages[0].what


def test_a_strange_file_is_named_once_however_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "w.000000.seg"
    path.write_bytes(b"not a segment")
    reader = SegmentReader(path)
    damages: list[SegmentDamage] = []
    for more in (b"", b"1", b"2"):
        path.write_bytes(path.read_bytes() + more)
        assert list(reader.read(damages.append, last=False)) == []
    assert len(damages) == 1


@pytest.mark.parametrize("kind", ["directory", "pipe", "loop"])
def test_anything_but_a_regular_file_is_reported_once_and_skipped(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a.000000.seg"
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to(path)
    writer = SegmentWriter(tmp_path, "b")
    writer.append(b"whole")
    writer.close()
    damage: list[SegmentDamage] = []
    reader = SegmentReader(path)
    for last in (False, False, True):
        assert list(reader.read(damage.append, last=last)) == []
    (one,) = damage
    assert one.path == path and "it cannot be read" in one.what
    assert "was skipped" in str(one)
    with pytest.raises(OSError, match=r"regular|levels"):  # a journal without a file is another
        list(read_records(tmp_path, damage.append))


def test_a_file_that_could_not_be_read_once_is_read_again(tmp_path: Path) -> None:
    path, damage = tmp_path / "a.000000.seg", list[SegmentDamage]()
    writer = SegmentWriter(tmp_path, "a")
    writer.append(b"whole")
    writer.close()
    reader = SegmentReader(path)
    away = path.rename(tmp_path / "away")
    path.symlink_to(path)
    assert list(reader.read(damage.append, last=False)) == []
    path.unlink()
    away.rename(path)
    assert [record.payload for record in reader.read(damage.append, last=False)] == [b"whole"]
    assert len(damage) == 1


def test_behind_a_large_damaged_record_reading_goes_on(tmp_path: Path) -> None:
    path = _write(tmp_path, [b"x" * (5 << 20), b"behind"])
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    read, damages = _read(tmp_path)
    assert read == [b"behind"]
    assert damages[0].skipped_bytes == (5 << 20) + RECORD.size


def test_a_growing_file_is_read_once_and_without_complaint(tmp_path: Path) -> None:
    data = GOLDEN.read_bytes()
    path = tmp_path / "w.000000.seg"
    path.touch()
    reader = SegmentReader(path)
    damages: list[SegmentDamage] = []
    seen: list[bytes] = []
    for size in range(0, len(data) + 1, 7):
        path.write_bytes(data[:size])
        seen += [record.payload for record in reader.read(damages.append, last=False)]
    path.write_bytes(data)
    seen += [record.payload for record in reader.read(damages.append, last=True)]
    assert (seen, damages) == (GOLDEN_PAYLOADS, [])


def test_segments_rotate_and_are_never_opened_again(tmp_path: Path) -> None:
    for _ in range(2):  # the second writer of this name: a restart
        segments = SegmentWriter(tmp_path, "w", rotate_bytes=100)
        for _ in range(4):
            segments.append(b"x" * 50)
        segments.close()
    sizes = [path.stat().st_size for path in segment_paths(tmp_path)]
    assert [path.name for path in segment_paths(tmp_path)] == [f"w.{k:06d}.seg" for k in range(4)]
    assert sizes == [8 + 2 * 62] * 4
    assert len(_read(tmp_path)[0]) == 8


def test_two_writers_of_one_name_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both look before either has created its file.
    monkeypatch.setattr(segments_module, "_listing", lambda _directory: iter(()))
    writers = [SegmentWriter(tmp_path, "w") for _ in range(2)]
    for number, segments in enumerate(writers * 2):
        segments.append(b"%d" % number)
    monkeypatch.undo()
    for segments in writers:
        segments.close()
    assert [record.payload for record in read_records(tmp_path)] == [b"0", b"2", b"1", b"3"]
    assert len(segment_paths(tmp_path)) == 2


def test_records_come_by_writer_then_in_order(tmp_path: Path) -> None:
    late = SegmentWriter(tmp_path, "b")
    late.append(b"b0")
    early = SegmentWriter(tmp_path, "a")
    early.append(b"a0")
    late.append(b"b1")
    found = list(read_records(tmp_path))
    assert [(record.writer, record.payload) for record in found] == [
        ("a", b"a0"),
        ("b", b"b0"),
        ("b", b"b1"),
    ]
    early.close()
    late.close()


def test_a_refused_record_leaves_no_trace(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path, "w")
    segments.append(b"kept" * 10)
    with files_end_at(100), pytest.raises(OSError, match="too large"):
        segments.append(b"x" * 500)
    path = segment_paths(tmp_path)[0]
    assert path.stat().st_size == 8 + 12 + 40
    segments.append(b"again" * 100)
    segments.close()
    assert _read(tmp_path) == ([b"kept" * 10, b"again" * 100], [])


def test_a_refused_header_leaves_no_file(tmp_path: Path) -> None:
    segments = SegmentWriter(tmp_path, "w")
    with files_end_at(4), pytest.raises(OSError, match="too large"):
        segments.append(b"x")
    assert segment_paths(tmp_path) == []
    segments.append(b"x")
    segments.close()
    assert _read(tmp_path) == ([b"x"], [])


def test_durable_means_synced_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fdatasync, fsync = os.fdatasync, os.fsync
    for name, real in (("fdatasync", fdatasync), ("fsync", fsync)):

        def watched(fd: int, name: str = name, real: object = real) -> None:
            synced.append(f"{name} {Path(f'/proc/self/fd/{fd}').readlink().name}")
            real(fd)  # type: ignore[operator]

        monkeypatch.setattr(os, name, watched)
    segments = SegmentWriter(tmp_path / "journal", "w", durable=True)
    segments.append(b"one")
    segments.append(b"two")
    segments.close()
    assert synced == ["fsync journal", "fdatasync w.000000.seg", "fdatasync w.000000.seg"]


@pytest.mark.parametrize("payload", [b"", b"x" * ((128 << 20) + 1)], ids=["empty", "too large"])
def test_records_have_a_size(tmp_path: Path, payload: bytes) -> None:
    with pytest.raises(UsageError, match="not written"):
        SegmentWriter(tmp_path, "w").append(payload)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", ".hidden"])
def test_names_stay_inside_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name"):
        SegmentWriter(tmp_path, name)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="choose another"):
        SegmentWriter(tmp_path / "file" / "events", "w")


def test_a_missing_directory_has_no_records(tmp_path: Path) -> None:
    assert _read(tmp_path / "nowhere") == ([], [])


@pytest.mark.process
def test_a_killed_writer_leaves_complete_records(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from outlast.telemetry.segment_files import SegmentWriter\n"
        "segments = SegmentWriter(Path(sys.argv[1]), 'w', rotate_bytes=50_000)\n"
        "for k in range(10**9):\n"
        "    segments.append(k.to_bytes(8, 'little') * (1 + k % 97))\n"
        "    if k == 2000: print('going', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    live = len(_read(tmp_path)[0])  # a reader in its way
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    read, damages = _read(tmp_path)
    assert damages == []
    assert len(read) >= live > 2000
    assert read == [k.to_bytes(8, "little") * (1 + k % 97) for k in range(len(read))]
