"""Script state as named tensors and one value, and back, for every wrapper of the model."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.state_samples import (
    Holding,
    compiled,
    full,
    model,
    move,
    same_moments,
    saved,
    trained,
    world_of_one,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from outlast.checkpoint.format import codec
from outlast.checkpoint.script_state import ScriptState
from outlast.checkpoint.state_content import capture_rank_state, flatten_state
from outlast.checkpoint.state_values import join_tensors, split_tensors
from outlast.errors import CodecError, UnsupportedError, UsageError

__all__ = ["world_of_one"]


# --- names ---


def test_names_do_not_depend_on_the_wrapping() -> None:
    expected = flatten_state(ScriptState(trained(model()))).tensors.keys()
    assert "model.1.1.running_mean" in expected
    assert "optimizer.state.1.0.weight.exp_avg_sq" in expected
    compiled_inside = model()
    compiled_inside[1] = checkpoint_wrapper(compiled(compiled_inside[1]))
    for wrapped in (
        DistributedDataParallel(model()),
        compiled(model()),
        compiled(DistributedDataParallel(model())),
        DistributedDataParallel(compiled_inside),
        checkpoint_wrapper(DistributedDataParallel(model())),
        fully_shard(model()),
    ):
        optimizer = torch.optim.AdamW(wrapped.parameters())
        for parameter in wrapped.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = {"model": wrapped, "optimizer": optimizer}
        assert flatten_state(ScriptState(state)).tensors.keys() == expected, type(wrapped)


def test_a_submodule_called_module_keeps_its_name() -> None:
    network = nn.Module()
    network.module = nn.Linear(2, 2)
    outer = DistributedDataParallel(network)
    assert list(flatten_state(ScriptState({"m": outer})).tensors) == [
        "m.module.weight",
        "m.module.bias",
    ]
    average = torch.optim.swa_utils.AveragedModel(DistributedDataParallel(nn.Linear(2, 2)))
    names = flatten_state(ScriptState({"ema": average})).tensors.keys()
    assert names == {"ema.n_averaged", "ema.module.weight", "ema.module.bias"}


def test_parameters_of_several_modules_and_of_none() -> None:
    a, b, loose = nn.Linear(2, 2), nn.Linear(2, 2), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([a.weight, b.weight, loose], momentum=0.9)
    for parameter in (a.weight, b.weight, loose):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"a": a, "b": b, "opt": optimizer}
    assert set(flatten_state(ScriptState(state)).tensors) - {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
    } == {f"opt.state.{name}.momentum_buffer" for name in ("a.weight", "b.weight", "0.2")}
    other = [nn.Linear(2, 2), nn.Linear(2, 2), torch.zeros(2, requires_grad=True)]
    fresh = torch.optim.SGD([other[0].weight, other[1].weight, other[2]], momentum=0.5)
    move(state, {"a": other[0], "b": other[1], "opt": fresh})
    assert fresh.param_groups[0]["momentum"] == 0.9
    same_moments(optimizer, fresh)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_excluded_and_unsupported_state() -> None:
    network = nn.Linear(2, 2)
    network.register_buffer("table", torch.zeros(3), persistent=False)
    assert "m.table" not in flatten_state(ScriptState({"m": network})).tensors
    with pytest.raises(UnsupportedError, match="fully_shard"):
        ScriptState({"m": FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))})
    with pytest.raises(CodecError, match=r"m\.weight is not initialized"):
        flatten_state(ScriptState({"m": nn.LazyLinear(2)}))
    with pytest.raises(UsageError, match="StatefulDataLoader"):
        ScriptState({"loader": DataLoader([1, 2])})
    with pytest.raises(UsageError, match="'f'"):
        ScriptState({"f": object()})
    with pytest.raises(CodecError, match=r"'a\.b'"):
        flatten_state(ScriptState({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}))
    with pytest.raises(CodecError, match=r"objects\.o\.value\.f is a function"):
        flatten_state(ScriptState({"o": Holding({"f": model})}))


# --- round trips ---


@pytest.mark.parametrize("wrap", [lambda m: m, DistributedDataParallel, fully_shard])
@pytest.mark.parametrize("steps", [0, 3])
def test_into_any_wrapping_and_a_fresh_or_used_optimizer(wrap: Any, steps: int) -> None:
    source = trained(model())
    target = trained(wrap(model(1)), steps=steps, weight_decay=0.5)
    move(source, target)
    for name, tensor in source["model"].state_dict().items():
        found = saved(target)[1][f"model.{name}"]
        assert torch.equal(tensor, found), name
    same_moments(source["optimizer"], target["optimizer"])
    groups = source["optimizer"].param_groups[0], target["optimizer"].param_groups[0]
    keys = groups[0].keys() - {"params"}
    assert {k: groups[0][k] for k in keys} == {k: groups[1][k] for k in keys}
    assert source["scheduler"].state_dict() == target["scheduler"].state_dict()
    if wrap is fully_shard:
        moments = target["optimizer"].state[next(target["model"].parameters())]
        assert isinstance(moments["exp_avg"], DTensor) and not isinstance(moments["step"], DTensor)


def test_moments_keep_their_own_dtype_and_state_that_was_not_there_goes() -> None:
    source = {"m": nn.Linear(3, 3), "o": None}
    source["o"] = torch.optim.SGD(source["m"].parameters(), momentum=0.9)
    weight, _ = source["m"].parameters()
    source["o"].state[weight] = {"momentum_buffer": torch.ones(3, 3, dtype=torch.float64)}
    target = {"m": nn.Linear(3, 3), "o": None}
    target["o"] = torch.optim.SGD(target["m"].parameters(), momentum=0.9)
    target["o"].state[target["m"].bias] = {"momentum_buffer": torch.ones(3)}
    move(source, target)
    assert list(target["o"].state) == [target["m"].weight]
    assert target["o"].state[target["m"].weight]["momentum_buffer"].dtype == torch.float64


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor() -> None:
    def make(lr: float) -> dict[str, Any]:
        network = nn.Linear(2, 2)
        return {
            "m": network, "o": torch.optim.Adam(network.parameters(), lr=torch.tensor(lr))
        }  # fmt: skip

    target = make(0.1)
    rate = target["o"].param_groups[0]["lr"]
    move(make(0.25), target)
    assert target["o"].param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_state_of_any_shape() -> None:
    """LBFGS keeps numbers and growing lists; some keep something under no parameter."""

    def lbfgs(steps: int) -> dict[str, Any]:
        network = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(network.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = network(torch.ones(4, 3)).sub(1).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return {"m": network, "o": optimizer}

    source, target = lbfgs(2), lbfgs(0)
    move(source, target)
    a = source["o"].state[source["m"].weight]
    b = target["o"].state[target["m"].weight]
    assert a.keys() == b.keys() and a["n_iter"] == b["n_iter"]
    assert all(torch.equal(x, y) for x, y in zip(a["old_dirs"], b["old_dirs"], strict=True))

    source["o"].state["calls"] = {"n": 2, "t": torch.ones(3)}
    move(source, target)
    assert target["o"].state["calls"]["n"] == 2 and len(target["o"].state["calls"]["t"]) == 3


@pytest.mark.parametrize("wrap", [lambda m: m, fully_shard])
def test_moments_of_other_shapes_are_made_of_the_parameters_kind(wrap: Any) -> None:
    source = {"m": nn.Linear(3, 4)}
    source["o"] = torch.optim.Adafactor(source["m"].parameters())
    source["m"](torch.ones(2, 3)).square().mean().backward()
    source["o"].step()
    target = {"m": wrap(nn.Linear(3, 4))}
    target["o"] = torch.optim.Adafactor(target["m"].parameters())
    move(source, target)
    same_moments(source["o"], target["o"])
    state = target["o"].state[target["m"].weight]
    assert type(state["row_var"]) is type(target["m"].weight.data) and state["step"].dim() == 0


def test_a_counter_is_no_moment_even_of_a_parameter_without_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1,))

    def make() -> dict[str, Any]:
        scale = nn.Parameter(distribute_tensor(torch.ones(()), mesh, [Replicate()]))
        return {"scale": scale, "o": torch.optim.Adam([scale])}

    source, target = make(), make()
    source["scale"].square().backward()
    source["o"].step()
    move(source, target)
    state = target["o"].state[target["scale"]]
    assert isinstance(state["exp_avg"], DTensor) and not isinstance(state["step"], DTensor)


class Counting(nn.Linear):
    """Keeps a number that is no tensor, and hands out a copy of its weight by a hook."""

    def __init__(self, count: int) -> None:
        super().__init__(2, 2)
        self.count = count
        self.twice = torch.full((2,), float(count))
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}twice": module.twice * 2})
        )
        self.register_load_state_dict_pre_hook(self._take)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "t": torch.full((3,), self.count)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["t"].tolist() == [state["count"]] * 3
        self.count = state["count"]

    def _take(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.twice = state.pop(f"{prefix}twice") / 2


def test_extra_state_of_a_module_is_set_by_the_module() -> None:
    source = {"m": DistributedDataParallel(nn.Sequential(Counting(7), nn.Linear(2, 2)))}
    target = {"m": compiled(nn.Sequential(Counting(1), nn.Linear(2, 2)))}
    move(source, target)
    counting, linear = target["m"]._orig_mod
    assert counting.count == 7 and counting.twice.tolist() == [7.0, 7.0]
    assert torch.equal(linear.weight, source["m"].module[1].weight)


def test_values_come_back_into_the_objects_that_the_script_holds() -> None:
    sharded = fully_shard(nn.Linear(4, 4)).weight
    source = {
        "ema": {"w": torch.arange(4.0), "d": sharded, "by": {3: (torch.ones(2), "x")}},
        "epoch": 7, "weight": torch.ones(2), "log": [1, 2], "o": Holding({"a": torch.ones(3)}),
    }  # fmt: skip
    ema = {"w": torch.zeros(4), "d": torch.zeros_like(sharded), "by": {}}
    kept, log = ema["w"], [9]
    target = {"ema": ema, "epoch": 0, "weight": torch.zeros(2), "log": log, "o": Holding({})}
    fitting = move(source, target)
    assert fitting.targets["ema.w"] is kept and fitting.targets["weight"] is target["weight"]
    assert ema["w"] is kept and kept.tolist() == [0, 1, 2, 3]
    assert isinstance(ema["d"], DTensor) and torch.equal(full(ema["d"]), full(sharded))
    assert ema["by"][3][1] == "x" and ema["by"][3][0].tolist() == [1, 1]
    assert target["epoch"] == 7 and log == [1, 2] and target["log"] is log
    assert target["weight"].tolist() == [1, 1] and target["o"].value["a"].tolist() == [1, 1, 1]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda base: base.view(3, 4).t(),
    "column": lambda base: base.view(3, 4)[:, 1],
    "every other": lambda base: base[::2],
    "channels last": lambda base: base.view(1, 2, 2, 3).permute(0, 3, 1, 2),
    "conjugate": lambda base: torch.view_as_complex(base.view(6, 2)).conj(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_that_the_script_holds_are_filled(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def state(base: torch.Tensor) -> dict[str, Any]:
        return {"by": {"t": view(base)}, "list": [view(base)], "tuple": (view(base), 1)}

    target = state(base := torch.zeros(12))
    held = target["by"]["t"], target["list"][0], target["tuple"][0]
    move(state(torch.arange(1.0, 13.0)), target)
    assert held[0] is target["by"]["t"] and held[1] is target["list"][0]
    assert held[2] is target["tuple"][0]
    expected = view(torch.arange(1.0, 13.0))
    assert all(torch.equal(each, expected) for each in held)
    assert torch.equal(view(base), expected)


leaves = st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
tensors = st.integers(0, 4).map(lambda n: torch.arange(n))
trees = st.recursive(
    leaves | tensors,
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=150)
@given(trees)
def test_any_value_is_split_and_joined(value: Any) -> None:
    named: dict[str, torch.Tensor] = {}
    try:
        skeleton = split_tensors(value, "v", named)
    except CodecError:  # {1: tensor, "1": tensor}, which another test is about
        return
    before = codec.encode(value)
    joined = join_tensors(codec.decode(codec.encode(skeleton)), named)
    assert codec.encode(joined) == before == codec.encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {"t": torch.zeros(1)}
    loop["again"] = loop
    with pytest.raises(CodecError, match="contains itself"):
        flatten_state(ScriptState({"v": loop}))


@pytest.mark.parametrize("second", [torch.ones(2), None], ids=["another", "the same"])
def test_two_places_of_one_name_are_refused(second: torch.Tensor | None) -> None:
    """Also of one tensor: only one of the places would get it back."""
    first = torch.ones(2)
    value = {"a": {"b": first}, "a.b": first if second is None else second}
    with pytest.raises(CodecError, match=r"two tensors .* both called 'x\.a\.b'"):
        split_tensors(value, "x", {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for state in (ScriptState({"v": {"a": nested}}), ScriptState({"o": Holding({"a": nested})})):
        with pytest.raises(CodecError, match=r"[vo]\.a is a nested tensor; nothing was saved"):
            flatten_state(state)
    with pytest.raises(CodecError, match=r"objects\.o\.a is a tensor .* plain memory \(nested\)"):
        capture_rank_state(ScriptState({}, {"o": {"a": nested}}), {}, 1)


def test_a_name_that_is_no_text_is_refused_at_once() -> None:
    """It was refused by the keeper, which did not name the entry."""
    with pytest.raises(CodecError, match=r"the name 'v\.a\\udc80' is no text in UTF-8"):
        flatten_state(ScriptState({"v": {"a\udc80": torch.ones(1)}}))
    assert (
        "v.\N{GREEK SMALL LETTER PI}"
        in flatten_state(ScriptState({"v": {"\N{GREEK SMALL LETTER PI}": torch.ones(1)}})).tensors
    )


def test_a_generator_without_a_state_is_refused_by_name() -> None:
    state = ScriptState({"rng": random.SystemRandom()})
    with pytest.raises(UsageError, match=r"'rng' is a random\.SystemRandom, which has no state"):
        capture_rank_state(state, {}, 1)


def test_an_optimizer_inside_another_is_given_beside_it() -> None:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    outer = torch.optim.SGD(net.parameters(), lr=0.1)
    vars(outer)["base_optimizer"] = inner
    with pytest.raises(CodecError, match=r"give \.base_optimizer a name of its own beside it"):
        flatten_state(ScriptState({"model": net, "outer": outer}))
    flatten_state(ScriptState({"model": net, "outer": outer, "inner": inner}))
