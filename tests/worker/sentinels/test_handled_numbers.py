"""Signs of numbers that are not finite and that a script handles itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from outlast.worker.script.bytecode import handles_nonfinite
from outlast.worker.sentinels.handled_numbers import CloseView
from outlast.worker.sentinels.nonfinite_gradients import OwnContribution, nonfinite_gradient
from outlast.worker.state.scaler_steps import ScalerSteps


def by_where(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        each.grad = torch.where(each.grad > 0, each.grad, 0.0)


def by_norm(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    if torch.isfinite(nn.utils.clip_grad_norm_(parameters, 1.0)):
        optimizer.step()


def by_library(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(parameters, 1.0)


def plain(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    for each in parameters:
        each.grad = None


@pytest.mark.parametrize("function", [by_where, by_norm, by_library])
def test_code_that_may_handle_such_numbers(function: Callable[..., None]) -> None:
    assert handles_nonfinite(function.__code__)
    assert not handles_nonfinite(plain.__code__)


class Watched:
    """A model of one parameter, whose gradients are cleaned behind backward."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.view = CloseView(lambda: nonfinite_gradient(self.gradients()))
        self.own = OwnContribution(self.view.reach_backward)
        self.own.watch({"model": self.model})

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        named = self.model.named_parameters()
        return [(name, each.grad) for name, each in named if each.grad is not None]

    def run(self, x: float, *, is_on: bool = True, spoiled: bool = False) -> tuple[str, str]:
        """Return the gradient and the output that were not finite."""
        self.own.clear()
        with self.view.watched({"model": self.model}, is_on=is_on):
            output = self.model(torch.full((3, 2), x))
            if spoiled:
                self.model.bias.register_hook(lambda gradient: gradient * math.inf)
            output.sum().backward()
            for each in self.model.parameters():
                assert each.grad is not None
                each.grad.nan_to_num_()
        return self.view.gradient, self.view.output()


def test_gradients_are_looked_at_behind_backward_before_the_script_cleans_them() -> None:
    watched = Watched()
    assert watched.run(1.0) == ("", "")
    assert watched.run(math.nan)[0].startswith("gradient of weight (4 of 4")
    assert watched.run(1.0, spoiled=True)[0].startswith("gradient of bias")
    assert watched.run(math.nan, is_on=False) == ("", "")


def test_an_output_of_infinities_is_no_sign() -> None:
    """Masks of logits are infinite by design."""
    watched = Watched()
    assert watched.run(math.nan)[1] == "output of model"
    assert watched.run(math.inf)[1] in ("", "output of model")  # weights of both signs give NaN
    with torch.no_grad():
        watched.model.weight.fill_(1.0)
    assert watched.run(math.inf)[1] == ""


def test_two_backwards_of_an_attempt_are_both_looked_at() -> None:
    watched = Watched()
    with watched.view.watched({"model": watched.model}, is_on=True):
        for x in (1.0, math.nan, 1.0):
            watched.model(torch.full((3, 2), x)).sum().backward()
            watched.model.zero_grad()
    assert watched.view.gradient.startswith("gradient of weight")


def test_a_type_without_norms_ends_the_view_but_not_backward() -> None:
    watched = Watched()

    def raise_error() -> str:
        raise RuntimeError("no norm")

    watched.view = CloseView(raise_error)
    watched.own = OwnContribution(watched.view.reach_backward)
    watched.own.watch({"model": watched.model})
    assert watched.run(1.0) == ("", "")


def test_steps_that_a_scaler_skips() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step(x: float) -> tuple[bool, bool, bool]:
        steps = ScalerSteps([(scaler, scaler.get_scale())])
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), x)).sum()).backward()
        before = steps.has_ended()
        scaler.unscale_(optimizer)
        has_infinity = steps.has_infinity()
        assert steps.unscales(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not before and steps.has_ended()
        return has_infinity, steps.has_infinity(), not steps.unscales(optimizer)

    scaler.scale(torch.ones(1))
    assert step(1.0) == (False, False, True)
    assert step(math.inf) == (True, True, True)
    assert step(1.0) == (False, False, True)
