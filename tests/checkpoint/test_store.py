"""A checkpoint is complete or not there; damage is found, said, and passed over."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.checkpoint import part, tree
from outlast.checkpoint.store import Checkpoint, Draft, Manifest, clean, newest, prune
from outlast.errors import CodecError, CorruptionError, StorageError


def value(step: int) -> dict[str, Any]:
    return {
        "w": torch.full((3000,), float(step)),
        "b": [torch.arange(5), torch.empty(0)],
        "n": step,
    }


def save(root: Path, step: int, world: int = 2, generation: int = 1) -> Checkpoint:
    drafts = [Draft(root, step + 1, step, generation) for _ in range(world)]
    parts = [draft.write(f"seat-{rank}", {"rank": rank}) for rank, draft in enumerate(drafts)]
    parts.append(drafts[0].write("model", value(step)))
    return drafts[0].complete(parts, "job", world)


def silent(message: str) -> None:
    raise AssertionError(f"nothing is damaged, but: {message}")


def test_saved_and_loaded(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert newest(root, silent) is None
    saved = save(root, 7)
    found = newest(root, silent)
    assert found is not None
    assert found.path == saved.path == root / "step-000000007-n8"
    assert (found.n, found.step, found.job, found.world) == (8, 7, "job", 2)
    assert found.load("seat-1") == {"rank": 1}
    model = found.load("model")
    assert torch.equal(model["w"], value(7)["w"])
    assert [path.name for path in root.iterdir()] == ["step-000000007-n8"]
    assert found.size_bytes == sum(
        p.stat().st_size for p in found.path.iterdir() if p.name != "manifest.json"
    )


def test_a_part_is_the_blob_of_its_value(tmp_path: Path) -> None:
    saved = save(tmp_path, 1)
    assert (saved.path / "model").read_bytes() == tree.encode(value(1))


def test_newest_goes_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10**9, 10):
        save(tmp_path, step)
    found = newest(tmp_path, silent)
    assert found is not None
    assert found.step == 10**9


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


DAMAGE: list[Callable[[Path], object]] = [
    lambda path: flip(path / "model", 8 * 5000),
    lambda path: flip(path / "model", 3),
    lambda path: flip(path / "model", 8 * 9),
    lambda path: flip(path / "seat-0", -1),
    lambda path: flip(path / "manifest.json", 200),
    lambda path: os.truncate(path / "model", 100),
    lambda path: os.truncate(path / "manifest.json", 40),
    lambda path: (path / "seat-1").unlink(),
    lambda path: (path / "manifest.json").unlink(),
    lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"),
]


@pytest.mark.parametrize("harm", DAMAGE)
def test_falls_back_over_damage(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    save(tmp_path, 1)
    harm(save(tmp_path, 2).path)
    said: list[str] = []
    found = newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert "step-000000002-n3 is passed over" in said[0]


def test_every_bit_of_a_checkpoint(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 1, 1, 1)
    saved = draft.complete([draft.write("model", {"w": torch.ones(2)})], "job", 1)
    for name in ("model", "manifest.json"):
        whole = (saved.path / name).read_bytes()
        for bit in range(8 * len(whole)):
            flip(saved.path / name, bit)
            assert newest(tmp_path, lambda _: None) is None, f"bit {bit} of {name}"
            (saved.path / name).write_bytes(whole)
    assert newest(tmp_path, silent) is not None


def test_load_checks_again(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    found = newest(tmp_path, silent)
    assert found is not None
    for bit in (8 * 5000, 3, 8 * 9, -1):
        whole = (saved.path / "model").read_bytes()
        flip(saved.path / "model", bit)
        with pytest.raises(CorruptionError, match=r"model.*nothing was taken over"):
            found.load("model")
        (saved.path / "model").write_bytes(whole)
    part.write(saved.path / "model", value(4), lambda _: None)  # whole, but not what was saved
    with pytest.raises(CorruptionError, match="resume from the checkpoint before it"):
        found.load("model")
    with pytest.raises(KeyError):
        found.load("seat-9")


def test_a_manifest_of_another_version(tmp_path: Path) -> None:
    path = save(tmp_path, 1).path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    said: list[str] = []
    assert newest(tmp_path, said.append) is None
    assert "use the Outlast that wrote it" in said[0]


def test_written_twice(tmp_path: Path) -> None:
    """A checkpoint's phase that is redone finds what it has already made."""
    first = save(tmp_path, 5)
    before = (first.path / "model").stat().st_mtime_ns
    again = save(tmp_path, 5, generation=2)
    assert again.path == first.path
    assert (again.path / "model").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]


def test_written_again_over_a_damaged_one(tmp_path: Path) -> None:
    flip(save(tmp_path, 5).path / "model", 8 * 5000)
    save(tmp_path, 5, generation=2)
    assert newest(tmp_path, silent) is not None
    assert len(list(tmp_path.iterdir())) == 1


def test_full_disk(tmp_path: Path) -> None:
    kept = save(tmp_path, 1)
    draft = Draft(tmp_path, 9, 8, 1)
    draft.path.mkdir()
    (draft.path / "model").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"No space left.*older checkpoints are untouched"):
        draft.write("model", value(8))
    draft.discard()
    found = newest(tmp_path, silent)
    assert found is not None
    assert found.path == kept.path
    assert [path.name for path in tmp_path.iterdir()] == [kept.path.name]


def test_disk_that_fails_in_the_middle(tmp_path: Path) -> None:
    save(tmp_path, 1)
    draft = Draft(tmp_path, 9, 8, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            draft.write("model", value(8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(draft.path.iterdir()) == []
    assert newest(tmp_path, silent) is not None


def test_progress_is_told_and_may_fail(tmp_path: Path) -> None:
    told: list[int] = []
    draft = Draft(tmp_path, 1, 1, 1)
    written = draft.write("model", {"w": torch.zeros(5 << 20)}, told.append)
    assert told == sorted(told)
    assert max(b - a for a, b in pairwise(told)) <= 8 << 20
    assert told[-1] == written.size_bytes - 16

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="free some space"):
        draft.write("seat-0", 1, full)


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 1, 1, 1)
    with pytest.raises(CodecError, match="hook is a function"):
        draft.write("model", {"hook": lambda: 0})
    with pytest.raises(ValueError, match="no name of a part"):
        draft.write("../model", 1)


def test_complete_checks_its_parts(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 1, 1, 1)
    parts = [draft.write("model", value(1)), draft.write("seat-0", 1)]
    (draft.path / "seat-0").unlink()
    with pytest.raises(CorruptionError, match="seat-0: is missing"):
        draft.complete(parts, "job", 1)
    assert newest(tmp_path, silent) is None


def test_prune_and_clean(tmp_path: Path) -> None:
    paths = [save(tmp_path, step).path for step in range(1, 7)]
    (paths[5] / "model").unlink()
    os.truncate(paths[4] / "model", 5000)
    Draft(tmp_path, 9, 9, 1).write("model", 1)
    (tmp_path / ".trash-step-000000000-n1-77").mkdir()
    assert sorted(prune(tmp_path, 2)) == paths[:2]
    clean(tmp_path)
    assert sorted(tmp_path.iterdir()) == paths[2:]


def test_root_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be read"):
        newest(tmp_path / "file", silent)
    with pytest.raises(StorageError, match="older checkpoints are untouched"):
        Draft(tmp_path / "file", 1, 1, 1).write("model", 1)


def test_the_manifest_is_a_promise(tmp_path: Path) -> None:
    text = (save(tmp_path, 1).path / "manifest.json").read_text()
    assert list(json.loads(text)) == list(Manifest.__struct_fields__)
    assert json.loads(text)["format"] == 1


def test_the_launcher_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path, 1)
    code = (
        "import sys; from pathlib import Path; from outlast.checkpoint.store import newest;"
        "found = newest(Path(sys.argv[1]), print); print(found.step, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 False\n"
