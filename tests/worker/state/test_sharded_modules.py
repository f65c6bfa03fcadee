"""FSDP2 modules at a vote: what may be left in them, what is put back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from outlast.errors import PhaseError, ProtectError
from outlast.worker.phases.commit_gate import LeftoverGradients, must_have_reduced
from outlast.worker.state.protected_state import ProtectedState, Replicated
from outlast.worker.state.sharded_modules import groups_of_state, reset_by_hand


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """Groups of four ranks, of which this process is one and the others compute nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class Job:
    """A sharded model whose root has parameters of its own."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        fully_shard(self.model[1], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.protected = ProtectedState({"model": self.model, "optimizer": self.optimizer}, {})
        self.iterations = self.protected.iterations

    @property
    def root(self) -> FSDPModule:
        return self.model

    @property
    def block(self) -> FSDPModule:
        return self.model[1]

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(3, 4)).sum()

    def backward(self) -> None:
        self.forward().backward()


@pytest.mark.parametrize("end", ["settle", "undo"])
def test_gradients_of_shards_stay(end: str) -> None:
    """torch 2.15 drops them with the other state of an iteration; the optimizer would not step."""
    job = Job()
    job.backward()
    before = [each.grad for each in job.model.parameters()]
    getattr(job.iterations, end)()
    after = [each.grad for each in job.model.parameters()]
    assert all(each is not None for each in before)
    assert all(one is other for one, other in zip(before, after, strict=True))


class Interrupted(BaseException):
    """What ends an attempt in the middle, as StepRefused does."""


@pytest.mark.skipif(
    not hasattr(FSDPParamGroup, "_wait_all_gather_streams_on_event"), reason="torch 2.15 and newer"
)
@pytest.mark.parametrize("interrupted", ["forward", "backward"])
def test_an_iteration_is_reset_by_hand(interrupted: str) -> None:
    """As torch does from 2.13 on: what is interrupted leaves nothing to a later iteration."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    job = Job()
    job.backward()
    state: Any = job.root._get_fsdp_state()
    before = iteration_of(state)
    result = job.forward()
    if interrupted == "forward":
        job.model[2].register_forward_pre_hook(interrupt)
    else:
        job.model[0].weight.register_hook(interrupt)
    with pytest.raises(Interrupted):
        job.forward() if interrupted == "forward" else result.backward()
    assert iteration_of(state) != before
    reset_by_hand(state)
    assert iteration_of(state) == before


def iteration_of(root: Any) -> list[object]:
    """Return what FSDP2 keeps of an iteration."""
    shared, common = root._comm_ctx, root._state_ctx
    kept: list[object] = [shared.all_gather_state, len(shared.post_forward_order)]
    kept += [common.iter_forward_root, common.post_backward_final_callback_queued]
    for state in common.all_states:
        kept += [state._training_state, len(state._modules_to_run_forward)]
        for group in groups_of_state(state):
            kept += [group._training_state, group.is_sharded, group._all_gather_result]
            kept += [len(group._post_forward_indices), group._partial_reduce_output]
    return kept


def test_settings_are_put_back_with_the_ranks_own_state() -> None:
    job = Job()
    job.root.set_reshard_after_forward(False)
    before, own = job.iterations.settings(), job.protected.own_state(job.protected.own_choices())
    job.root.set_requires_gradient_sync(False)
    job.root.set_is_last_backward(False)
    job.root.set_gradient_divide_factor(3.0)
    job.root.set_reshard_after_forward(True)
    job.root.set_modules_to_forward_prefetch([job.block])
    switched = job.iterations.settings()
    assert switched != before
    now = job.protected.own_state(job.protected.own_choices())
    job.protected.restore_own(own)
    assert job.iterations.settings() == before
    job.protected.restore_own(now)
    assert job.iterations.settings() == switched


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15"
)
def test_backwards_that_the_script_ends_are_put_back() -> None:
    """Otherwise a replacement's backward would reduce where the other ranks' backward waits."""
    job = Job()
    root: Any = job.root
    root.set_manual_backward_finalization(True)
    job.backward()
    with pytest.raises(PhaseError, match="that were not reduced"):
        job.iterations.settle()
    job.iterations.undo()
    own = job.protected.own_state(job.protected.own_choices())
    root.set_manual_backward_finalization(False)
    job.protected.restore_own(own)
    job.backward()
    root.finalize_backward()
    job.iterations.settle()
    assert all(each.grad is not None for each in job.model.parameters())


def test_torchs_own_choice_for_the_root_survives_the_undo_of_its_first_forward() -> None:
    job = Job()
    own = job.protected.own_state(job.protected.own_choices())
    job.backward()
    mode = job.iterations.settings()
    job.protected.restore_own(own)
    with torch.no_grad():
        job.forward()
    assert job.iterations.settings() == mode
    with pytest.raises(PhaseError):  # the root stays gathered after a forward
        job.iterations.must_be_sharded(job.optimizer)


@pytest.mark.parametrize(
    ("switch", "is_open"),
    [
        (lambda job: job.root.set_requires_gradient_sync(False), True),
        (lambda job: job.model.eval(), True),
        (lambda _job: None, False),
    ],
)
def test_a_function_that_switches_after_its_vote_writes_its_slot_at_its_end(
    switch: Callable[[Job], object], is_open: bool
) -> None:
    job = Job()
    local = job.protected.local
    local.note_open_state("step")
    switch(job)
    local.completed("step", has_changed_buffers=False)
    local.won()
    assert local.must_wait("step") is is_open


@pytest.mark.parametrize(
    "switch",
    [FSDPModule.set_requires_gradient_sync, FSDPModule.set_requires_all_reduce],
    ids=["not reduced", "reduced in part"],
)
def test_a_phase_must_not_leave_gradients_inside(switch: Callable[..., None]) -> None:
    job = Job()
    switch(job.root, False)
    job.backward()
    with pytest.raises(PhaseError, match="that were not reduced"):
        job.iterations.settle()
    switch(job.root, True)
    job.backward()
    job.iterations.settle()


def test_partial_sums_are_refused_before_the_vote() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.LayerNorm(4))
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    protected = ProtectedState({"model": model}, {})
    model(torch.ones(2, 4, 4)).to_local().sum().backward()
    with pytest.raises(PhaseError, match=r"0\.weight is a partial sum"):
        must_have_reduced(protected)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    must_have_reduced(protected)


class Average:
    """A moving average that keeps DTensors by name."""

    def __init__(self, job: Job) -> None:
        self.values = {name: p.detach().clone() for name, p in job.model.named_parameters()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError


def test_sharded_tensors_of_other_objects_are_refused_with_a_way_out() -> None:
    job = Job()
    with pytest.raises(ProtectError, match="as parameters of a protected module"):
        ProtectedState({"model": job.model, "average": Replicated(Average(job))}, {})


def test_an_optimizer_must_not_step_while_parameters_are_gathered() -> None:
    job = Job()
    job.backward()
    job.iterations.must_be_sharded(job.optimizer)
    with torch.no_grad():
        job.forward()
    with pytest.raises(PhaseError, match="of the root module"):
        job.iterations.must_be_sharded(job.optimizer)
    job.root.reshard()
    job.iterations.must_be_sharded(job.optimizer)


def test_frozen_parameters_may_stay_gathered() -> None:
    job = Job()
    job.model.requires_grad_(False)
    job.forward()
    job.iterations.must_be_sharded(job.optimizer)


def test_parameters_that_another_optimizer_updates_may_stay_gathered() -> None:
    """A teacher that runs without gradients, and the student's step."""
    job = Job()
    with torch.no_grad():
        job.forward()
    job.iterations.must_be_sharded(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))


@pytest.mark.parametrize(
    ("clear", "is_refused"),
    [
        (lambda _job: None, True),
        (lambda job: job.optimizer.zero_grad(), False),
        (lambda job: job.optimizer.zero_grad(set_to_none=False), False),
    ],
    ids=["left", "none", "zeroed"],
)
def test_a_step_must_not_add_to_shards_of_gradients_of_another_phase(
    clear: Callable[[Job], object], is_refused: bool
) -> None:
    job, leftovers = Job(), LeftoverGradients()
    job.backward()
    for gradient in (p.grad for p in job.model.parameters()):
        assert gradient is not None
        gradient.to_local().fill_(1.0)
    with leftovers.watched("step", job.protected.tree):
        clear(job)
        job.backward()
        job.backward()
        if not is_refused:
            leftovers.must_not_be_used("step", job.optimizer)
            return
        with pytest.raises(PhaseError, match="steps with a gradient of"):
            leftovers.must_not_be_used("step", job.optimizer)
