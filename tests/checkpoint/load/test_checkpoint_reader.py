"""Checkpoint reader: any division of tensors into any other, with minimal reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.checkpoint_maker import Array, make

from outlast.checkpoint.format import manifests
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader, ReadTarget
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CorruptionError, MismatchError

PLACE = SavePoint(7, 7, "a1")
NAMES = {
    "bool": "bool", "uint8": "float8_e4m3fn", "int16": "int16", "uint16": "bfloat16",
    "float32": "float32", "int64": "int64", "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip


class Counted(Folder):
    """A folder that knows how much was read from it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.chunks: list[tuple[str, int]] = []

    def read(self, directory: str, name: str, at: int, into: memoryview) -> None:
        self.chunks.append((name, at))
        super().read(directory, name, at, into)


class Kept:
    """A file's bytes in memory; `damaged`: with a wrong bit in every chunk of 4096."""

    def __init__(self, path: Path, damaged: bool) -> None:
        self._data = bytearray(path.read_bytes())
        for at in range(0, len(self._data), 4096) if damaged else ():
            self._data[at] ^= 4

    def read(self, at: int, into: memoryview) -> None:
        into[:] = self._data[at : at + len(into)]


class InMemory(Folder):
    """A folder whose shards two others have read before; the first has not kept them well."""

    def holders(self, directory: str, name: str) -> list[Kept]:
        return [Kept(self.root / directory / name, damaged) for damaged in (True, False)]


def reader(root: Path, **how: Any) -> CheckpointReader:
    return CheckpointReader(open_checkpoint(Folder(root), PLACE), **how)


def noise(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bits: NaNs of every kind among the floats."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    return bits.view(dtype).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))


@st.composite
def cut(draw: st.DrawFn, box: Box, pieces: int) -> list[Box]:
    """A box cut into up to so many, along any dimensions; a piece may be there twice."""
    found = [box]
    for _ in range(pieces):
        one = found.pop(draw(st.integers(0, len(found) - 1)))
        d = draw(st.integers(0, len(one.size) - 1)) if one.size else 0
        if not one.size or one.size[d] < 2:
            found += [one, one]
            continue
        at = draw(st.integers(1, one.size[d] - 1))
        found.append(Box(one.start, (*one.size[:d], at, *one.size[d + 1 :])))
        start = (*one.start[:d], one.start[d] + at, *one.start[d + 1 :])
        found.append(Box(start, (*one.size[:d], one.size[d] - at, *one.size[d + 1 :])))
    return found


shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)


@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_boxes_into_any_boxes(data: st.DataObject, tmp_path_factory: Any) -> None:
    tensors = {
        f"t{k}": noise(k, data.draw(shapes), dtype)
        for k, dtype in enumerate(data.draw(st.lists(st.sampled_from(sorted(NAMES)), max_size=4)))
    }
    world = data.draw(st.integers(1, 3))
    division: list[list[tuple[str, Box]]] = [[] for _ in range(world)]
    for name, array in tensors.items():
        if array.size:
            for box in data.draw(cut(Box.whole(array.shape), 4)):
                division[data.draw(st.integers(0, world - 1))].append((name, box))
    root = tmp_path_factory.mktemp("root")
    types = {name: NAMES[array.dtype.name] for name, array in tensors.items()}
    make(root, PLACE, tensors, world, division=division, dtypes=types, chunk_bytes=4096)

    targets: list[ReadTarget] = []
    for name, array in tensors.items():
        for box in data.draw(st.lists(boxes(array.shape), min_size=1, max_size=2)):
            into = np.zeros(box.size, array.dtype, order=data.draw(st.sampled_from("CF")))
            if into.ndim and data.draw(st.booleans()):  # every other element of something larger
                into = np.zeros((*box.size[:-1], box.size[-1] * 2), array.dtype)[..., ::2]
            targets.append(ReadTarget(name, box, into))
    for source in (Folder(root), InMemory(root)):
        for target in targets:
            target.into[...] = 0
        CheckpointReader(open_checkpoint(source, PLACE)).read(targets)
        for name, box, into in targets:
            assert into.tobytes() == tensors[name][(*box.slices, ...)].tobytes()


def test_only_the_chunks_that_are_needed_are_read(tmp_path: Path) -> None:
    array = np.arange(4 * 4096, dtype=np.uint8)
    make(tmp_path, PLACE, {"w": array}, world=2, own={1: b"mine"}, chunk_bytes=4096)
    folder = Counted(tmp_path)
    it = CheckpointReader(open_checkpoint(folder, PLACE))
    into = np.zeros(10, np.uint8)
    it.read([ReadTarget("w", Box((3 * 4096 - 5,), (10,)), into)])
    assert sorted(folder.chunks) == [("shard-00001", 0), ("shard-00001", 4096)]
    assert (into == array[3 * 4096 - 5 :][:10]).all()
    folder.chunks.clear()
    assert it.blob(1, "own") == b"mine"
    assert folder.chunks == [("shard-00001", 8192)]


def test_blobs_lie_across_chunks(tmp_path: Path) -> None:
    own = {0: b"", 1: bytes(range(256)) * 50}
    make(tmp_path, PLACE, {"w": np.arange(9.0)}, own=own, shared=b"all", chunk_bytes=4096)
    it = reader(tmp_path)
    assert it.blob(0, "shared") == b"all"
    assert [it.blob(rank, "own") for rank in (0, 1)] == list(own.values())
    for rank, name in ((1, "shared"), (2, "own"), (-1, "own"), (0, "other")):
        with pytest.raises(MismatchError, match=name):
            it.blob(rank, name)


def test_all_differences_are_listed_and_nothing_is_touched(tmp_path: Path) -> None:
    make(tmp_path, PLACE, {"w": np.ones((4, 4), np.float32), "b": np.ones(3, np.int64)})
    right = np.zeros((4, 4), np.float32)
    fixed = np.zeros(3, np.int64)
    fixed.flags.writeable = False
    with pytest.raises(MismatchError) as raised:
        reader(tmp_path).read(
            [
                ReadTarget("w", Box((0, 0), (4, 4)), right),
                ReadTarget("gone", Box((0,), (1,)), np.zeros(1)),
                ReadTarget("w", Box((1, 0), (4, 4)), np.zeros((4, 4), np.float32)),
                ReadTarget("w", Box((0, 0), (4, 4)), np.zeros((4, 3), np.float32)),
                ReadTarget("w", Box((0, 0), (4, 4)), np.zeros((4, 4), np.float64)),
                ReadTarget("w", Box((0, 0), (4, 4)), np.zeros((4, 4), ">f4")),
                ReadTarget("b", Box((0,), (3,)), fixed),
                ReadTarget("b", Box((0,), (3,)), np.zeros(3, object)),
            ]
        )
    message = str(raised.value)
    for part in (
        "gone: is not in the checkpoint",
        "(4, 4) from (1, 0) is no part of it",
        "in an array of (4, 3)",
        "is float32; the array's elements have 8 bytes",
        "array of >f4 cannot",
        "cannot be written to",
        "array of object cannot",
    ):
        assert message.count(part) == 1, (part, message)
    assert not right.any()


def test_a_hole_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    division = [[("w", Box((0, 0), (2, 4)))], [("w", Box((2, 0), (2, 3)))]]
    make(tmp_path, PLACE, {"w": np.ones((4, 4), np.float32)}, division=division)
    into = np.zeros((4, 4), np.float32)
    with pytest.raises(CorruptionError, match=r"no piece holds w from \(2, 3\)"):
        reader(tmp_path).read([ReadTarget("w", Box((0, 0), (4, 4)), into)])
    assert not into.any()
    reader(tmp_path).read([ReadTarget("w", Box((0, 0), (4, 3)), into[:, :3])])
    assert into[:, :3].all()


def test_a_damaged_chunk_comes_from_a_mirror_with_the_same_bytes(tmp_path: Path) -> None:
    array = noise(1, (3000,), "float32")
    stores: list[Folder] = []
    for name, seed in (("ours", 1), ("another", 2), ("broken", 1), ("whole", 1)):
        make(tmp_path / name, PLACE, {"w": noise(seed, (3000,), "float32")}, chunk_bytes=4096)
        stores.append(Folder(tmp_path / name))
    for name in ("ours", "broken"):
        with (tmp_path / name / PLACE.directory / "shard-00001").open("r+b") as file:
            file.seek(100)
            file.write(b"\0\1\2\3\4")
    said: list[str] = []
    into = np.zeros(3000, np.float32)
    target = ReadTarget("w", Box((0,), (3000,)), into)
    with pytest.raises(CorruptionError, match=r"ours.*shard-00001: chunk 0 \(bytes 0 to 4096; ho"):
        reader(tmp_path / "ours", mirrors=stores[1:3], on_repair=said.append).read([target])
    assert said == []
    reader(tmp_path / "ours", mirrors=stores[1:], on_repair=said.append).read([target])
    assert into.tobytes() == array.tobytes()
    assert len(said) == 1 and "holds w" in said[0] and str(tmp_path / "whole") in said[0]


def test_a_lost_shard_comes_from_a_mirror(tmp_path: Path) -> None:
    for name in ("ours", "whole"):
        make(tmp_path / name, PLACE, {"w": np.arange(30.0)})
    (tmp_path / "ours" / PLACE.directory / "shard-00000").unlink()
    said: list[str] = []
    into = np.zeros(30)
    mirrors = [Folder(tmp_path / "nowhere"), Folder(tmp_path / "whole")]
    it = reader(tmp_path / "ours", mirrors=mirrors, on_repair=said.append)
    it.read([ReadTarget("w", Box((0,), (30,)), into)])
    assert (into == np.arange(30.0)).all()
    assert len(said) == 1 and "missing" in said[0]


def test_sizes_of_elements_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    sizes = {
        str(dtype).removeprefix("torch."): dtype.itemsize
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    }
    assert {name: sizes[name] for name in manifests.ITEM_BYTES} == manifests.ITEM_BYTES
    assert not {
        n for n in set(sizes) - set(manifests.ITEM_BYTES) if n.startswith(("float", "comp"))
    }
