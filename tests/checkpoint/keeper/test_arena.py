"""Arenas: allocated, sealed and bounded shared memory."""

from __future__ import annotations

import fcntl
import os
import resource
import tempfile
from pathlib import Path

import pytest

from outlast.checkpoint.keeper import arena as arena_module
from outlast.checkpoint.keeper.arena import (
    ALIGN_BYTES,
    Arena,
    as_size,
    check_memory,
    tightest_limit,
)
from outlast.errors import StorageError

MIB = 1 << 20


@pytest.fixture
def arena() -> Arena:
    return Arena.create(5 * MIB)


def test_a_size_is_rounded_up(arena: Arena) -> None:
    assert arena.size_bytes == len(arena.view) == 6 * MIB
    assert not arena.view.readonly and bytes(arena.view[:8]) == bytes(8) and arena.stamp == 0
    with Arena.create(0).view as view:
        assert len(view) == ALIGN_BYTES


@pytest.mark.parametrize("old_kernel", [False, True])
def test_every_page_is_there_before_the_first_copy(
    old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_kernel:
        monkeypatch.setattr(arena_module, "_POPULATE_WRITE", 9999)
    arena = Arena.create(64 * MIB)
    data = bytes(MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in range(0, arena.size_bytes, MIB):
        arena.view[at : at + MIB] = data
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2000  # of 16384 pages
    arena.close()


def test_both_ends_see_the_same_bytes(arena: Arena) -> None:
    other = Arena.attach(os.dup(arena.fd), arena.size_bytes)
    arena.view[-3:] = b"end"
    arena.stamp = 1 << 60
    assert bytes(other.view[-3:]) == b"end" and other.stamp == 1 << 60
    arena.close()
    other.view[:5] = b"still"
    assert bytes(other.view[:5]) == b"still"


def test_nobody_can_cut_it_off(arena: Arena) -> None:
    for size_bytes in (0, 100 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, 0x10)  # nor seal it against writing


def test_what_is_no_arena_is_refused_and_closed(arena: Arena) -> None:
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, ALIGN_BYTES + 4096)
    with tempfile.TemporaryFile() as file:
        for fd, says in (
            (os.dup(arena.fd), "6291456 bytes"),
            (unsealed, "not sealed"),
            (os.dup(file.fileno()), "no arena"),
        ):
            with pytest.raises(StorageError, match=says):
                Arena.attach(fd, ALIGN_BYTES)
            with pytest.raises(OSError, match="descriptor"):
                os.fstat(fd)


def test_memory_outlives_the_arena_where_it_is_looked_at(arena: Arena) -> None:
    view = arena.view[:100]
    view[:2] = b"ok"
    arena.close()
    arena.close()
    assert bytes(view[:2]) == b"ok" and arena.fd < 0


def test_too_much_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(StorageError, match=r"an arena of 1126 TB: 1126 TB are needed; .* free"):
        Arena.create(1 << 50)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "cgroup/memory.max": "4000000000\n",
        "cgroup/memory.current": "3900000000\n",
        "cgroup/memory.stat": "inactive_file 1000000000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    where = tmp_path / "proc", tmp_path / "cgroup"
    assert tightest_limit(*where).free_bytes == 1_100_000_000
    check_memory(1_100_000_000, "arenas", *where)
    with pytest.raises(StorageError) as caught:
        check_memory(3_200_000_000, "arenas 2 x 1.6 GB", *where)
    assert str(caught.value) == (
        "not enough memory for arenas 2 x 1.6 GB: 3.2 GB are needed; the memory of the control"
        f" group {tmp_path}/cgroup is 4 GB, of which 2.9 GB are in use and 1.1 GB are free; nothing"
        " was allocated; raise the limit, use fewer arenas, or divide the state among more ranks"
    )


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (4096, "4.1 kB"), (1 << 40, "1.1 TB"), (10**9, "1 GB")],
)
def test_sizes_in_words(size_bytes: int, words: str) -> None:
    assert as_size(size_bytes) == words
