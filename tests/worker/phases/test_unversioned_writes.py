"""Detection of writes before a vote that change no version counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from outlast.worker.phases.phase_attempt import (
    WINDOW_BYTES,
    PhaseAttempt,
    UndoCopy,
    WrittenWeights,
)
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import Word, first_difference


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


def test_an_exact_attempt_knows_buffers_that_were_written_through_data() -> None:
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(1 << 19))  # too large to be copied each time
    module.register_buffer("mean", torch.zeros(4))
    held = ProtectedState({"module": module}, {})
    held.completed("step")
    for _ in range(8):  # small ones are compared by their versions from then on
        held.buffers.mark_end()
    undo = UndoCopy(held, "step", exact=True)
    for name in ("queue", "mean"):
        module.get_buffer(name).data.add_(1)
    undo.mark_written()
    assert list(held.buffers.own()) == ["module.mean", "module.queue"]


def test_a_refused_exact_attempt_cannot_undo_a_large_buffer_that_it_wrote() -> None:
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(1 << 19))
    held = ProtectedState({"module": module}, {})
    held.completed("step")
    assert UndoCopy(held, "step", exact=True).put_back() == ""
    undo = UndoCopy(held, "step", exact=True)
    module.get_buffer("queue").data.add_(1)
    assert "module.queue changed in an attempt that was refused" in undo.put_back()


def test_a_refused_attempt_that_left_weights_changed_is_described() -> None:
    model, optimizer, held = built()
    for everything in (True, False):
        attempt = PhaseAttempt("step", "train_step", UndoCopy(held, "train_step"), 0)
        attempt.weights = WrittenWeights(held, everything=everything, turn=0)
        assert attempt.describe_written() == ""
        through_data(model, optimizer)
        assert attempt.describe_written() == (
            "train_step changed model.weight in an attempt that was refused"
        )
        attempt.rehearsed = True  # then it was compared before its vote
        assert attempt.describe_written() == ""


def test_digests_are_compared_by_name_on_hosts_and_devices() -> None:
    far = {"a": torch.tensor(1), "b": torch.tensor(2)}
    near: dict[str, Word] = {"c": b"1", **far}
    assert first_difference(near, near) == ""
    assert first_difference(near, {**near, "b": torch.tensor(3)}) == "b"
    assert first_difference(near, {**near, "c": b"2"}) == "c"
    assert first_difference(near, {"d": b"2"}) == ""  # a moment that an attempt has made
