"""DDP bucket layouts: recorded, imposed and restored."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from outlast.errors import ProtectError, UnsupportedError
from outlast.worker.state.ddp_buckets import BucketState, DDPBuckets
from outlast.worker.state.protected_state import ProtectedState

SMALL = {"bucket_cap_mb": 0.00005}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.swap = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(x)) if self.swap else self.b(self.a(x))


def made(**more: Any) -> tuple[Any, DDPBuckets]:
    model: Any = nn.parallel.DistributedDataParallel(Swapped(), **SMALL, **more)
    return model, DDPBuckets(lambda: [model])


def step(model: Any, reducers: DDPBuckets, *, won: bool = True) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    reducers.settle()
    if won:
        reducers.commit()


FORWARDS, BACKWARDS = [[3, 2], [1, 0]], [[1, 0], [3, 2]]  # bias before weight, the last one first


def test_buckets_are_recorded_with_the_vote_and_never_change_again() -> None:
    model, reducers = made()
    assert reducers.states() == [BucketState(sync=True)]
    step(model, reducers, won=False)
    assert reducers.states() == [BucketState(sync=True)]
    reducers.restore()
    model.module.swap = True
    step(model, reducers)
    assert reducers.states()[0].buckets == BACKWARDS
    model.module.swap = False
    for _ in range(2):
        reducers.restore()
        step(model, reducers)
        assert reducers.states()[0].buckets == BACKWARDS


CAN_BE_LAZY = "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel).parameters
LAZY = [{"lazy_bucket_allocation": True}] if CAN_BE_LAZY else []  # from torch 2.15 on


@pytest.mark.parametrize(
    "more", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, *LAZY]
)
def test_a_joiner_takes_the_buckets_of_its_donor(more: dict[str, Any]) -> None:
    model, reducers = made(**more)
    for _ in range(2):  # its own dry steps come in another order than the donor's
        model(torch.ones(2, 4)).sum().backward()
    reducers.adopt([BucketState(sync=True, buckets=BACKWARDS)])
    assert read(model) == BACKWARDS
    for _ in range(3):
        step(model, reducers)
        assert read(model) == BACKWARDS
    assert reducers.states()[0].buckets == BACKWARDS


def read(model: Any) -> list[list[int]]:
    number = {id(p): index for index, p in enumerate(model.parameters())}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[number[id(p)] for p in bucket.parameters()] for bucket in buckets]


def test_a_static_graph_is_built_counted_and_rebuilt() -> None:
    model, reducers = made(static_graph=True)
    assert (reducers.states()[0].counted, reducers.states()[0].buckets) == (False, None)
    step(model, reducers)
    assert (reducers.states()[0].counted, reducers.states()[0].buckets) == (True, None)
    step(model, reducers, won=False)
    reducers.restore()  # of a survivor: it keeps its counts
    assert reducers.is_ready
    assert read(model) == [[0, 1, 2, 3]]
    step(model, reducers)
    assert reducers.states()[0].buckets == FORWARDS


def test_a_joiner_of_a_counted_graph_must_count_too() -> None:
    model, reducers = made(static_graph=True)
    reducers.adopt([BucketState(sync=True, counted=True)])
    assert not reducers.is_ready
    model(torch.ones(2, 4)).sum().backward()
    reducers.restore()
    assert reducers.is_ready
    step(model, reducers)
    assert reducers.states()[0].buckets == FORWARDS


def test_an_attempt_that_an_exception_ended_in_backward_leaves_nothing() -> None:
    model, reducers = made(find_unused_parameters=True)
    out = model(torch.ones(2, 4))
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    reducers.restore()
    step(model, reducers)
    assert reducers.states() == [BucketState(sync=True)]  # such a DDP rebuilds nothing


@pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"), reason="before torch 2.15"
)
def test_backwards_that_the_script_ends_stay_so() -> None:
    """A new reducer would end them itself, and refuse the script's call."""
    model, reducers = made()
    model.require_manual_backward_finalization = True
    model(torch.ones(2, 4)).sum().backward()
    reducers.restore()
    model(torch.ones(2, 4)).sum().backward()
    model.finalize_backward()
    reducers.settle()
    assert all(each.grad is not None for each in model.parameters())


def test_frozen_parameters_and_hooks_stay() -> None:
    model, reducers = made(find_unused_parameters=True)
    calls = []

    def hook(state: object, bucket: Any) -> Any:
        calls.append(state)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # DDP would compare their text with a class
    model.register_comm_hook("state", hook)
    model.module.a.requires_grad_(False)
    reducers.restore()
    assert not any(p.requires_grad for p in model.module.a.parameters())
    step(model, reducers)
    assert set(calls) == {"state"}
    assert model.module.a.weight.grad is None
    assert model.module.b.weight.grad is not None


def test_buckets_that_do_not_fit_are_refused() -> None:
    model, reducers = made()
    for wrong in ([], [BucketState(sync=True, buckets=[[0, 1]])]):
        with pytest.raises(ProtectError, match="another model"):
            reducers.adopt(wrong)
    assert read(model) == [[0, 1, 2, 3]]


def test_they_travel_with_the_replicated_state() -> None:
    model, _ = made()
    protected = ProtectedState({"model": model}, {})
    step(model, protected.reducers)
    states = protected.replicated()["ddp"]
    assert msgspec.convert(states, list[BucketState])[0].buckets == FORWARDS


def test_mixed_precision_is_refused_by_name() -> None:
    model, _ = made()
    model.mixed_precision = object()
    with pytest.raises(UnsupportedError, match="mixed_precision"):
        ProtectedState({"model": model}, {})


def test_join_is_refused_by_name() -> None:
    model, _ = made()
    protected = ProtectedState({"model": model}, {})
    with model.join(), pytest.raises(UnsupportedError, match="batches ends an epoch"):
        protected.check_unchanged()


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    model, _ = made()
    model.module.a.requires_grad_(False)
    with pytest.raises(ProtectError, match="freeze before the DDP is made"):
        ProtectedState({"model": model}, {})
    inner = nn.Linear(2, 2)
    replicate(inner)
    with pytest.raises(UnsupportedError, match=r"replicate\(\) on \w*Linear"):
        ProtectedState({"model": nn.Sequential(inner)}, {})


@pytest.mark.extended
def test_a_ddp_around_a_protected_module_need_not_be_protected_itself() -> None:
    """The script protects `ddp.module`, and one DDP is made after `protect`."""
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    dropped: Any = nn.parallel.DistributedDataParallel(layers[0])
    dropped.itself = dropped  # only the collector frees it
    del dropped
    second: Any = nn.parallel.DistributedDataParallel(layers[2])
    first: Any = nn.parallel.DistributedDataParallel(layers[0])
    others = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))  # of no protected module
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    protected = ProtectedState({"model": layers, "optimizer": optimizer}, {})
    assert protected.tree.reducers == [first, second]
    late = nn.parallel.DistributedDataParallel(layers[1])
    protected.check_unchanged()
    assert protected.tree.reducers == [first, late, second]
    assert len(protected.reducers.states()) == 3 and others not in protected.tree.reducers
