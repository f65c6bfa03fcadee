"""Results that were lost with their worker, as a successor uses them."""

from __future__ import annotations

import cmath
import copy
import io
import json
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch

from outlast.checkpoint.format import codec
from outlast.worker.phases.lost_results import (
    LostNumber,
    LostResult,
    LostTensor,
    has_nan_gradients,
    is_evidence,
    is_lost,
    placeholder,
)
from outlast.worker.session import number_of


class Used(Exception):  # noqa: N818 - stands for the end of this process
    pass


def use() -> NoReturn:
    raise Used


class Result(NamedTuple):
    loss: float
    name: str


def test_a_lost_result_contains_no_plausible_value() -> None:
    dry = {"loss": 0.5, "hits": [3, True], "pair": Result(1.0, "best"), "none": None}
    found = placeholder(dry, use)
    assert math.isnan(found["loss"])
    assert math.isnan(found["pair"].loss)
    assert found["none"] is None
    assert all(type(one) is LostResult for one in (*found["hits"], found["pair"].name))
    assert "nan" in repr(placeholder(torch.ones(2), use))
    assert bool(np.isnan(placeholder(np.ones(3), use)).all())
    for counted in (torch.ones(2, dtype=torch.int64), torch.ones(2) > 0, np.arange(3)):
        assert type(placeholder(counted, use)) is LostResult


def test_a_lost_number_is_reported_as_nan() -> None:
    """`session.report(loss=loss)` must not roll the job back."""
    for lost in (placeholder(0.5, use), placeholder(0.5, use) / 2, placeholder(torch.ones(1), use)):
        assert math.isnan(number_of("loss", lost))
    assert number_of("loss", torch.tensor([2.0])) == 2.0


USES: tuple[Callable[[Any], object], ...] = (
    bool, operator.not_, int, float, len, iter, hash, list, operator.neg, operator.index,
    lambda lost: lost == 1, lambda lost: lost < 1, lambda lost: lost < 1, lambda lost: lost[0],
    lambda lost: 1 in lost, lambda lost: 1 + lost, lambda lost: lost.item(), lambda lost: lost(),
    lambda lost: lost & True, range, torch.tensor, math.isnan, "%d".__mod__, open,
)  # fmt: skip


@pytest.mark.parametrize("deed", USES)
def test_using_the_value_of_a_lost_result_raises(deed: Callable[[Any], object]) -> None:
    with pytest.raises(Used):
        deed(placeholder(True, use))


def test_it_may_be_kept_and_printed() -> None:
    lost = placeholder(True, use)
    kept = [lost, {"stop": lost}]
    assert f"{lost} {lost:>5}" == "<lost with its worker> <lost with its worker>"
    assert str(kept) and kept[0] is lost


def test_flags_and_counts_that_agree_are_no_evidence() -> None:
    for value in (True, 3, "stop", None, [0, False], torch.ones(2) > 0, np.arange(2)):
        assert not is_evidence(value)
    for value in (0.5, [0, {"loss": 0.5}], torch.ones(2), np.ones(2), 1j, np.float32(1)):
        assert is_evidence(value)


def test_gradients_that_a_lost_result_made_nan_are_found() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    assert not has_nan_gradients(optimizer)
    second.grad = torch.tensor([math.inf, 1.0])
    assert not has_nan_gradients(optimizer)
    second.grad[1] = math.nan
    assert has_nan_gradients(optimizer)


DECISIONS: tuple[Callable[[Any], object], ...] = (
    bool, operator.not_, int, float, math.floor, lambda loss: min(1.0, loss), lambda loss: loss < 1,
    lambda loss: loss != loss, lambda loss: loss == 0.5, lambda loss: (1 + 2 * loss) / 3 > 1,
    lambda loss: sum([0.5, loss]) < 1, lambda loss: sorted([loss, 1.0]), lambda loss: loss - 2 <= 2,
    lambda loss: max([1.0, -loss]), lambda loss: abs(loss) ** 2 >= 1,
    lambda loss: torch.save([loss], io.BytesIO()), lambda loss: loss * torch.ones(1) < 1,
)  # fmt: skip


@pytest.mark.parametrize("decide", DECISIONS)
@pytest.mark.parametrize("of", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_what_decides_by_a_lost_number_raises(decide: Callable[[Any], object], of: Any) -> None:
    with pytest.raises(Used):
        decide(placeholder(of, use))


def test_a_lost_number_may_be_kept_printed_counted_with_and_encoded() -> None:
    lost = placeholder(0.5, use)
    total = sum([1.0, 2 * lost])
    assert type(total) is LostNumber and f"{total:.3f} {total}" == "nan nan"
    assert json.dumps([lost]) == "[NaN]" and copy.deepcopy([lost])[0] is lost
    tensor = placeholder(torch.ones(2), use)
    mean = torch.stack([tensor, torch.ones(2)]).mean()
    assert type(mean) is LostTensor and type(round(mean.item(), 3)) is LostNumber
    assert f"{mean:.3f}" == "nan" and type(mean.float()) is LostTensor
    assert type(copy.deepcopy(mean)) is LostTensor and copy.copy(lost) is lost
    assert type(lost * torch.ones(2, dtype=torch.int64)) is LostTensor
    assert cmath.isnan(lost + 1j)
    for kept in (codec.decode(codec.encode(one)) for one in (lost, mean)):
        assert type(kept) in (float, torch.Tensor) and is_lost(float(kept))
    assert is_lost(lost) and is_lost(mean) and not is_lost(0.5) and not is_lost(torch.ones(1))
