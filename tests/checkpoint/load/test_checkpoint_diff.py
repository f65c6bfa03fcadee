"""Comparison of two checkpoints of every element type, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.checkpoint_maker import make

from outlast.checkpoint.format.manifests import ITEM_BYTES, SavePoint
from outlast.checkpoint.load import checkpoint_diff
from outlast.checkpoint.load.checkpoint_diff import TensorDifference, compare_tensors
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder

PLACE = SavePoint(1, 1, "a")
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def reader(root: Path, tensors: dict[str, Any], world: int = 1, **how: Any) -> CheckpointReader:
    make(root, PLACE, tensors, world, chunk_bytes=4096, **how)
    return CheckpointReader(open_checkpoint(Folder(root), PLACE))


def one(found: list[TensorDifference]) -> tuple[int, float, int]:
    (only,) = found
    return only.differing, only.difference_max, only.not_finite


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_one_bit_of_any_type_is_one_element(dtype: str, tmp_path: Path) -> None:
    kind = BITS[ITEM_BYTES[dtype]]
    a = np.zeros(40, kind)
    b = a.copy()
    b.view(np.uint8)[7 * kind().itemsize] ^= 1
    readers = [
        reader(tmp_path / name, {"w": array}, world, dtypes={"w": dtype})
        for name, array, world in (("a", a, 1), ("b", b, 3))
    ]
    (found,) = compare_tensors(*readers)
    assert (found.elements, found.differing) == (40, 1)
    assert list(compare_tensors(readers[0], readers[0])) == []


@pytest.mark.parametrize(
    ("kind", "a", "b", "apart"),
    [
        (np.int64, -(2**63), 2**63 - 1, float(2**64 - 1)),
        (np.uint64, 0, 2**64 - 1, float(2**64 - 1)),
        (np.int64, 2**62, 2**62 + 1, 1.0),
        (np.int8, -128, 127, 255.0),
        (np.uint8, 3, 1, 2.0),
        (np.bool_, False, True, 1.0),
        (np.float64, 1.0, 1.0 + 2**-52, 2.0**-52),
        (np.float16, 1.0, 65504.0, 65503.0),
        (np.complex64, 1 + 1j, 4 + 5j, 5.0),
        (np.complex128, 0, 3 - 4j, 5.0),
    ],
)
def test_how_far_apart(kind: Any, a: Any, b: Any, apart: float, tmp_path: Path) -> None:
    readers = [reader(tmp_path / n, {"w": np.array([v], kind)}) for n, v in (("a", a), ("b", b))]
    assert one(list(compare_tensors(*readers))) == (1, apart, 0)
    assert list(compare_tensors(*readers, tolerance=apart)) == []
    assert one(list(compare_tensors(*readers, tolerance=apart * 0.99)))[0] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_that_numpy_has_not(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    a, b = torch.tensor([1.0, 2.0, 3.0]).to(kind), torch.tensor([1.0, 2.0, 5.0]).to(kind)
    width = BITS[a.element_size()]
    arrays = [t.view(torch.uint8).numpy().view(width) for t in (a, b)]
    readers = [
        reader(tmp_path / name, {"w": array}, dtypes={"w": dtype})
        for name, array in zip("ab", arrays, strict=True)
    ]
    assert one(list(compare_tensors(*readers))) == (1, 2.0, 0)
    wide = reader(tmp_path / "c", {"w": np.array([1, 2, 3.5], np.float32)})
    (found,) = compare_tensors(readers[0], wide)
    assert found.differing == 1 and found.difference_max == 0.5
    assert (found.a, found.b) == (f"{dtype} 3", "float32 3")


@settings(max_examples=25)
@given(data=st.data())
def test_blocks_of_any_size_find_what_numpy_finds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    numbers = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4)
    )
    a = {f"t{i}": numbers.standard_normal(shape) for i, shape in enumerate(shapes)}
    b = {name: array.astype(data.draw(st.sampled_from(["f4", "f8"]))) for name, array in a.items()}
    for array in b.values():
        hit = numbers.random(array.shape) < 0.2
        array[hit] += 1
    root = tmp_path_factory.mktemp("blocks")
    world = data.draw(st.integers(1, 3))
    readers = reader(root / "a", a, 2), reader(root / "b", b, world)
    told: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_diff, "BLOCK_BYTES", data.draw(st.integers(8, 200)))
        patch.setattr(checkpoint_diff, "_PART_ELEMENTS", data.draw(st.integers(1, 50)))
        found = {
            d.name: d for d in compare_tensors(*readers, on_progress=lambda *how: told.append(how))
        }
    for name in a:
        same = a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name])
        assert (name not in found) == same
        if not same:
            apart = np.abs(a[name] - b[name])
            assert found[name].differing == np.count_nonzero(apart)
            assert found[name].difference_max == apart.max(initial=0.0)
    assert told[-1][0] == told[-1][1] == sum(x.nbytes for x in [*a.values(), *b.values()])
