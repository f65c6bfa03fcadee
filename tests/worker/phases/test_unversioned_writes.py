"""Detection of writes before a vote that change no version counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from outlast.worker.phases.phase_attempt import WINDOW_BYTES, UndoCopy, WrittenWeights
from outlast.worker.state.protected_state import ProtectedState


def built(width: int = 4) -> tuple[nn.Linear, torch.optim.Optimizer, ProtectedState]:
    torch.manual_seed(0)
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer, ProtectedState({"model": model, "optimizer": optimizer}, {})


def through_data(model: nn.Linear, _: torch.optim.Optimizer) -> None:
    model.weight.data.add_(1)


def through_numpy(model: nn.Linear, _: torch.optim.Optimizer) -> None:
    model.weight.detach().numpy()[0, 0] += 1


def other_memory(model: nn.Linear, _: torch.optim.Optimizer) -> None:
    model.weight.data = model.weight.data * 2


def set_to(model: nn.Linear, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.weight.set_(torch.zeros_like(model.weight))  # type: ignore[call-overload]


def a_moment(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.weight]["exp_avg"].data.mul_(0.5)


WAYS = {
    through_data: "model.weight",
    through_numpy: "model.weight",
    other_memory: "model.weight",
    set_to: "model.weight",
    a_moment: "optimizer.state.model.weight.exp_avg",
}


@pytest.mark.parametrize(("write", "name"), WAYS.items())
def test_a_write_that_moves_no_counter_is_seen_in_rehearsals(
    write: Callable[[nn.Linear, torch.optim.Optimizer], None], name: str
) -> None:
    model, optimizer, held = built()
    weights = WrittenWeights(held, everything=True, turn=0)
    assert weights.changed() == ""
    write(model, optimizer)
    assert weights.changed() == name


def turned(model: nn.Linear, _: torch.optim.Optimizer) -> None:
    model.weight.data = model.weight.data.t()  # the same memory, read in another order


def moved(model: nn.Linear, _: torch.optim.Optimizer) -> None:
    model.weight.data = model.weight.data.clone()


@pytest.mark.parametrize("layout", ["contiguous", "turned"])
@pytest.mark.parametrize("write", [*WAYS, turned, moved])
def test_a_later_attempt_sees_any_write_to_its_window(
    write: Callable[[nn.Linear, torch.optim.Optimizer], None], layout: str
) -> None:
    model, optimizer, held = built(2)
    if layout == "turned":
        turned(model, optimizer)
    weights = WrittenWeights(held, everything=False, turn=0)
    assert weights.changed() == ""
    write(model, optimizer)
    is_unchanged = write in (moved, a_moment)  # equal values; no window of the weight
    assert weights.changed() == ("" if is_unchanged else "model.weight")


def test_later_attempts_come_by_every_window_of_every_parameter() -> None:
    width = 3 * WINDOW_BYTES // 8 + 5  # two rows: more than three windows
    model, _, held = built(width)
    seen = set()
    for turn in range(8):
        for place in range(0, 2 * width, WINDOW_BYTES // 8):
            weights = WrittenWeights(held, everything=False, turn=turn)
            model.weight.data.view(-1)[place] += 1
            if weights.changed():
                seen.add(place)
    assert seen == set(range(0, 2 * width, WINDOW_BYTES // 8))


def test_a_large_buffer_that_is_written_through_data_is_put_back_and_known() -> None:
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(1 << 19))
    held = ProtectedState({"module": module}, {})
    undo = UndoCopy(held, "step")
    module.get_buffer("queue").data.add_(1)
    undo.put_back()
    assert not module.get_buffer("queue").any()
    assert list(held.buffers.own()) == ["module.queue"]
