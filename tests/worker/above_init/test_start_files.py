"""Files that a successor's start writes anew: moved aside, and moved back."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from outlast.errors import PhaseError
from outlast.worker.above_init.start_files import StartFiles

Made = Callable[..., StartFiles]


@pytest.fixture
def made() -> Iterator[Made]:
    every: list[StartFiles] = []

    def make(wait_s: float = 20.0) -> StartFiles:
        every.append(StartFiles(lambda *_, **__: None, wait_s))
        every[-1].begin()
        return every[-1]

    yield make
    for each in every:
        each.put_back(for_good=True)
        each._guards = False


@pytest.fixture
def control(tmp_path: Path) -> Path:
    path = tmp_path / "control.json"
    path.write_text("as the job left it")
    return path


def replaced(path: Path) -> None:
    path.with_suffix(".tmp").write_text("first")
    path.with_suffix(".tmp").replace(path)


def removed_and_written(path: Path) -> None:
    path.unlink()
    path.write_text("first")


def written_twice(path: Path) -> None:
    path.write_text("fi")
    assert path.read_text() == "fi"
    path.write_text("first")


def renamed(path: Path) -> None:
    os.rename(path.with_suffix(".none"), path)  # noqa: PTH104 - it fails


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("first"),
        lambda path: path.unlink(),
        replaced,
        removed_and_written,
        written_twice,
    ],
)
def test_a_file_that_the_start_writes_is_as_it_was_before_the_next_call(
    made: Made, control: Path, write: Callable[[Path], object]
) -> None:
    files = made()
    write(control)
    assert not control.exists() or control.read_text() == "first"
    files.put_back()
    assert control.read_text() == "as the job left it"
    assert [each.name for each in control.parent.iterdir()] == ["control.json"]


def test_writes_of_the_loop_and_appended_lines_are_kept(made: Made, control: Path) -> None:
    files = made()
    with control.open("a") as log:
        log.write(", and more")
    new = control.with_name("new.txt")
    new.write_text("first")
    with pytest.raises(FileNotFoundError):
        renamed(control)
    files.put_back(for_good=True)
    assert (control.read_text(), new.read_text()) == ("as the job left it, and more", "first")
    control.write_text("of the loop")
    files.put_back()
    assert control.read_text() == "of the loop"


def test_a_log_that_stays_open_goes_on_at_the_end_of_the_jobs_file(
    made: Made, control: Path
) -> None:
    files = made()
    with control.open("w") as log:
        log.write("header")
        log.flush()
        files.put_back()
        log.write(", a line")
    assert control.read_text() == "as the job left it, a line"


def test_a_data_set_that_was_prepared_again_alike_may_stay_open_and_mapped(
    made: Made, tmp_path: Path
) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.arange(4))
    files = made()
    np.save(path, np.arange(4))
    with path.open("rb") as data:
        data.seek(3)
        mapped = np.load(path, mmap_mode="r")
        files.put_back()
        assert data.tell() == 3 and os.path.samestat(os.fstat(data.fileno()), path.stat())
    assert mapped.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_an_open_file_that_the_start_overwrote_differently_is_refused(
    made: Made, control: Path, *, is_mapped: bool
) -> None:
    files = made()
    control.write_text("first")
    with control.open("rb") as handle:
        held = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if is_mapped else handle
        what = "mapped" if is_mapped else "open"
        with pytest.raises(PhaseError, match=f"control.json was overwritten .* is {what}"):
            files.put_back()
        held.close()
    assert control.read_text() == "as the job left it"


def test_memory_that_is_shared_by_a_file_is_refused(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "buffer.dat"
    path.write_bytes(bytes(8))
    files = made()
    shared = np.memmap(path, mode="w+", shape=(8,))
    with pytest.raises(
        PhaseError, match=r"buffer\.dat was overwritten by the start of the script and is mapped"
    ):
        files.put_back()
    assert shared.tolist() == [0] * 8


def test_files_of_libraries_and_devices_are_not_moved(made: Made, control: Path) -> None:
    files = made()
    os.close(os.open(control, os.O_WRONLY | os.O_TRUNC))  # as locks are opened
    with Path(os.devnull).open("w") as nothing:
        nothing.write("x")
    files.put_back()
    assert control.read_text() == ""


def test_a_file_that_cannot_be_moved_is_refused_before_it_is_emptied(
    made: Made, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made()

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(PhaseError, match="cannot be moved aside"):
        control.write_text("first")
    assert control.read_text() == "as the job left it"


OTHER = """
import sys
from pathlib import Path
from outlast.worker.above_init.start_files import StartFiles
files = StartFiles(lambda *_, **__: None, 20.0)
files.begin()
Path(sys.argv[1]).write_text("first")
print("written", flush=True)
if sys.stdin.readline():
    files.put_back()
"""


@pytest.fixture
def other(control: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(control)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    yield process
    process.kill()
    process.communicate(timeout=20)


@pytest.mark.process
@pytest.mark.parametrize("is_killed", [False, True])
def test_two_workers_that_start_and_one_that_reads_end_with_the_jobs_file(
    made: Made, control: Path, other: subprocess.Popen[str], *, is_killed: bool
) -> None:
    assert control.read_text() == "first" and other.stdin is not None
    files = made()
    end = other.kill if is_killed else lambda: print("go", file=other.stdin, flush=True)
    timer = threading.Timer(0.2, end)
    timer.start()
    control.write_text("of the second")
    timer.join()
    files.guard()
    assert control.read_text() == "of the second"
    files.put_back(for_good=True)
    assert control.read_text() == "as the job left it"


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write(", and more")


@pytest.mark.process
@pytest.mark.parametrize("use", [Path.read_text, append, Path.unlink])
def test_a_survivor_uses_the_jobs_file_and_waits_for_a_start_no_longer_than_its_budget(
    control: Path, other: subprocess.Popen[str], use: Callable[[Path], object]
) -> None:
    assert other.stdin is not None
    files = StartFiles(lambda *_, **__: None, wait_s=0.1)
    files.guard()
    with pytest.raises(PhaseError, match=r"\.control\.json\.outlast was not moved back"):
        use(control)
    print("go", file=other.stdin, flush=True)
    other.wait(20)
    assert control.read_text() == "as the job left it"
    use(control)
    assert not control.exists() or control.read_text().startswith("as the job left it")
    files._guards = False


@pytest.mark.process
def test_a_start_reads_what_another_start_writes(
    made: Made, control: Path, other: subprocess.Popen[str]
) -> None:
    """Two starts that wait for each other's files would stand still."""
    assert other.poll() is None
    files = made(0.1)
    files.guard()
    assert control.read_text() == "first"


def test_a_log_that_the_top_rotates_stays_rotated(made: Made, tmp_path: Path) -> None:
    log, rotated = tmp_path / "train.log", tmp_path / "train.log.1"
    log.write_text("of the job")
    rotated.write_text("of an earlier run")
    files = made()
    rotated.unlink()  # as logging's handlers do
    log.replace(rotated)
    log.write_text("of the top")
    files.put_back(for_good=True)
    assert rotated.read_text() == "of the job"
    assert log.read_text() == "of the top"


def test_a_link_that_the_top_sets_anew_is_left_alone(made: Made, tmp_path: Path) -> None:
    target, link = tmp_path / "step-5", tmp_path / "latest"
    target.write_text("of the job")
    link.symlink_to(target)
    files = made()
    link.unlink()
    link.symlink_to(tmp_path / "step-0")
    files.put_back(for_good=True)
    assert link.readlink() == tmp_path / "step-0"
    assert target.read_text() == "of the job"


def used_in_a_dry_step(path: Path) -> None:
    with path.open("a") as log:
        log.write(", a line")
    assert path.read_text() == "as the job left it, a line"
    path.write_text("made up")
    path.with_name("new.txt").write_text("made up")
    with path.with_name("once.txt").open("x") as once:
        once.write("made up")
    raise ValueError("of the script")


def test_a_dry_step_leaves_the_jobs_files_as_they_were(control: Path) -> None:
    """Its numbers are made up, and the real attempt writes what it writes itself."""
    files = StartFiles(None, 20.0)
    with pytest.raises(ValueError, match="of the script"), files.dry():
        used_in_a_dry_step(control)
    assert control.read_text() == "as the job left it"
    assert [each.name for each in control.parent.iterdir()] == ["control.json"]
    control.write_text("of the attempt")
    files.put_back()
    assert control.read_text() == "of the attempt"


def test_a_first_spare_moves_no_file_and_names_those_that_it_emptied(control: Path) -> None:
    told: list[str] = []
    files = StartFiles(None, 20.0)
    files.begin(is_first=True)
    control.write_text("of the spare")
    control.with_name("new.txt").write_text("of the spare")
    files.note = lambda text, warning=True: told.append(text)
    files.reach_init()
    assert control.read_text() == "of the spare"
    assert len(told) == 1 and f"above outlast.init() writes {control}, " in told[0]
    files.begin()
    control.write_text("of the start")
    files.put_back(for_good=True)
    assert control.read_text() == "of the spare"


def test_a_blocked_script_gets_no_audit_hook() -> None:
    """Nobody can remove it, and each `id()` of the process would call it."""
    files = StartFiles(lambda *_, **__: None, wait_s=0.1)
    files.guard(is_held=True)
    assert not files._is_watching
    files.guard()
    assert files._is_watching
    files._guards = False


def test_a_dry_step_that_keeps_a_file_open_ends_the_undoing_nevertheless(control: Path) -> None:
    files = StartFiles(None, 20.0)
    kept: list[IO[str]] = []

    def write() -> None:
        kept.append(control.open("w+"))
        kept[0].write("made up")
        kept[0].flush()

    with (
        pytest.raises(
            PhaseError,
            match=r"control\.json was overwritten by the start of the script and is open",
        ),
        files.dry(),
    ):
        write()
    kept[0].close()
    control.write_text("of the attempt")
    files.put_back()
    assert control.read_text() == "of the attempt"
