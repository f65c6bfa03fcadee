"""Differences between two values, and between checkpoints by digests alone."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.checkpoint_maker import make

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.load.checkpoint_diff import (
    ValueDifference,
    compare_tensors,
    suspect_tensors,
    value_differences,
)
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.stores.catalog import Checkpoint, open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder

PLACE = SavePoint(7, 7, "a1")


@pytest.mark.parametrize(
    "value",
    [
        None, 1, -0.0, math.nan, 1j, "text", b"bytes", [], {}, {"a": [1, (2.0, None)]}, {1, 2},
        torch.tensor([math.nan, 1.0]), torch.tensor(3), torch.empty(0, 4), np.float32(math.nan),
        np.arange(6).reshape(2, 3), random.Random(3).getstate(), torch.get_rng_state(),
        OrderedDict(a=1), torch.zeros(4, 4).t()[1:],
    ],
)  # fmt: skip
def test_a_value_equals_itself(value: Any) -> None:
    assert value_differences({"x": value}, {"x": value}) == []


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (0.0, -0.0, ("0.0", "-0.0")),
        (1, 1.0, ("1", "1.0")),
        (1, True, ("1", "True")),
        (1j, -1j, ("1j", "(-0-1j)")),
        ("a", "b", ("'a'", "'b'")),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), ("1 differ of 2",) * 2),
        (torch.zeros(2), torch.zeros(3), ("float32 2", "float32 3")),
        (torch.zeros(2), torch.zeros(2).double(), ("float32 2", "float64 2")),
        (np.arange(3), np.arange(3) + 1, ("3 differ of 3",) * 2),
        (list(range(9)), list(range(8, -1, -1)), ("8 differ of 9",) * 2),
        (list(range(9)), list(range(10)), ("1 differ of 9", "of 10")),
    ],
)
def test_one_bit_or_another_type_is_a_difference(a: Any, b: Any, shown: tuple[str, str]) -> None:
    assert value_differences({"x": [a]}, {"x": [b]}) == [ValueDifference("x.0", *shown)]


def test_paths_lead_to_what_is_on_one_side_only() -> None:
    a, b = {"groups": [{"lr": 0.1, "old": 1}]}, {"groups": [{"lr": 0.2, "new": 2}, {}]}
    assert value_differences(a, b) == [
        ValueDifference("groups.0.lr", "0.1", "0.2"),
        ValueDifference("groups.0.old", "1", ""),
        ValueDifference("groups.0.new", "", "2"),
        ValueDifference("groups.1", "", "{}"),
    ]


def made(root: Path, tensors: dict[str, Any], **more: Any) -> Checkpoint:
    make(root, PLACE, tensors, chunk_bytes=4096, **more)
    return open_checkpoint(Folder(root), PLACE)


def tensors() -> dict[str, Any]:
    generator = np.random.default_rng(5)
    return {f"t{k}": generator.random((40, 50), dtype=np.float32) for k in range(8)}


def test_equal_checkpoints_are_known_by_their_digests_alone(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", tensors()), made(tmp_path / "b", tensors())
    for shard in tmp_path.glob("*/*/shard-*"):
        shard.unlink()
    assert suspect_tensors(a, b) == set()


def test_one_bit_brings_its_tensor_and_its_neighbours_in_the_chunk(tmp_path: Path) -> None:
    changed = tensors()
    changed["t3"][20, 20] = -changed["t3"][20, 20]
    a, b = made(tmp_path / "a", tensors()), made(tmp_path / "b", changed)
    found = suspect_tensors(a, b)
    assert "t3" in found and len(found) <= 3
    whole = list(compare_tensors(CheckpointReader(a), CheckpointReader(b)))
    assert (
        list(compare_tensors(CheckpointReader(a), CheckpointReader(b), wanted=found.__contains__))
        == whole
    )
    assert [each.name for each in whole] == ["t3"]


def test_other_divisions_and_names_are_all_suspects(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", tensors()), made(tmp_path / "b", tensors(), world=3)
    assert suspect_tensors(a, b) == set(tensors())
    fewer = {name: each for name, each in tensors().items() if name != "t7"}
    assert "t7" in suspect_tensors(a, made(tmp_path / "c", fewer))
