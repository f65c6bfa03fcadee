"""Inputs of a step that another rank computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from outlast.worker.sentinels.replayed_inputs import decode_inputs, encode_inputs


def step(model: Any, batch: Any, *, scale: float = 1.0) -> None:
    """Stand for a script's step."""


def test_arguments_are_sent_and_modules_are_not() -> None:
    here, there = nn.Linear(2, 2), nn.Linear(2, 2)
    batch = {"x": torch.arange(6.0).view(3, 2), "text": ["a", "b", "c"], "none": None}
    why, data = encode_inputs(partial(step, there, batch, scale=0.5), b"own state")
    assert why == ""
    call, own = decode_inputs(partial(step, here, {}, scale=9.0), data)
    assert own == b"own state" and isinstance(call, partial) and call.func is step
    assert call.args[0] is here, "a rank has a model of its own"
    assert call.args[1]["x"].equal(batch["x"]) and call.args[1]["text"] == batch["text"]
    assert call.keywords == {"scale": 0.5}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: None, "called in another way"),
        (partial(step, None, object()), "an argument cannot be sent"),
        (partial(step, None, torch.ones(4, 3).t()), "not contiguous"),
        (partial(step, None, [torch.ones(3, requires_grad=True)]), "requires a gradient"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(call: Callable[[], Any], why: str) -> None:
    found, data = encode_inputs(call, b"")
    assert why in found and data == b""
