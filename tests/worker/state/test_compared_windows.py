"""Windows that votes compare: together all of the state, each of a bounded cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.worker.state import compared_windows
from outlast.worker.state.bit_flips import flip_bit
from outlast.worker.state.compared_windows import ComparedWindows
from outlast.worker.state.protected_state import ProtectedState


def stepped(layers: int = 3, width: int = 8) -> ProtectedState:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, width)).sum().backward()
    optimizer.step()
    return ProtectedState({"model": model, "optimizer": optimizer}, {})


ONE, OTHER = stepped(), stepped()


def tensors(held: ProtectedState) -> list[tuple[str, torch.Tensor]]:
    """Return all that votes compare."""
    optimizer = held.optimizers["optimizer"]
    found: list[tuple[str, torch.Tensor]] = []
    for name, parameter in held.audited:
        found += [(name, parameter), (f"{name}.grad", parameter.grad)]
        state = optimizer.state[parameter]
        found += [(f"optimizer.state.{name}.{key}", state[key]) for key in state]
    return found


@settings(max_examples=60)
@given(
    every=st.integers(1, 9),
    state_ns=st.integers(1_000, 30_000),
    gradients_ns=st.integers(1_000, 30_000),
    which=st.integers(0, 29),
    bit=st.integers(0, 8 * 8 * 8 * 4 - 1),
    first=st.integers(0, 50),
)
def test_a_flipped_bit_is_found_within_every_and_named(
    every: int, state_ns: int, gradients_ns: int, which: int, bit: int, first: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compared_windows, "STATE_NS", state_ns)
        patch.setattr(compared_windows, "GRADIENTS_NS", gradients_ns)
        one, other = ComparedWindows(ONE, every), ComparedWindows(OTHER, every)
        name, tensor = tensors(OTHER)[which % len(tensors(OTHER))]
        bit %= 8 * tensor.nbytes
        limit = max(every, one.take(0).gradient_windows)
        other.take(0)
        flip_bit(name, tensor, bit)
        try:
            found = []
            for step in range(first, first + limit):
                here, there = one.take(step), other.take(step)
                assert here.windows <= every
                kinds = [here.names(), there.names()]
                differing = {
                    key
                    for kind, named in kinds[0].items()
                    for key in named
                    if named[key] != kinds[1][kind][key]
                }
                assert bool(differing) == (here.digest != there.digest)
                found += [differing] if differing else []
            assert found and all(each == {name} for each in found)
        finally:
            flip_bit(name, tensor, bit)


def test_a_small_state_is_compared_at_every_vote() -> None:
    window = ComparedWindows(stepped(), 100).take(7)
    assert (window.windows, window.gradient_windows) == (1, 1)
    assert {name for kind in window.names().values() for name in kind} == {
        name for name, _ in tensors(ONE)
    }


def test_many_small_tensors_are_divided_by_what_their_calls_cost() -> None:
    windows = ComparedWindows(stepped(layers=200), 100)
    taken = [windows.take(step) for step in range(40)]
    assert taken[0].windows > 8
    most = (compared_windows.STATE_NS + compared_windows.GRADIENTS_NS) // 1_500
    assert max(len(window.pieces) for window in taken) <= most + 4


def test_what_is_left_out_is_not_digested() -> None:
    window = ComparedWindows(stepped(), 100).take(0, ("gradients",))
    assert window.names().keys() == {"parameters", "optimizers"} and window.gradient_number == -1


def test_states_that_come_later_are_divided_anew() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    windows = ComparedWindows(ProtectedState({"m": model, "o": optimizer}, {}), 10)
    assert "optimizers" not in windows.take(0).names()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert "o.state.weight" not in windows.take(1).names()["optimizers"]
    assert "o.state.m.weight.exp_avg" in windows.take(1).names()["optimizers"]


def test_odd_tensors_have_digests() -> None:
    """Without bytes, without a gradient, with a sparse one, in another layout, frozen."""
    table = nn.Embedding(5, 4, sparse=True)
    image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    empty = nn.Linear(1, 4)
    empty.weight = nn.Parameter(torch.empty(4, 0))
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    unused = nn.Linear(2, 2)
    modules = {"t": table, "i": image, "e": empty, "f": frozen, "u": unused}
    sides = []
    for _ in range(2):
        torch.manual_seed(1)
        for module in modules.values():
            module.zero_grad()
            for parameter in module.parameters():
                nn.init.constant_(parameter, 0.5)
        table(torch.tensor([1, 2])).sum().backward()
        image(torch.ones(1, 3, 5, 5)).sum().backward()
        empty(torch.ones(3, 0)).sum().backward()
        sides.append(ComparedWindows(ProtectedState(dict(modules), {}), 10).take(0))
    assert sides[0].digest == sides[1].digest
    names = sides[0].names()
    assert "f.weight" in names["parameters"] and "f.weight.grad" not in names["gradients"]
    assert names["gradients"]["u.weight.grad"] == names["gradients"]["t.weight.grad"] == b""
    assert names["parameters"]["e.weight"]
