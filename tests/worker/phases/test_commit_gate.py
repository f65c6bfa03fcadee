"""Commit gate: one vote before any change, and typed errors without a commit point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from outlast.errors import PhaseError, StepRefused
from outlast.worker.phases.commit_gate import CommitGate


class Bench:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.asked = 0
        self.gate = CommitGate(lambda o: o is self.optimizer)

    def ask(self, _optimizer: object = None) -> None:
        self.asked += 1

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(2, 3)).pow(2).sum()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.gate.close()


def test_the_gate_comes_before_every_other_hook(bench: Bench) -> None:
    order: list[str] = []
    bench.optimizer.register_step_pre_hook(lambda *_: order.append("theirs"))
    bench.gate.vote = lambda _: order.append("gate")
    bench.loss().backward()
    bench.optimizer.step()
    assert order == ["gate", "theirs"]


def test_a_refusal_changes_nothing(bench: Bench) -> None:
    def refuse(_: object) -> None:
        raise StepRefused("no")

    bench.gate.vote = refuse
    bench.loss().backward()
    before = bench.model.weight.detach().clone()
    with pytest.raises(StepRefused):
        bench.optimizer.step()
    assert torch.equal(bench.model.weight, before)


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_is_gated_after_its_backward(bench: Bench, keyword: bool) -> None:
    bench.gate.vote = bench.ask

    def closure() -> torch.Tensor:
        assert bench.asked == 0
        loss = bench.loss()
        loss.backward()
        return loss

    step: Any = bench.optimizer.step
    assert (step(closure=closure) if keyword else step(closure)).item() > 0
    assert bench.asked == 1


def test_an_optimizer_that_calls_its_closure_again_is_refused(bench: Bench) -> None:
    optimizer = torch.optim.LBFGS(bench.model.parameters(), max_iter=3)
    bench.optimizer = optimizer
    bench.gate.vote = bench.ask

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = bench.loss()
        loss.backward()
        return loss

    with pytest.raises(PhaseError, match="closure more than once"):
        optimizer.step(closure)


def test_a_step_outside_a_phase_is_an_error_once_phases_have_begun(bench: Bench) -> None:
    bench.loss().backward()
    bench.optimizer.step()
    bench.gate.guarding = True
    with pytest.raises(PhaseError, match=r"outside session\.run"):
        bench.optimizer.step()


def test_an_unprotected_optimizer_inside_a_phase_is_named(bench: Bench) -> None:
    other = torch.optim.Adagrad(bench.model.parameters())
    bench.gate.vote = bench.ask
    bench.loss().backward()
    with pytest.raises(PhaseError, match="Adagrad"):
        other.step()


def test_a_step_inside_backward_is_an_error(bench: Bench) -> None:
    bench.gate.vote = bench.ask
    bench.model.weight.register_post_accumulate_grad_hook(lambda _: bench.optimizer.step())
    with pytest.raises(PhaseError, match="inside backward"):
        bench.loss().backward()
    assert bench.asked == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own, at its import
def test_a_compiled_optimizer_comes_by_the_gate(bench: Bench) -> None:
    asked: list[bool] = []
    bench.gate.vote = lambda _: asked.append(torch.compiler.is_compiling())

    def update() -> None:
        bench.optimizer.step()

    bench.loss().backward()
    torch.compile(update, backend="eager")()
    torch._dynamo.reset()
    assert asked == [False]
