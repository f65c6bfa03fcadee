"""Phase attempts: permitted changes of gradients, buffers and copies."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outlast.errors import ProtectError
from outlast.transport.worker_page import SLOT_BYTES
from outlast.worker.phases.phase_attempt import UndoCopy
from outlast.worker.state.protected_state import ProtectedState, Replicated


@pytest.mark.parametrize("to_none", [False, True])
def test_a_phase_that_only_accumulates_is_noticed(to_none: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    protected = ProtectedState({"model": model, "optimizer": optimizer}, {})
    model(torch.ones(1, 2)).sum().backward()
    undo = UndoCopy(protected)
    assert not undo.leaves_gradients()
    model(torch.ones(1, 2)).sum().backward()
    assert undo.leaves_gradients()
    optimizer.zero_grad(set_to_none=to_none)
    assert not undo.leaves_gradients()
    model(torch.ones(1, 2)).sum().backward()
    assert undo.leaves_gradients()


def test_an_attempt_does_not_keep_old_gradients_alive() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    undo = UndoCopy(ProtectedState({"model": model}, {}))
    gradient = weakref.ref(model.weight.grad)
    model.zero_grad()
    assert gradient() is None
    undo.put_back()


def test_gradients_that_a_scaler_skipped_may_stay_and_others_not() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    protected = ProtectedState({"model": model, "optimizer": optimizer, "scaler": scaler}, {})

    def attempt(value: float, update: bool) -> UndoCopy:
        optimizer.zero_grad()
        undo = UndoCopy(protected)
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        assert undo.leaves_gradients(), "no step was asked for"
        scaler.step(optimizer)
        if update:
            scaler.update()
        return undo

    assert not attempt(float("inf"), update=True).leaves_gradients()
    assert not attempt(float("inf"), update=False).leaves_gradients()


class Average:
    """A Replicated object: equal on all ranks, as an average of the weights is."""

    def __init__(self) -> None:
        self.weights, self.count, self.asked = torch.zeros(4), 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"weights": self.weights, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])
        self.count = state["count"]


def test_a_replicated_object_is_not_copied_by_an_attempt() -> None:
    average = Average()
    protected = ProtectedState({"average": Replicated(average)}, {})
    UndoCopy(protected, "step").put_back()
    protected.completed("step")
    average.asked = 0
    undo = UndoCopy(protected, "step")
    assert average.asked == 1  # versions of its tensors
    undo.put_back()


def _weights(average: Average) -> None:
    average.weights.add_(1)


def _count(average: Average) -> None:
    average.count += 1


@pytest.mark.parametrize("change", [_weights, _count])
def test_a_replicated_object_that_changes_before_the_vote_is_named(change: Any) -> None:
    average = Average()
    undo = UndoCopy(ProtectedState({"average": Replicated(average)}, {}), "step")
    change(average)
    with pytest.raises(ProtectError, match="'average' changed before"):
        undo.put_back()


@pytest.mark.parametrize("change", [_weights, _count])
def test_a_replicated_object_that_first_changes_late_is_named(change: Any) -> None:
    average = Average()
    protected = ProtectedState({"average": Replicated(average)}, {})
    UndoCopy(protected, "step").put_back()
    protected.completed("step")
    change(average)  # behind the vote, or between phases
    undo = UndoCopy(protected, "step")
    change(average)
    with pytest.raises(ProtectError, match="'average' changed before"):
        undo.put_back()


def test_a_replicated_object_that_clones_its_tensors_is_not_copied() -> None:
    class Fresh(Average):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "weights": self.weights.clone()}

    average = Fresh()
    protected = ProtectedState({"average": Replicated(average)}, {})
    UndoCopy(protected, "step").put_back()
    protected.completed("step")
    average.asked = 0
    UndoCopy(protected, "step").put_back()
    assert average.asked == 0  # it may be large: no copy of it is made in each phase


def test_buffers_that_a_replicated_object_shares_with_a_module_are_the_modules() -> None:
    model = nn.BatchNorm1d(2)
    view = SimpleNamespace(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    undo = UndoCopy(ProtectedState({"model": model, "wrapped": Replicated(view)}, {}), "step")
    model(torch.randn(4, 2))
    undo.put_back()


class Queue(nn.Module):
    """A module whose forward writes a large buffer, as MoCo's queue of keys does."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(size_bytes // 4))

    def forward(self) -> None:
        self.get_buffer("keys").add_(1)


def test_a_large_buffer_that_forward_changes_is_put_back_from_the_first_attempt_on() -> None:
    model = Queue(2 << 20)
    protected = ProtectedState({"model": model}, {})
    for key in ("evaluate", "evaluate", "step"):  # the step is new when another phase is known
        undo = UndoCopy(protected, key)
        before = model.get_buffer("keys").clone()
        if key == "step":
            model()
        assert undo.put_back() == ""
        assert torch.equal(model.get_buffer("keys"), before)
        protected.completed(key)


def test_a_large_buffer_that_never_changed_in_a_known_function_is_not_copied() -> None:
    model = Queue(2 << 20)
    protected = ProtectedState({"model": model}, {})
    protected.completed("step")
    undo = UndoCopy(protected, "step")
    model()
    assert "model.keys" in undo.put_back()


def test_a_buffer_that_changes_and_fits_no_slot_is_named_before_the_vote() -> None:
    model = Queue(SLOT_BYTES + 4)
    protected = ProtectedState({"model": model}, {})
    protected.own_state(protected.own_choices())
    undo = UndoCopy(protected, "step")
    model()
    with pytest.raises(ProtectError, match=r"model\.keys alone has 16777220"):
        protected.own_state(protected.own_choices())
    assert undo.put_back() == ""


def test_a_learning_rate_that_is_a_tensor_is_put_back_in_its_place() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    undo = UndoCopy(ProtectedState({"model": model, "optimizer": optimizer}, {}))
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(0.1)
    undo.put_back()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_copies_are_known_before_any_other_function_has_run() -> None:
    """The loop's own phases come first, and are known without ever having run."""

    class Fresh(Average):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "weights": self.weights.clone()}

    protected = ProtectedState({"average": Replicated(Fresh())}, {})
    undo = UndoCopy(protected, "outlast.epoch.0")
    others = [torch.zeros(4) for _ in range(64)]  # on the addresses that a copy may have had
    undo.put_back()
    assert len(others) == 64
