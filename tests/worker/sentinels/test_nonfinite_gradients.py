"""Detection of gradients that are not finite, of all kinds of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.worker.sentinels.nonfinite_gradients import (
    WHOLE,
    GradientLook,
    ModuleOutputs,
    OwnContribution,
    divide,
    nonfinite_gradient,
)
from outlast.worker.state.protected_state import ProtectedState

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


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sets(st.integers(0, 5)),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_all_shares_together_are_all_gradients(
    sizes: list[int], count: int, apart: set[int], data: st.DataObject
) -> None:
    """Whatever a share leaves out, another replica looks at; what is no replica's, each does."""
    named = [(f"w{i}", nn.Parameter(torch.ones(size))) for i, size in enumerate(sizes)]
    alike = {id(p) for i, (_, p) in enumerate(named) if i not in apart}
    for _, parameter in named:
        parameter.grad = torch.zeros(parameter.numel())
    parts = [divide(named, alike, index, count) for index in range(count)]
    shares = [
        sum(part.end - part.start for part in each if id(part.parameter) in alike) for each in parts
    ]
    assert max(shares) - min(shares) <= 1
    spots = [(i, at) for i, size in enumerate(sizes) for at in range(size)]
    if not spots:
        return
    number, at = data.draw(st.sampled_from(spots))
    gradient = named[number][1].grad
    assert gradient is not None
    gradient[at] = math.nan
    found = [
        nonfinite_gradient((p.name, e) for p in each if (e := p.elements()) is not None) != ""
        for each in parts
    ]
    assert sum(found) == (1 if id(named[number][1]) in alike else count)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_gradients_that_are_no_dense_tensor_are_in_every_share() -> None:
    parameter = nn.Parameter(torch.ones(4, 6))
    parameter.grad = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.full((1, 6), math.nan))
    assert parameter.grad.shape == (4, 6)
    for index in range(3):
        (part,) = divide([("w", parameter)], {id(parameter)}, index, 3)
        assert part.elements() is parameter.grad
    parameter.grad = torch.ones(6, 4).t()
    (part,) = divide([("w", parameter)], {id(parameter)}, 1, 3)
    assert part.elements() is parameter.grad, "not contiguous"


def test_a_look_follows_the_optimizers_and_the_share() -> None:
    net = model()
    first = torch.optim.SGD(net[0].parameters(), lr=0.1)
    second = torch.optim.SGD(net[2].parameters(), lr=0.1)
    protected, look = ProtectedState({"net": net, "one": first, "two": second}, {}), GradientLook()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    last = net.get_parameter("2.bias").grad
    assert last is not None
    last[1] = math.nan
    alone, both = {id(first): first}, {id(first): first, id(second): second}
    assert look.first("f", alone, WHOLE, protected) == ""
    assert "2.bias (1 of 2 elements)" in look.first("f", both, WHOLE, protected)
    assert not look.is_partial
    assert look.first("f", both, (0, 2), protected) == "" and look.is_partial
    assert "2.bias" in look.again(protected), "the other half is not this rank's"
    assert look.first("f", both, (1, 2), protected)
    look.forget()
    assert not look.is_partial


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


def test_contributions_of_many_backward_passes_are_summed_up() -> None:
    net, own = model(), OwnContribution()
    own.watch({"net": net})
    (net(torch.ones(2, 3)) * math.inf).sum().backward()
    for _ in range(200):
        net(torch.ones(2, 3)).sum().backward()
    assert len(own._copies) < 100 and not own.is_finite()
    own.unwatch()
    own.clear()
    net(torch.ones(2, 3)).sum().backward()
    assert not own.has_run


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


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning")
def test_a_module_of_torchscript_is_named_by_the_module_around_it() -> None:
    """TorchScript refuses hooks."""
    scripted, outputs = torch.jit.script(nn.Sequential(nn.Linear(2, 2))), ModuleOutputs()
    net = nn.Sequential(scripted)
    with outputs.watched({"net": net, "scripted": scripted}):
        net(torch.full((1, 2), math.nan))
    assert outputs.first_nonfinite() == "output of net"
