"""Comparison of two attempts from one state; unknown results are NaN."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from outlast.checkpoint.format import codec
from outlast.errors import UnsupportedError
from outlast.worker.phases.phase_attempt import UndoCopy
from outlast.worker.script.repetitions import Repetition, RepetitionCheck, look
from outlast.worker.state.protected_state import ProtectedState

PATHS = msgspec.msgpack.encode([([("module", "__main__"), ("name", "seen")], True)])
CHOICES, DRAWN, COUNTED = (
    codec.encode({"random": {"torch": draws}, "script": {"paths": PATHS, "values": [count]}})
    for draws, count in ((0, 0), (1, 0), (0, 1))
)


def attempt(
    *, generation: int = 1, choices: bytes = CHOICES, loss: float = 1.0, value: float = 0.1
) -> Repetition:
    layer = nn.Linear(2, 3)
    layer.weight.grad = torch.full((3, 2), value)
    return look(generation, choices, {"loss": loss}, layer.named_parameters())


def test_equal_attempts_are_no_difference_and_the_first_step_is_the_last_one_compared() -> None:
    attempts = RepetitionCheck()
    assert attempts.rehearsed("step", attempt()) is None
    assert attempts.rehearsed("step", attempt()) is None
    assert attempts.awaits("step")
    assert attempts.first_step("step", attempt()) is None
    assert not attempts.awaits("step")


def test_differences_are_named_from_the_second_attempt_on() -> None:
    attempts = RepetitionCheck()
    attempts.rehearsed("step", attempt())
    second = attempt(value=0.2, loss=float("nan"))
    assert attempts.rehearsed("step", second) is None  # DDP has put its buckets into another order
    found = attempts.first_step("step", attempt(value=0.3, loss=float("nan")))
    assert found is not None
    assert found.what == "computed a different gradient of weight"
    assert not found.is_rounding
    for count, other in ((3, attempt(choices=DRAWN)), (3, attempt(loss=2.0))):
        attempts = RepetitionCheck()
        found = [attempts.rehearsed("step", attempt()) for _ in range(count)]
        assert found == [None] * count
        assert attempts.first_step("step", other) is not None


def test_a_variable_that_differs_is_named() -> None:
    for choices, what in ((DRAWN, "drew a different number"), (COUNTED, "changed seen to another")):
        attempts = RepetitionCheck()
        attempts.rehearsed("step", attempt())
        found = attempts.rehearsed("step", attempt(choices=choices))
        assert found is not None and found.what.startswith(what)


def test_attempts_of_two_generations_are_no_pair() -> None:
    attempts = RepetitionCheck()
    for _ in range(2):
        attempts.rehearsed("step", attempt())
    assert attempts.first_step("step", attempt(generation=2, value=9.0)) is None


def test_draws_are_compared_across_generations() -> None:
    attempts = RepetitionCheck()
    attempts.rehearsed("step", attempt())
    assert attempts.rehearsed("step", attempt(generation=2, choices=DRAWN, value=9.0)) is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_one_bit_of_a_gradient_is_another_digest(dtype: torch.dtype) -> None:
    layer = nn.Linear(2, 2, dtype=dtype)
    layer.weight.grad = torch.ones(2, 2, dtype=dtype)
    before = look(1, b"", {}, layer.named_parameters())
    layer.weight.grad.view(torch.uint8)[1, 0] ^= 1
    assert look(1, b"", {}, layer.named_parameters()) != before


def test_a_disabled_scaler_is_protected_and_put_back() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    protected = ProtectedState({"model": model, "optimizer": optimizer, "scaler": scaler}, {})
    undo = UndoCopy(protected, "step")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    assert undo.leaves_gradients()
    assert undo.put_back() == ""
    protected.adopt(protected.replicated())


def test_zero_is_refused_by_its_name_at_protect() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    model = nn.Linear(2, 1)
    sharded = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"ZeroRedundancyOptimizer.*fully_shard"):
        ProtectedState({"model": model, "optimizer": sharded}, {})
