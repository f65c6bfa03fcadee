"""Partial loads: skipped, renamed and cast names, and refusal of other differences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outlast.checkpoint import Checkpointer
from outlast.errors import MismatchError

pytestmark = pytest.mark.process


def make(head: str = "head", outputs: int = 3, body: str = "body", **more: Any) -> dict[str, Any]:
    """Freshly made, all ones."""
    model = nn.ModuleDict({body: nn.Linear(4, 5), head: nn.Linear(5, outputs)})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)} | more


def train(state: dict[str, Any]) -> None:
    layers = list(state["model"].values())
    layers[1](layers[0](torch.randn(8, 4, dtype=layers[0].weight.dtype))).square().sum().backward()
    state["optimizer"].step()


def moment(state: dict[str, Any], name: str) -> torch.Tensor | None:
    parameter = state["model"].get_parameter(name)
    return state["optimizer"].state.get(parameter, {}).get("exp_avg")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of step 7, and the state that was saved."""
    root = tmp_path_factory.mktemp("trained")
    state = make(best=3.0)
    train(state)
    with Checkpointer(root) as saves:
        saves.save(7, state)
    return root, state


def test_expanded_tensors_are_filled_where_their_elements_are_equal(tmp_path: Path) -> None:
    def made(mask: torch.Tensor) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        model.register_buffer("mask", mask)
        return {"model": model}

    with Checkpointer(tmp_path, complete=False) as saves:
        saves.save(1, made(torch.tensor([[math.nan], [2.0]]).expand(2, 3)))
        saves.wait()
        fresh = made(torch.zeros(2, 1).expand(2, 3))
        assert saves.load(fresh)
        assert fresh["model"].mask.stride() == (1, 0)
        assert fresh["model"].mask.nan_to_num(1.0).tolist() == [[1.0] * 3, [2.0] * 3]
        with pytest.raises(MismatchError, match=r"model\.mask: is expanded here.*differ"):
            saves.load(fresh := made(torch.zeros(1, 3).expand(2, 3)))
        assert not fresh["model"].mask.any()


def test_windows_of_one_memory_are_filled_where_they_agree(tmp_path: Path) -> None:
    def made(windows: torch.Tensor, listed: torch.Tensor) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        model.register_buffer("windows", windows)
        return {"model": model, "values": {"listed": listed}, "top": listed}

    def zeros() -> torch.Tensor:
        return torch.zeros(6).unfold(0, 4, 1)

    row, apart = torch.arange(1.0, 7.0), torch.arange(12.0).view(3, 4)
    with Checkpointer(tmp_path / "equal", complete=False) as saves:
        saves.save(1, made(row.unfold(0, 4, 1), row.unfold(0, 4, 1)))
        saves.wait()
        assert saves.load(fresh := made(zeros(), zeros()))
        assert torch.equal(fresh["model"].windows, row.unfold(0, 4, 1))
        assert torch.equal(fresh["top"], fresh["model"].windows)
    with Checkpointer(tmp_path / "apart", complete=False) as saves:
        saves.save(1, made(apart, apart))
        saves.wait()
        for state, name in (
            (made(zeros(), torch.zeros(3, 4)), r"model\.windows"),
            (made(torch.zeros(3, 4), zeros()), "top"),
        ):
            with pytest.raises(MismatchError, match=f"{name}: .*overlaps itself.*differ"):
                saves.load(state)
            assert not state["model"].windows.any() and not state["top"].any()


def test_tensors_that_share_memory_are_never_a_mixture(tmp_path: Path) -> None:
    def made(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
        return {"w": nn.ParameterDict({"a": nn.Parameter(a), "b": nn.Parameter(b)})}

    def loads(tmp_path: Path, a: torch.Tensor, b: torch.Tensor) -> bool:
        state = made(a, b)
        with Checkpointer(tmp_path, complete=False) as saves:
            saves.load(state)
        return torch.equal(state["w"].a, torch.ones(4, 3))

    for name, value in (("equal", 1.0), ("unlike", 2.0)):
        with Checkpointer(tmp_path / name, complete=False) as saves:
            saves.save(1, made(torch.ones(4, 3), torch.full((4, 3), value)))
    tied, rows, columns = torch.zeros(4, 3), torch.zeros(6, 3), torch.zeros(4, 6)
    assert loads(tmp_path / "equal", tied, tied)
    assert loads(tmp_path / "equal", rows[:4], rows[2:])
    assert loads(tmp_path / "unlike", columns[:, :3], columns[:, 3:])  # side by side
    for a, b in ((tied, tied), (rows[:4], rows[2:])):
        with pytest.raises(MismatchError, match=r"w\.[ab] shares memory here.*in part"):
            loads(tmp_path / "unlike", a, b)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_memory_that_cannot_be_written_is_a_difference(tmp_path: Path) -> None:
    np.save(tmp_path / "base.npy", np.ones(9000, np.float32))
    mapped = torch.from_numpy(np.load(tmp_path / "base.npy", mmap_mode="r"))
    state = {"w": nn.ParameterDict({"a": nn.Parameter(mapped, requires_grad=False)})}
    with Checkpointer(tmp_path / "saves", complete=False) as saves:
        saves.save(1, state)
        saves.wait()
        with pytest.raises(MismatchError, match=r"w\.a: is in memory that is mapped read-only"):
            saves.load(state)
        state = {"w": nn.ParameterDict({"a": nn.Parameter(torch.zeros(9000))})}
        assert saves.load(state)
        assert state["w"].state_dict()["a"].tolist() == [1.0] * 9000


def test_a_new_head_is_left_as_it_is(trained: tuple[Path, dict[str, Any]]) -> None:
    root, old = trained
    state = make(outputs=2, best=0.0)
    with Checkpointer(root) as saves:
        with pytest.raises(MismatchError, match=r"model\.head\.weight: \(3, 5\) in the checkpoint"):
            saves.load(state)
        restored = saves.load(state, skip=["model.head"])
    assert restored and restored.missing == restored.unexpected == ()
    assert restored.notes == ("left as they were, by skip=: model.head",)
    assert torch.equal(state["model"].body.weight, old["model"].body.weight)
    assert torch.equal(_some(moment(state, "body.weight")), _some(moment(old, "body.weight")))
    assert (state["model"].head.weight == 1).all() and moment(state, "head.weight") is None
    assert state["best"] == 3.0
    train(state)


def test_missing_and_unused_entries_are_named(trained: tuple[Path, dict[str, Any]]) -> None:
    root, old = trained
    state = make(head="classifier", more=[1])
    with Checkpointer(root) as saves:
        with pytest.raises(MismatchError):
            saves.load(state)
        restored = saves.load(state, strict=False)
    assert restored and restored.missing == (
        "model.classifier.bias", "model.classifier.weight", "more",
        "optimizer: parameter classifier.bias", "optimizer: parameter classifier.weight",
    )  # fmt: skip
    assert {"best", "model.head.bias", "optimizer.state.head.bias.exp_avg"} < {*restored.unexpected}
    assert len(restored.unexpected) == 9 and len(restored.notes) == 2
    assert torch.equal(state["model"].body.weight, old["model"].body.weight)
    assert (state["model"].classifier.weight == 1).all() and state["more"] == [1]
    train(state)


def test_names_may_have_changed(trained: tuple[Path, dict[str, Any]]) -> None:
    """Of a subtree, of an entry, and with them of what the optimizer keeps."""
    root, old = trained
    state = make(body="backbone", score=0.0)
    state = {"net": state["model"], "optimizer": state["optimizer"], "score": 0.0}
    names = {"model": "net", "model.body": "net.backbone", "best": "score"}
    with Checkpointer(root) as saves:
        restored = saves.load(state, rename=names)
    assert restored and restored.notes == () and state["score"] == 3.0
    state["model"] = state["net"]
    for before, now in (("body.weight", "backbone.weight"), ("head.bias", "head.bias")):
        assert torch.equal(old["model"].get_parameter(before), state["net"].get_parameter(now))
        assert torch.equal(_some(moment(old, before)), _some(moment(state, now)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_are_cast_only_on_request(
    trained: tuple[Path, dict[str, Any]], dtype: torch.dtype
) -> None:
    root, old = trained
    state = make(best=0.0)
    state["model"].to(dtype)
    with Checkpointer(root) as saves:
        with pytest.raises(MismatchError, match="float32 in the checkpoint"):
            saves.load(state)
        restored = saves.load(state, cast=True)
    assert restored and "tensors were cast, by cast= (float32 to " in restored.notes[0]
    for name in ("body.weight", "head.bias"):
        live = state["model"].get_parameter(name)
        assert live.dtype is dtype and _some(moment(state, name)).dtype is dtype
        assert torch.equal(live, old["model"].get_parameter(name).to(dtype))
        assert torch.equal(_some(moment(state, name)), _some(moment(old, name)).to(dtype))
    train(state)


def test_a_cast_that_a_value_does_not_survive_is_noted(tmp_path: Path) -> None:
    value = torch.tensor([1.0, 1e9, float("inf")])
    with Checkpointer(tmp_path) as saves:
        saves.save(1, {"a": value, "n": torch.tensor([2])})
        saves.wait()
        small = torch.zeros(3, dtype=torch.float16)
        restored = saves.load({"a": small, "n": torch.tensor([0])}, cast=True)
        with pytest.raises(MismatchError, match="int64 in the checkpoint, float32 here"):
            saves.load({"a": value, "n": torch.tensor([0.0])}, cast=True)
    assert small.tolist() == [1.0, float("inf"), float("inf")]
    assert restored and "values of a are infinite now" in restored.notes[1]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"skip": ["model.haed"]}, "model.haed: is to be skipped, and is no entry"),
        ({"rename": {"model.haed": "model.body"}}, "the checkpoint has no model.haed"),
        ({"rename": {"model.head": "model.body"}}, "would both be model.body"),
        ({"strict": False, "rename": {"model": "x", "optimizer": "y"}}, "nothing of this state"),
    ],
)
def test_a_request_that_matches_nothing_is_refused(
    trained: tuple[Path, dict[str, Any]], request_: dict[str, Any], why: str
) -> None:
    root, _ = trained
    state = make()
    with Checkpointer(root, complete=False) as saves, pytest.raises(MismatchError, match=why):
        saves.load(state, **request_)
    assert (state["model"].body.weight == 1).all()


def test_an_ambiguous_owner_of_optimizer_state_is_refused(tmp_path: Path) -> None:
    """Two modules of equal names, an optimizer each: renaming in one would lose its moments."""

    def two(name: str) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for part in ("generator", "critic"):
            module = nn.ModuleDict({name if part == "generator" else "body": nn.Linear(2, 2)})
            optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
            state |= {part: module, f"{part}_optimizer": optimizer}
        return state

    with Checkpointer(tmp_path) as saves:
        saves.save(1, two("body"))
        saves.wait()
        names = {"generator.body": "generator.trunk"}
        with pytest.raises(MismatchError, match="several modules have parameters of the names"):
            saves.load(two("trunk"), rename=names)


def _some(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
