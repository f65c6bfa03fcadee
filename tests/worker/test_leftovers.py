"""A phase steps with gradients of its own, or is refused before the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from outlast.errors import PhaseError
from outlast.worker.leftovers import Leftovers
from outlast.worker.modules import Modules


class Phase:
    """One function's phases on one model, whose gradients one backward has left."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.modules = Modules({"model": self.model})
        self.leftovers = Leftovers()
        self.backward()

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()

    def run(self, *parts: Callable[[], None]) -> None:
        with self.leftovers.watched("step", self.modules):
            for part in parts:
                part()
            self.leftovers.must_not_be_used("step", self.optimizer)

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


@pytest.mark.parametrize(
    "parts",
    [
        lambda phase: (phase.optimizer.zero_grad, phase.backward),
        lambda phase: (phase.optimizer.zero_grad, phase.backward, phase.backward, phase.clip),
        lambda phase: (phase.zero, phase.backward, phase.backward),
        lambda phase: (phase.zero,),
    ],
)
def test_what_is_cleared_may_be_there(parts: Callable[[Phase], tuple[Callable[[], None]]]) -> None:
    phase = Phase()
    for _ in range(5):
        phase.run(*parts(phase))


def test_what_was_zero_may_stay() -> None:
    phase = Phase()
    for _ in range(5):
        phase.zero()
        phase.run(phase.backward)


@pytest.mark.parametrize(
    "parts",
    [
        lambda _phase: (),
        lambda phase: (phase.clip,),
        lambda phase: (phase.backward,),
        lambda phase: (phase.backward, phase.clip),
    ],
)
def test_a_gradient_from_before_is_refused(
    parts: Callable[[Phase], tuple[Callable[[], None]]],
) -> None:
    phase = Phase()
    with pytest.raises(PhaseError, match=r"a gradient of model\.weight that was there before"):
        phase.run(*parts(phase))


def test_gradients_of_another_optimizer_do_not_matter() -> None:
    """The generator's backward adds to the discriminator's gradients, which are cleared later."""
    phase = Phase()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with phase.leftovers.watched("generator", phase.modules):
        phase.backward()
        phase.leftovers.must_not_be_used("generator", other)


def test_hooks_are_gone_after_the_first_steps() -> None:
    phase = Phase()
    for _ in range(4):
        phase.run(phase.optimizer.zero_grad, phase.backward)
    assert not phase.model.weight._backward_hooks
    phase.run(phase.backward)
