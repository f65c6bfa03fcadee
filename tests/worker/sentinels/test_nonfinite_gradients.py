"""Detection of gradients that are not finite, of all kinds of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.worker.sentinels.nonfinite_gradients import (
    ModuleOutputs,
    OwnContribution,
    nonfinite_gradient,
)

BAD = [math.nan, math.inf, -math.inf]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


def found(*gradients: torch.Tensor) -> str:
    return nonfinite_gradient((f"w{i}", each) for i, each in enumerate(gradients))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", BAD)
def test_one_element_among_many_is_found(dtype: torch.dtype, bad: float) -> None:
    gradient = torch.ones(300, dtype=dtype)
    assert found(torch.ones(5), gradient) == ""
    gradient[217] = bad
    assert found(torch.ones(5), gradient) == "gradient of w1 (1 of 300 elements)"


def test_a_norm_that_overflows_is_no_finding() -> None:
    assert found(torch.full((1000,), 3e38)) == ""
    assert found(torch.full((1000,), 6e4, dtype=torch.float16)) == ""
    assert found(torch.full((1000,), 1e300, dtype=torch.float64)) == ""
    assert found(torch.full((9,), 3e38, dtype=torch.bfloat16)) == ""


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert "2 of 2" in found(torch.tensor([math.inf, -math.inf]))


def test_tensors_without_numbers_to_look_at() -> None:
    assert found() == ""
    assert found(torch.empty(0), torch.tensor([True]), torch.tensor([1, 2])) == ""
    assert found(torch.empty(3, device="meta")) == ""


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_gradients() -> None:
    values = torch.tensor([1.0, math.nan])
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), values, (4,))  # uncoalesced
    assert found(coo) == "gradient of w0 (1 of 2 elements)"
    assert found(torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,))) == ""
    csr = torch.tensor([[0.0, math.inf], [1.0, 0.0]]).to_sparse_csr()
    assert "1 of 2" in found(csr)


def test_a_shard_of_a_dtensor(tmp_path: object) -> None:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.tensor([1.0, math.nan, 2.0])
        assert "1 of 3" in found(distribute_tensor(whole, mesh, [Shard(0)]))
    finally:
        dist.destroy_process_group()


@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=9),
        min_size=1, max_size=5,
    )
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_it_is_the_elementwise_answer(rows: list[list[float]]) -> None:
    wrong = [i for i, row in enumerate(rows) if not all(map(math.isfinite, row))]
    answer = found(*map(torch.tensor, rows))
    assert answer.startswith(f"gradient of w{wrong[0]} ") if wrong else answer == ""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_an_own_contribution_is_what_backward_brings_here() -> None:
    net, own = model(), OwnContribution()
    own.watch({"net": net})
    own.clear()
    net(torch.ones(2, 3)).sum().backward()
    assert own.has_run and own.is_finite()
    (net(torch.ones(2, 3)) * math.nan).sum().backward()
    assert not own.is_finite()
    own.clear()
    assert own.is_finite() and not own.has_run


def test_a_model_without_trained_parameters_has_no_contribution() -> None:
    own = OwnContribution()
    own.watch({"frozen": model().requires_grad_(False), "none": nn.Identity()})
    own.clear()
    assert own.is_finite() and not own.has_run


def test_the_first_module_whose_output_is_not_finite() -> None:
    net, outputs = model(), ModuleOutputs()
    with torch.no_grad():
        net.get_parameter("2.weight")[0, 0] = math.inf
    with outputs.watched({"net": net}):
        net(torch.ones(2, 3))
        assert outputs.first_nonfinite() == "output of net.2"
    assert not net[2]._forward_hooks
    with outputs.watched({"net": net}):
        assert outputs.first_nonfinite() == "", "nothing of the attempt before"
