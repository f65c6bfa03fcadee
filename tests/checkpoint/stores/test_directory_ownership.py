"""Directory ownership: a second job is refused by name, a dead owner is replaced."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.checkpoint.stores import directory_ownership
from outlast.checkpoint.stores.chunk_reader import IoTimeout
from outlast.checkpoint.stores.directory_ownership import (
    Owner,
    Ownership,
    check,
    read_owner,
    take_ownership,
    wait_for_keeper,
)
from outlast.errors import InUseError, StorageError

pytestmark = pytest.mark.process
PATIENCE = IoTimeout(60.0)
TAKE = """
import sys
from pathlib import Path
from outlast.checkpoint.stores.directory_ownership import take_ownership as take
from outlast.checkpoint.stores.chunk_reader import IoTimeout as Patience
owned = take(Path(sys.argv[1]), "first", 1.0, Patience(60.0))
if sys.argv[2:]:
    owned.keeper_is(int(sys.argv[2]))
print("taken", flush=True)
sys.stdin.read()
"""


def own(root: Path, job: str = "second", wait_s: float = 0.0) -> Ownership:
    return take_ownership(root, job, wait_s, PATIENCE)


@contextmanager
def other_job(root: Path, *keeper: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(root), *map(str, keeper)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout and process.stdout.readline() == "taken\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture(params=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A file system with locks, and one without (Lustre without -o flock)."""
    if request.param == "no locks":

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSYS, "no locks here")

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param == "locks"


def test_a_second_job_is_refused_by_name(tmp_path: Path, locks: bool) -> None:
    with other_job(tmp_path) as process:
        with pytest.raises(InUseError, match=rf"job 'first' \(pid {process.pid} on "):
            own(tmp_path)
        process.send_signal(signal.SIGSTOP)  # a job that stands still is not dead
        with pytest.raises(InUseError, match=f"pid {process.pid}"):
            own(tmp_path)
        process.send_signal(signal.SIGCONT)
    owned = own(tmp_path)
    assert read_owner(tmp_path).job == "second"
    owned.close()
    own(tmp_path, "third").close()


def test_a_second_checkpointer_of_this_process_is_named(tmp_path: Path, locks: bool) -> None:
    first = own(tmp_path)
    with pytest.raises(InUseError, match="another Checkpointer of this process"):
        own(tmp_path)
    first.close()
    own(tmp_path).close()


def test_the_keeper_of_a_dead_trainer_is_waited_for(tmp_path: Path, locks: bool) -> None:
    keeper = subprocess.Popen(["sleep", "600"])
    with other_job(tmp_path, keeper.pid):
        pass
    with pytest.raises(InUseError, match="job 'first'"):
        own(tmp_path)

    def end() -> None:
        keeper.kill()
        keeper.wait()

    timer = threading.Timer(0.5, end)
    timer.start()
    wait_for_keeper(tmp_path, 60.0, PATIENCE)
    assert keeper.poll() is not None
    own(tmp_path, wait_s=60.0).close()
    timer.join()


def test_a_lock_that_a_forked_child_holds_is_taken_over(tmp_path: Path) -> None:
    """A data loader's worker has the descriptor, too, and outlives a trainer that was killed."""
    reading, writing = os.pipe()
    trainer = os.fork()
    if not trainer:
        owned = own(tmp_path, "first")
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)  # until the test closes its end
            os._exit(0)
        assert owned.fds
        os._exit(0)
    os.waitpid(trainer, 0)
    with (tmp_path / directory_ownership.FILE).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    owned = own(tmp_path)
    assert read_owner(tmp_path).job == "second"
    with pytest.raises(InUseError, match="this process"):
        own(tmp_path)
    owned.close()
    os.close(writing)
    os.close(reading)


def test_an_owner_on_another_host_is_waited_for(
    tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks nobody knows whether it lives but by its touching the file."""
    first = own(tmp_path, "first")
    path = tmp_path / directory_ownership.FILE
    elsewhere = msgspec.structs.replace(read_owner(tmp_path), boot="another", host="far")
    path.write_bytes(msgspec.json.encode(elsewhere) + b"\n")
    monkeypatch.setattr(directory_ownership, "_ELSEWHERE_S", 0.2)
    if locks:
        with pytest.raises(InUseError, match="on far"):
            own(tmp_path)
        first.close()
        own(tmp_path).close()
        return
    monkeypatch.setattr(directory_ownership, "LEASE_S", 0.3)
    second = own(tmp_path)
    with pytest.raises(StorageError, match="job 'second'"):
        check(tmp_path, first.token)
    second.close()


def test_a_copied_directory_is_free(tmp_path: Path, locks: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    owned = own(first)
    shutil.copytree(first, second)
    if locks:
        own(second).close()
    else:
        with pytest.raises(InUseError, match="this process"):
            own(second)  # the file is all that is known: it is refused, and says which one it is
    owned.close()


def test_the_fence(tmp_path: Path) -> None:
    root = tmp_path / "root"
    owned = own(root, "first")
    check(root, owned.token)
    check(root, "")
    root.rename(tmp_path / "renamed")
    with pytest.raises(StorageError, match="not the directory that rank 0 saves to"):
        check(root, owned.token)
    with pytest.raises(StorageError, match="not the directory"):
        check(tmp_path, owned.token)
    owned.close()


def test_an_incomplete_record_names_no_owner(tmp_path: Path) -> None:
    (tmp_path / directory_ownership.FILE).write_bytes(b'{"token":"a')
    assert read_owner(tmp_path) == Owner()
    own(tmp_path).close()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be saved to"):
        own(tmp_path / "file" / "root")
