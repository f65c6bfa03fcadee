"""Functions that a training loop gives to `session.run`, of which some were never called yet."""

from __future__ import annotations

import dis
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from outlast.worker.script.training_loop import TrainingLoop, names_given_to_run

session = SimpleNamespace(run=lambda function, *args: function(*args))
weight = torch.nn.Parameter(torch.ones(1))
BODY = """
for b in batches:
    session.run(one if x else two, b)
    loss = session.run_with_undo(
        partial(three, k) if helper(x) else four,
        b,
        key=five,
    )
    six(session.run(seven, b))
    eight
    other.walk(nine)
"""


def plain(_batch: int) -> None:
    """Do nothing."""


def reader(_batch: int) -> Any:
    return weight.grad.norm() if weight.grad is not None else 0.0


def test_names_in_arguments_of_run_that_are_not_called_there() -> None:
    code = compile(BODY, "body", "exec")
    offsets = frozenset(each.offset for each in dis.get_instructions(code))
    functions = {"one", "two", "three", "four", "five", "seven"}
    assert names_given_to_run(code, offsets) == functions | {"b", "k", "x"}


def test_a_function_of_later_phases_may_read_gradients() -> None:
    for number in range(1):
        loop = TrainingLoop(sys._getframe(), {})
        assert loop.reads_gradients({plain.__code__}) == ""
        session.run(plain if number == 0 else reader, number)
        session.run(partial(reader, number))


def test_a_function_that_the_loop_calls_may_not() -> None:
    for number in range(1):
        loop = TrainingLoop(sys._getframe(), {})
        assert loop.reads_gradients({plain.__code__}) == "reader"
        session.run(plain, reader(number))
