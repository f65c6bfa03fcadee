"""`outlast ckpt export, import, diff` on checkpoints of a Checkpointer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.checkpoint_maker import make
from tests.cli.ckpt_command import Ckpt, checkpoint, flip, place, tree

from outlast.errors import EXIT_USAGE, EXIT_USER_ERROR

pytest.importorskip("torch", reason="values and element types are torch's")

from outlast.checkpoint.format.codec import encode

TRAIN = """
import sys
import torch
from outlast.checkpoint import Checkpointer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
with Checkpointer(sys.argv[1]) as saves:
    for step in (1, 2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "name": "run-7"}
        saves.save(step, state)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of a small training."""
    root = tmp_path_factory.mktemp("trained") / "checkpoints"
    subprocess.run([sys.executable, "-c", TRAIN, str(root)], check=True, timeout=100)
    return root


@pytest.mark.process
def test_show_prints_the_state_of_a_script(ckpt: Ckpt, trained: Path) -> None:
    assert ckpt("verify", trained, "--all").code == 0
    found = ckpt("show", trained, "--json").json
    assert found["origin"]["outlast"] and found["values"]["name"] == "'run-7'"
    assert found["values"]["optimizer"].startswith("AdamW: lr=0.0001,")
    assert found["values"]["scheduler"].startswith("StepLR: step_size=1")
    text = ckpt("show", trained).out
    assert "num_batches_tracked int64," in text and "exp_avg, exp_avg_sq float32 2 x 8" in text


@pytest.mark.process
def test_two_steps_differ_in_what_was_trained(ckpt: Ckpt, trained: Path) -> None:
    assert ckpt("diff", trained, trained).code == 0
    found = ckpt("diff", trained, trained, "--step", 1, "--step-b", 2, "--json")
    assert found.code == EXIT_USER_ERROR and not found.json["equal"]
    names = {each["name"] for each in found.json["tensors"]}
    assert {"model.0.weight", "optimizer.state.0.weight.exp_avg"} <= names
    odd = {(each["rank"], each["path"]): (each["a"], each["b"]) for each in found.json["values"]}
    assert odd[-1, "objects.scheduler.value.last_epoch"] == ("1", "2")
    text = ckpt("diff", trained, trained, "--step", 1, "--step-b", 2).out
    assert "objects.scheduler.value.last_epoch: 1 -> 2" in text
    assert "rank 0: random." in text  # its generators have moved on


@pytest.mark.process
def test_out_and_in_again_is_the_same(ckpt: Ckpt, trained: Path, tmp_path: Path) -> None:
    names = ("--format", "safetensors", "--prefix", "model.", "--max-shard-size", "300B")
    found = ckpt("export", trained, tmp_path / "hf", *names, "--json")
    assert found.code == 0 and len(found.json["files"]) > 2
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert "0.weight" in index["weight_map"] and "model.0.weight" not in index["weight_map"]
    found = ckpt("import", tmp_path / "hf", tmp_path / "in", "--add", "model.", "--step", 2)
    assert found.code == 0 and "9 tensors" in found.out
    found = ckpt("diff", trained, tmp_path / "in", "--tensors", "model.*")
    assert found.code == 0 and "equal to the last bit: 9 tensors" in found.out
    assert ckpt("diff", trained, tmp_path / "in").code == EXIT_USER_ERROR

    assert ckpt("export", trained, tmp_path / "dcp", "--format", "dcp").code == 0
    found = ckpt("import", tmp_path / "dcp", tmp_path / "in2", "--json")
    assert found.code == 0 and found.json["skipped"] == {} and found.json["objects"] > 0
    assert ckpt("diff", trained, tmp_path / "in2", "--tensors", "*.*").code == 0
    assert ckpt("verify", tmp_path / "in2").code == 0


def test_an_export_of_damage_leaves_nothing(ckpt: Ckpt, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    checkpoint(root, 2)
    flip(checkpoint(root, 1) / "shard-00000", 9)
    for form in ("dcp", "safetensors"):
        found = ckpt("export", root, tmp_path / form, "--step", 1, "--format", form)
        assert found.code == EXIT_USER_ERROR and "chunk 0" in found.err
    found = ckpt("diff", root, root, "--step", 1, "--step-b", 2)  # and this is no difference
    assert found.code == EXIT_USAGE and "chunk 0" in found.err and found.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def differences(ckpt: Ckpt, tmp_path: Path, a: Any, b: Any, *words: object) -> tuple[int, Any]:
    """Of one tensor: the exit code and what was found."""
    checkpoint(tmp_path / "a", 1, w=a, world=1)
    checkpoint(tmp_path / "b", 1, w=b, world=3)
    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json", *words)
    return found.code, found.json["tensors"]


@pytest.mark.parametrize(
    ("a", "b", "words", "expected"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], (), None),
        ([1.0, 0.0], [1.0, -0.0], (), (1, 0.0, 0)),
        ([1.0, 0.0], [1.0, -0.0], ("--tolerance", 0), None),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 2.0], (), (2, 1.0, 0)),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 2.0], ("--tolerance", 0.5), (1, 1.0, 0)),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 2.0], ("--tolerance", 1), None),
        ([1.0, np.nan], [np.nan, np.nan], ("--tolerance", 9), (1, 0.0, 1)),
        ([np.inf, 5.0], [-np.inf, 6.0], (), (2, 1.0, 1)),
        ([np.inf, 5.0], [np.inf, 6.0], ("--tolerance", 1), None),
    ],
)
def test_floats(
    a: list[float], b: list[float], words: tuple[object, ...], expected: tuple[int, float, int],
    ckpt: Ckpt, tmp_path: Path,
) -> None:  # fmt: skip
    code, found = differences(
        ckpt, tmp_path, np.array(a, np.float32), np.array(b, np.float32), *words
    )
    if expected is None:
        assert (code, found) == (0, [])
    else:
        assert code == EXIT_USER_ERROR
        keys = ("differing", "difference_max", "not_finite")
        assert [found[0][key] for key in keys] == list(expected)


def test_other_shapes_types_and_names(ckpt: Ckpt, tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    checkpoint(tmp_path / "a", 1, same=ones, narrow=ones, shape=ones, left=ones)
    checkpoint(
        tmp_path / "b", 1, same=ones, narrow=ones.astype(np.float16), shape=np.ones((2, 2)),
        right=ones,
    )  # fmt: skip
    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert found.code == EXIT_USER_ERROR
    said = {
        each["name"]: (each["a"], each["b"], each["elements"]) for each in found.json["tensors"]
    }
    assert said == {
        "left": ("float32 4", "", 0),
        "right": ("", "float32 4", 0),
        "shape": ("float32 4", "float64 2 x 2", 0),
        "narrow": ("float32 4", "float16 4", 4),
    }
    text = ckpt("diff", tmp_path / "a", tmp_path / "b").out
    for words in ("only in A: float32 4", "only in B: float32 4", "A float32 4, B float16 4"):
        assert words in text
    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors", "narrow", "--tolerance", 0)
    assert found.code == 0 and "equal within the tolerance" in found.out
    before = tree(tmp_path)
    assert ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors", "same").code == 0
    assert tree(tmp_path) == before and place(1).directory in str(list(before))


def test_values_beside_tensors(ckpt: Ckpt, tmp_path: Path) -> None:
    shared = {"lr": 0.1, "nan": float("nan"), "zero": 0.0, "n": 1, "deep": [{"x": 1}, {"x": 2}]}
    other = shared | {"lr": 0.2, "zero": -0.0, "n": True, "deep": [{"x": 1}], "new": "yes"}
    tensors = {"w": np.zeros(3, np.uint8)}
    for name, value, own in (("a", shared, b"12"), ("b", other, b"345")):
        data = encode(value)
        make(tmp_path / name, place(1), tensors, 2, shared=data, own={1: own})
    make(tmp_path / "alone", place(1), tensors, 1, shared=encode(shared))
    make(tmp_path / "none", place(1), tensors, 1)

    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert found.code == EXIT_USER_ERROR and found.json["tensors"] == []
    odd = {(each["rank"], each["path"]): (each["a"], each["b"]) for each in found.json["values"]}
    assert len(odd.pop((1, "digest"))[0]) == 34
    assert odd.pop((-1, "deep.1")) == ("{'x': 2}", "")
    assert odd == {
        (-1, "lr"): ("0.1", "0.2"),
        (-1, "zero"): ("0.0", "-0.0"),
        (-1, "n"): ("1", "True"),
        (-1, "new"): ("", "'yes'"),
    }
    text = ckpt("diff", tmp_path / "a", tmp_path / "b").out
    assert "new: (not in A) -> 'yes'" in text and "rank 1: digest: " in text
    # What is ranks' own cannot be compared where there are more of them.
    assert ckpt("diff", tmp_path / "a", tmp_path / "alone").code == 0
    assert ckpt("diff", tmp_path / "a", tmp_path / "none").code == EXIT_USER_ERROR


def test_nothing_is_imported_into_a_run(ckpt: Ckpt, tmp_path: Path) -> None:
    """It would be the newest there: nothing could begin from it, and older ones would go."""
    (tmp_path / "x.safetensors").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    before = tree(tmp_path)
    found = ckpt("import", tmp_path / "x.safetensors", tmp_path / "run", "--step", 9)
    assert found.code == EXIT_USAGE and "is a run directory" in found.err
    assert tree(tmp_path) == before
