"""Refusal of steps with gradients of an earlier phase."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from outlast.errors import PhaseError
from outlast.worker.phases.commit_gate import LeftoverGradients
from outlast.worker.script.bytecode import reads_gradients
from outlast.worker.state.protected_modules import ProtectedModules


class Phase:
    """One function's phases on one model, whose gradients one backward has left."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.modules = ProtectedModules({"model": self.model})
        self.leftovers = LeftoverGradients()
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
def test_cleared_gradients_are_allowed(parts: Callable[[Phase], tuple[Callable[[], None]]]) -> None:
    phase = Phase()
    for _ in range(5):
        phase.run(*parts(phase))


def test_zero_gradients_are_allowed() -> None:
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
    with pytest.raises(PhaseError, match=r"a gradient of model\.weight from before the phase"):
        phase.run(*parts(phase))


def test_gradients_of_another_optimizer_do_not_matter() -> None:
    """The generator's backward adds to the discriminator's gradients, which are cleared later."""
    phase = Phase()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with phase.leftovers.watched("generator", phase.modules):
        phase.backward()
        phase.leftovers.must_not_be_used("generator", other)


def test_hooks_are_removed_after_the_first_steps() -> None:
    phase = Phase()
    for _ in range(4):
        phase.run(phase.optimizer.zero_grad, phase.backward)
    assert not phase.model.weight._backward_hooks
    phase.run(phase.backward)


def test_gradients_by_autograd_grad_may_be_copied_into_those_that_are_there() -> None:
    phase = Phase()
    phase.leftovers = LeftoverGradients(lambda _key: True)
    parameters = list(phase.model.parameters())

    def copy() -> None:
        loss = phase.model(torch.ones(2, 4)).sum()
        for parameter, new in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(new)

    phase.run(copy)
    with pytest.raises(PhaseError, match="from before the phase"):
        phase.run()


def test_an_evaluation_that_reads_gradients_of_another_phase_is_refused() -> None:
    refused: list[str] = []
    for reads, clears in ((True, False), (False, False), (True, True)):
        phase = Phase()
        phase.leftovers = LeftoverGradients(lambda _key, reads=reads: reads)
        with phase.leftovers.watched("log", phase.modules):
            if clears:
                phase.model.zero_grad()
            phase.leftovers.must_not_be_read("log", lambda what, _advice: refused.append(what))
    assert [what.partition(" while ")[0] for what in refused] == ["log reads .grad"]


def test_a_rehearsal_of_the_second_step_is_due_once_and_in_one_generation() -> None:
    leftovers = LeftoverGradients()
    for key, flags in (("reader", [b"", b"."]), ("late", [b"."]), ("other", [b"", b""])):
        leftovers.rehearsed(key, flags, (1, 0))
    assert not leftovers.is_due("reader", (1, 0))
    assert not leftovers.is_due("other", (1, 1))
    assert leftovers.is_due("reader", (1, 1))
    assert not leftovers.is_due("reader", (1, 2))
    assert not leftovers.is_due("late", (2, 1))
    assert not leftovers.is_due("late", (1, 3))


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("p.grad.norm()", True),
        ("[q.grad.norm() for q in p]", True),
        ("x = p.grad", True),
        ("p.grad = None", False),
        ("p.grad is None", False),
        ("if p.grad is not None:\n    p.grad.detach_()\n    p.grad.zero_()", False),
        ("p.grad.data.zero_()", False),
        ("f = lambda: p.grad.norm()", False),
    ],
)
def test_to_clear_a_gradient_is_not_to_read_it(source: str, *, reads: bool) -> None:
    assert reads_gradients(compile(source, "script", "exec")) is reads
