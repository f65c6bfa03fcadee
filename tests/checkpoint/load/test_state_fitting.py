"""Fitting of saved state: listed differences, missing names, and rank-local state."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.state_samples import (
    Holding,
    differences,
    model,
    move,
    saved,
    trained,
    world_of_one,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from outlast.checkpoint import state_content
from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import Tensor
from outlast.checkpoint.load.state_fitting import SavedState, StateFitting
from outlast.checkpoint.script_state import ScriptState, check_complete
from outlast.errors import UsageError

__all__ = ["world_of_one"]


# --- what does not fit ---


def test_all_differences_are_listed_and_nothing_is_touched() -> None:
    source = trained(model()) | {"gone": [1]}
    network = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(6)))
    network[0].double()
    network.add_module("new", nn.Linear(1, 1))
    optimizer = torch.optim.SGD(network.parameters())
    target = {"model": network, "optimizer": optimizer, "scheduler": [2], "more": 3}
    found = differences(source, target)
    for line in (
        "gone: value that the state does not have",
        "more: the checkpoint has no such entry (here: value)",
        "scheduler: object in the checkpoint, value here",
        "optimizer: AdamW in the checkpoint, SGD here",
        "model.0.weight: float32 in the checkpoint, float64 here",
        "model.1.0.weight: (6, 6) in the checkpoint, (5, 6) here",
        "model.new.bias: missing in the checkpoint",
        "model.2.weight: missing here",
    ):
        assert line in found, found
    assert len([line for line in found if line.startswith("model.")]) == 8
    assert differences(source, copy.copy(source)) == []


def test_parameters_that_changed_groups_and_scalers_that_are_off() -> None:
    def make(order: int, enabled: bool) -> dict[str, Any]:
        network = nn.Linear(2, 2)
        groups = [{"params": [network.weight], "weight_decay": 0.1}, {"params": [network.bias]}]
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        return {"m": network, "o": torch.optim.SGD(groups[::order]), "scaler": scaler}

    found = differences(make(1, True), make(-1, False))
    assert "o: parameter weight: in group 0 in the checkpoint, in group 1 here" in found
    assert "scaler: is disabled here" in found and len(found) == 3
    one = {"m": (m := nn.Linear(2, 2)), "o": torch.optim.SGD(m.parameters()), "scaler": 1}
    assert "o: 2 groups in the checkpoint, 1 here" in differences(make(1, True), one)


def test_an_optimizers_state_has_its_own_order() -> None:
    """`torch.save` writes dicts in their order; a checkpoint lists tensors by name."""
    source, target = trained(model()), trained(model(), steps=0)
    there, values = saved(source)
    by_name = SavedState(dict(sorted(there.tensors.items())), there.shared, there.rest)
    fitting = StateFitting(ScriptState(target), by_name)
    with torch.no_grad():
        for name, into in fitting.targets.items():
            into.copy_(values[name])
    fitting.finish()
    orders = [[list(each) for each in s["optimizer"].state.values()] for s in (source, target)]
    assert orders[0] == orders[1] and orders[0][0] == ["step", "exp_avg", "exp_avg_sq"]


def test_a_dtype_that_this_torch_lacks_is_a_difference() -> None:
    there, _ = saved(trained(model()) | {"kept": [torch.ones(2)]})
    fresh = trained(model(), steps=0) | {"kept": [torch.ones(2)]}
    names = ("kept.0", "optimizer.state.0.weight.exp_avg")
    newer = dict(there.tensors) | {
        name: Tensor("float3", there.tensors[name].shape) for name in names
    }
    found = StateFitting(ScriptState(fresh), there._replace(tensors=newer)).differences
    lacks = f"float3 in the checkpoint, which torch {torch.__version__} lacks"
    assert sorted(found) == [f"{name}: {lacks}" for name in names]


def test_meta_tensors_are_differences() -> None:
    with torch.device("meta"):
        empty = {"model": nn.Linear(2, 2)}
    there, _ = saved({"model": nn.Linear(2, 2)})
    assert "to_empty" in StateFitting(ScriptState(empty), there).differences[0]


def test_modules_before_their_first_forward_are_differences() -> None:
    there, _ = saved({"model": nn.Linear(2, 2)})
    lazy = ScriptState({"model": nn.LazyLinear(2)})
    found = StateFitting(lazy, there)
    assert found.differences == [
        f"model.{name}: is not initialized here; run one forward first"
        for name in ("weight", "bias")
    ]


def test_parameters_of_an_object_remain_parameters() -> None:
    """They came back as tensors that no gradient reaches."""

    def holding(value: float) -> Holding:
        weight = nn.Parameter(torch.full((2,), value))
        frozen = nn.Parameter(torch.full((1,), value), requires_grad=False)
        leaf = torch.full((3,), value, requires_grad=True)
        state = {"in": {"weight": weight, "frozen": frozen}, "list": [leaf, leaf * 2], "n": value}
        return Holding({**state, "tuple": (weight, torch.full((1,), value, dtype=torch.int64))})

    source, target = {"o": holding(3.0)}, {"o": holding(0.0)}
    move(source, target)
    state = target["o"].state_dict()
    expected = torch.full((2,), 3.0)
    for weight in (state["in"]["weight"], state["tuple"][0]):
        assert isinstance(weight, nn.Parameter) and weight.requires_grad
        assert torch.equal(weight, expected)
    frozen, (leaf, result) = state["in"]["frozen"], state["list"]
    assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad and frozen.item() == 3
    assert leaf.requires_grad and not isinstance(leaf, nn.Parameter)
    assert not result.requires_grad and result.tolist() == [6.0] * 3
    assert state["tuple"][1].tolist() == [3] and state["n"] == 3.0


def test_a_partial_load_is_allowed_on_request() -> None:
    source, target = trained(model()), {"model": model(1)}
    move(source, target, complete=False)
    assert torch.equal(target["model"][0].weight, source["model"][0].weight)


# --- completeness ---


def test_a_missing_part_is_named() -> None:
    state = trained(model())
    check_complete(ScriptState(state))
    with pytest.raises(UsageError, match="'model' has parameters to train, but no optimizer"):
        check_complete(ScriptState({"model": state["model"]}))
    with pytest.raises(UsageError, match="a learning rate scheduler leads optimizer 'optimizer'"):
        check_complete(ScriptState({k: state[k] for k in ("model", "optimizer")}))
    with pytest.raises(UsageError, match="updates 8 of its 8 parameters in no module"):
        check_complete(ScriptState({k: state[k] for k in ("optimizer", "scheduler")}))
    check_complete(ScriptState({"frozen": model().requires_grad_(requires_grad=False)}))


def test_schedulers_in_a_container_and_parameters_that_are_values_count() -> None:
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    container = Holding({})
    container.schedulers = [LambdaLR(optimizer, lambda _: 1.0)]
    state = {"weights": {"w": weight}, "optimizer": optimizer, "schedulers": container}
    check_complete(ScriptState(state))


# --- a rank's own ---


def test_own_state_comes_back_exactly(tmp_path: Path) -> None:
    mine, loader, numpy_own = torch.Generator(), Holding({"at": 5}), np.random.default_rng(3)
    network = nn.BatchNorm1d(2)
    network.running_mean.fill_(3)
    given = ScriptState(
        {"m": network, "dropout": mine}, {"loader": loader, "n": numpy_own, "d": {"k": 1}}
    )
    blob = state_content.capture_rank_state(given, {}, 2)
    first = (torch.rand(2, generator=mine), numpy_own.random(), random.random(),
             np.random.rand(), torch.rand(2))  # fmt: skip
    loader.value, given.own["d"]["k"] = {"at": 9}, 2
    network.running_mean.fill_(4)
    decoded = codec.decode(blob)
    assert state_content.rank_state_differences(given, decoded) == ([], [])
    state_content.restore_rank_state(given, decoded, process=True)
    again = (torch.rand(2, generator=mine), numpy_own.random(), random.random(),
             np.random.rand(), torch.rand(2))  # fmt: skip
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert loader.value == {"at": 5} and given.own["d"] == {"k": 1}
    assert network.running_mean.tolist() == [3, 3]
    other = ScriptState({"m": network}, {"loader": loader, "new": {}})
    assert state_content.rank_state_differences(other, decoded) == (
        ["own state 'new'"], ["generator 'dropout'", "generator 'n'", "own state 'd'"],
    )  # fmt: skip


def test_a_leaf_in_own_state_goes_on_training() -> None:
    """The file says nothing of gradients: the script's own tensor decides."""
    weight = torch.ones(2, requires_grad=True)
    given = ScriptState({"m": nn.BatchNorm1d(2)}, {"extra": {"w": weight}})
    blob = state_content.capture_rank_state(given, {}, 2)
    with torch.no_grad():
        weight.fill_(3)
    state_content.restore_rank_state(given, codec.decode(blob), process=False)
    assert weight.requires_grad and weight.tolist() == [1, 1]
    assert given.own["extra"]["w"] is weight
