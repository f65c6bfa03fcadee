"""State of optimizers that waits on the host, and memory that is reserved for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outlast.worker.sentinels.memory_sentinel import is_out_of_memory
from outlast.worker.sentinels.optimizer_memory import StateOffload, StateReserve, move


def trained(offload: StateOffload | None, kind: Any = torch.optim.AdamW, **more: Any) -> list[Any]:
    """Train for some steps, with the state away in each forward and backward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = kind(net.parameters(), lr=1e-2, **more)
    for _ in range(4):
        optimizer.zero_grad()
        if offload is not None:
            offload.put_away([optimizer])
        net(torch.randn(8, 64)).square().mean().backward()
        if offload is not None:
            offload.bring_back()
        optimizer.step()
    state = [v for one in optimizer.state.values() for v in one.values()]
    return [*net.parameters(), *(each for each in state if isinstance(each, torch.Tensor))]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_training_has_the_same_bits(kind: Any, more: dict[str, Any]) -> None:
    plain = trained(None, kind, **more)
    moved = trained(StateOffload(is_far=lambda _: True), kind, **more)
    assert all(map(torch.equal, plain, moved)) and len(plain) == len(moved)


def stepped() -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.randn(64, 64)
    optimizer.step()
    return optimizer, [optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq")]


def test_the_same_tensors_get_other_memory() -> None:
    optimizer, tensors = stepped()
    places, values = [t.data_ptr() for t in tensors], [t.clone() for t in tensors]
    offload = StateOffload(is_far=lambda _: True)
    assert offload.put_away([optimizer]) == 2 * 64 * 64 * 4
    assert all(t.data_ptr() != place for t, place in zip(tensors, places, strict=True))
    offload.bring_back()
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"] is tensors[0] and all(map(torch.equal, tensors, values))
    assert StateOffload().put_away([optimizer]) == 0, "on the host it stays"


def test_tensors_that_share_their_memory_stay() -> None:
    optimizer, (first, second) = stepped()
    state = next(iter(optimizer.state.values()))
    flat = torch.zeros(2, 64, 64)
    state["exp_avg"], state["exp_avg_sq"] = flat[0], flat[1]
    state["part"] = torch.zeros(4, 64, 64)[1]
    assert StateOffload(is_far=lambda _: True).put_away([optimizer]) == 0
    assert state["exp_avg"].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert first is not second


def test_what_does_not_fit_at_its_return_stays_on_the_host() -> None:
    optimizer, tensors = stepped()
    values = [t.clone() for t in tensors]
    calls: list[int] = []

    def scarce(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        calls.append(tensor.nbytes)
        if len(calls) == 4:  # two have left, one is back
            raise torch.OutOfMemoryError("none")
        return move(tensor, device)

    offload = StateOffload(is_far=lambda _: True, move=scarce)
    offload.put_away([optimizer])
    with pytest.raises(torch.OutOfMemoryError):
        offload.bring_back()
    assert len(offload._away) == 1 and all(map(torch.equal, tensors, values))
    offload.bring_back()
    assert offload._away == [] and all(map(torch.equal, tensors, values))


class Frugal(torch.optim.AdamW):
    """An optimizer that may need less."""


@pytest.mark.parametrize(
    ("kind", "more", "fails"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.RMSprop, {}, True),
        (torch.optim.SGD, {}, False),
        (Frugal, {}, False),
    ],
)
def test_a_state_that_will_not_fit_is_found_before_it_is_made(
    kind: Any, more: dict[str, Any], fails: bool
) -> None:
    """A parameter of 90,000 GiB, which is one number in memory."""
    weight = nn.Parameter(torch.zeros(1).expand(90_000 << 28))
    weight.grad = torch.zeros(1).expand(90_000 << 28)
    optimizer, reserve = kind([weight], lr=0.1, **more), StateReserve()
    if not fails:
        return reserve.take(optimizer)
    with pytest.raises(RuntimeError) as caught:
        reserve.take(optimizer)
    assert is_out_of_memory(caught.value)
    weight.grad = None  # what has no gradient gets no state
    return reserve.take(optimizer)
