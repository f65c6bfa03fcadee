"""State directory of checks: atomic, locked, and tolerant of damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.errors import StorageError
from outlast.health import check_memory
from outlast.health.check_memory import CheckMemory, StuckProcess

COUNT = """
import sys
from pathlib import Path
from msgspec.structs import replace
from outlast.health import check_memory as keeping

place = Path(sys.argv[1])
for _ in range(int(sys.argv[2])):
    with keeping.lock_state(place, 60):
        memory = keeping.read_memory(place).memory
        points = memory.counters.get("k", ())
        keeping.write_memory(place, replace(memory, counters={"k": (*points, (len(points), 1))}))
"""


def test_written_memory_is_read_back(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "state"
    memory = CheckMemory(boot="b", stuck={"a|b": StuckProcess(1, 2, 3)})
    with check_memory.lock_state(place, 1):
        assert "does not exist yet" in check_memory.read_memory(place).note
        check_memory.write_memory(place, memory)
        assert check_memory.read_memory(place) == check_memory.StoredMemory(memory)
    assert sorted(each.name for each in place.iterdir()) == [check_memory.FILE, check_memory.LOCK]


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"version": "x"}', b"\xff\xfe", b"[" * 100_000, b'{"counters": {"k": 1}}'],
)
def test_a_damaged_file_starts_empty_with_a_note(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / check_memory.FILE).write_bytes(damage)
    kept = check_memory.read_memory(tmp_path)
    assert kept.memory == CheckMemory() and "damaged" in kept.note


def test_a_file_of_a_later_version_begins_anew(tmp_path: Path) -> None:
    (tmp_path / check_memory.FILE).write_bytes(b'{"version": 7, "boot": "b"}')
    kept = check_memory.read_memory(tmp_path)
    assert kept.memory == CheckMemory() and "version 7" in kept.note


def test_two_at_once_lose_nothing(tmp_path: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path), "40"]) for _ in range(2)]
    assert [each.wait(timeout=60) for each in both] == [0, 0]
    assert len(check_memory.read_memory(tmp_path).memory.counters["k"]) == 80


def test_waiting_for_the_lock_has_a_time_limit(tmp_path: Path) -> None:
    late = pytest.raises(StorageError, match="another check has locked")
    with check_memory.lock_state(tmp_path, 1), late, check_memory.lock_state(tmp_path, 0.05):
        pytest.fail("two have it")
    with check_memory.lock_state(tmp_path, 0.05):
        pass


def test_an_unusable_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = pytest.raises(StorageError, match="cannot be used")
    with said, check_memory.lock_state(tmp_path / "file" / "state", 1):
        pytest.fail("there is no such place")
    (tmp_path / check_memory.FILE).mkdir()
    with pytest.raises(StorageError, match="it is unchanged"):
        check_memory.write_memory(tmp_path, CheckMemory())
    with pytest.raises(StorageError):
        check_memory.read_memory(tmp_path)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("name", [check_memory.FILE, check_memory.LOCK])
def test_a_link_in_the_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    place, target = tmp_path / "state", tmp_path / "passwd"
    place.mkdir(mode=0o700)
    (place / name).symlink_to(target)
    with pytest.raises(StorageError), check_memory.lock_state(place, 1):
        check_memory.read_memory(place)
    assert not target.exists()
    target.write_bytes(b'{"boot": "theirs"}')
    with pytest.raises(StorageError), check_memory.lock_state(place, 1):
        check_memory.read_memory(place)
    assert target.read_bytes() == b'{"boot": "theirs"}'


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / check_memory.FILE)
    with pytest.raises(StorageError, match="is no file"):
        check_memory.read_memory(tmp_path)


def test_a_directory_that_others_could_write_to_is_not_used(tmp_path: Path) -> None:
    place = tmp_path / "state"
    place.mkdir()
    for mode in (0o777, 0o1777, 0o770):
        place.chmod(mode)
        for use in (
            lambda: check_memory.read_memory(place),
            lambda: check_memory.lock_state(place, 1).__enter__(),
        ):
            with pytest.raises(StorageError, match="can be written by others"):
                use()
    place.chmod(0o755)
    with check_memory.lock_state(place, 1):
        check_memory.write_memory(place, CheckMemory())
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(StorageError, match="is a link"):
        check_memory.read_memory(tmp_path / "link")
    tmp_path.chmod(0o777)
    with pytest.raises(StorageError, match="any user can replace"):
        check_memory.read_memory(place)
    assert sorted(each.name for each in place.iterdir()) == [check_memory.FILE, check_memory.LOCK]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(StorageError, match="belongs to another user"):
        check_memory.read_memory(tmp_path)
