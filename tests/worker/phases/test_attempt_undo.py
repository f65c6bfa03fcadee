"""Undo of a refused attempt: the redo is bit-identical to an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from outlast.checkpoint.format import codec
from outlast.errors import ProtectError
from outlast.worker.phases.phase_attempt import UndoCopy
from outlast.worker.state.protected_state import ProtectedState


class RefusedError(Exception):
    pass


def _train(kind: str, *, fused: bool, scaled: bool, refuse_at: int, where: str) -> bytes:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    counts = {"seen": 0}
    named: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "counts": counts
    }  # fmt: skip
    if scaled:
        named["scaler"] = scaler
    protected = ProtectedState(named, {})
    armed = [refuse_at]

    def maybe(here: str, step: int) -> None:
        if here == where and armed[0] == step:
            armed[0] = -1
            raise RefusedError

    step_now = 0
    optimizer.register_step_pre_hook(lambda *_: maybe("gate", step_now))
    while step_now < 6:
        undo = UndoCopy(protected)
        try:
            optimizer.zero_grad()
            noise = torch.randn(4, 8) + random.random() + float(np.random.rand())
            counts["seen"] += 4
            loss = model(noise).pow(2).mean()
            maybe("forward", step_now)
            scaler.scale(loss).backward()
            maybe("backward", step_now)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * step_now
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        except RefusedError:
            undo.put_back()
            continue
        step_now += 1
    assert armed[0] == -1
    state = [*model.state_dict().values()]
    assert counts == {"seen": 24}
    return b"".join(t.numpy().tobytes() for t in state) + str(scheduler.get_last_lr()).encode()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward", "gate"])
def test_a_redo_ends_in_the_same_bits(kind: str, fused: bool, scaled: bool, where: str) -> None:
    how = {"fused": fused, "scaled": scaled}
    plain = _train(kind, refuse_at=-1, where=where, **how)
    assert _train(kind, refuse_at=3, where=where, **how) == plain
    assert _train(kind, refuse_at=0, where=where, **how) == plain


def test_gradients_that_were_there_become_zero_and_others_none() -> None:
    model = nn.Linear(2, 1)
    protected = ProtectedState({"model": model}, {})
    model.weight.grad = torch.ones_like(model.weight)
    undo = UndoCopy(protected)
    model(torch.ones(1, 2)).sum().backward()
    assert undo.leaves_gradients()
    undo.put_back()
    assert model.bias.grad is None
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_gradients_are_there_again_where_they_were() -> None:
    """None is not zero: an optimizer that decays weights leaves those without a gradient alone."""
    linear, embedding = nn.Linear(2, 1), nn.Embedding(3, 2, sparse=True)
    model = nn.ModuleList([linear, embedding])
    protected = ProtectedState({"model": model}, {})
    weight, table = linear.weight, embedding.weight
    weight.grad = torch.ones_like(weight)
    embedding(torch.tensor([1])).sum().backward()
    state, undo = protected.replicated(), UndoCopy(protected)
    model.zero_grad()
    linear.bias.grad = torch.ones(1)
    undo.put_back()
    assert weight.grad is not None
    assert not weight.grad.any()
    assert table.grad is not None
    assert table.grad.is_sparse
    assert linear.bias.grad is None
    model.zero_grad()
    protected.adopt(state)  # as a joiner does
    assert [p.grad is None for p in (weight, table, linear.bias)] == [False, False, True]


@pytest.mark.parametrize("everything", [False, True])
def test_optimizer_state_without_a_parameter_is_restored(*, everything: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["history"] = [1]
    all_state: Any = optimizer.state
    all_state["all"]["count"] = 1
    protected = ProtectedState({"model": model, "optimizer": optimizer}, {})
    undo = UndoCopy(protected, everything=everything)
    optimizer.param_groups[0]["history"].append(2)
    optimizer.param_groups[0]["step"] = 1
    if everything:  # else it may change behind the vote only
        all_state["all"]["count"] = 2
    undo.put_back()
    assert optimizer.param_groups[0]["history"] == [1]
    assert "step" not in optimizer.param_groups[0]
    assert all_state["all"] == {"count": 1}


def test_attributes_that_a_scheduler_adds_are_removed() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    undo = UndoCopy(ProtectedState({"scheduler": scheduler}, {}))
    vars(scheduler)["seen"] = 1
    undo.put_back()
    assert not hasattr(scheduler, "seen")


@pytest.mark.parametrize("everything", [False, True])
def test_a_buffer_that_takes_another_shape_is_refused(*, everything: bool) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.empty(0))
    undo = UndoCopy(ProtectedState({"model": model}, {}), everything=everything)
    model.register_buffer("seen", torch.ones(2))
    with pytest.raises(ProtectError, match=r"buffer model\.seen was \(0,\) .* is \(2,\)"):
        undo.put_back()


def test_groups_that_an_attempt_added_are_refused() -> None:
    model, more = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    undo = UndoCopy(ProtectedState({"model": model, "more": more, "optimizer": optimizer}, {}))
    optimizer.add_param_group({"params": more.parameters()})
    with pytest.raises(ProtectError, match=r"'optimizer' \(SGD\) .*group 1 was added, with"):
        undo.put_back()


def test_a_joiner_holds_the_donors_bits() -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ProtectedState]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(seed):
            model(torch.randn(8, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            scheduler.step()
        for state in optimizer.state.values():
            # Moments in another dtype than the parameters': load_state_dict would cast them.
            state["exp_avg"] = state["exp_avg"].float() + 1e-4
        protected = ProtectedState({"m": model, "o": optimizer, "s": scheduler, "ema": average}, {})
        return model, optimizer, protected

    _, _, donor = build(5)
    model, optimizer, joiner = build(2)
    joiner.adopt(donor.replicated())
    for a, b in zip(_leaves(donor.replicated()), _leaves(joiner.replicated()), strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert any(s["exp_avg"].dtype == torch.float32 for s in optimizer.state.values())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *_leaves(value[key])]]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def test_another_model_is_refused_and_nothing_is_taken_over() -> None:
    donor = ProtectedState({"m": nn.Linear(4, 4)}, {})
    model = nn.Linear(4, 5)
    before = model.weight.detach().clone()
    with pytest.raises(ProtectError, match="another model"):
        ProtectedState({"m": model}, {}).adopt(donor.replicated())
    assert torch.equal(model.weight, before)


def test_unprotectable_objects_are_named() -> None:
    with pytest.raises(ProtectError, match="'thing'"):
        ProtectedState({"thing": object()}, {})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ProtectError, match="no protected module"):
        ProtectedState({"model": nn.Linear(1, 1), "optimizer": optimizer}, {})


def test_a_parameter_group_added_later_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model[0].parameters())
    protected = ProtectedState({"model": model, "optimizer": optimizer}, {})
    protected.check_unchanged()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(ProtectError, match="give every group to the optimizer before protect") as e:
        protected.check_unchanged()
    assert "optimizer 'optimizer' (SGD)" in str(e.value)
    assert "group 1 was added, with model.1.weight, model.1.bias" in str(e.value)


def test_parameters_put_into_a_group_later_are_named() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model[0].parameters())
    protected = ProtectedState({"model": model, "optimizer": optimizer}, {})
    group = optimizer.param_groups[0]["params"]
    group += [model[1].weight, nn.Parameter(torch.ones(2))]
    with pytest.raises(ProtectError) as raised:
        protected.check_unchanged()
    assert "group 0 got model.1.weight, a Parameter (2,) of no protected module" in str(
        raised.value
    )
    del group[2:]
    protected.check_unchanged()
    del group[0]
    with pytest.raises(ProtectError, match=r"\(group 0 lost 1 of 2 parameters\)"):
        protected.check_unchanged()
    group.insert(0, model[1].weight)  # as many as before
    with pytest.raises(ProtectError, match=r"\(group 0 got model\.1\.weight\)"):
        protected.check_unchanged()


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.get_submodule("0"), "weight", amount=1)


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.get_submodule("0"))


def tie(model: nn.Module) -> None:
    model.get_submodule("1").weight = model.get_submodule("0").weight


def add(model: nn.Module) -> None:
    model.get_submodule("1").register_parameter("scale", nn.Parameter(torch.ones(2)))


def replace(model: nn.Module) -> None:
    model.get_submodule("1").weight = nn.Parameter(torch.ones(2, 2))


def remove(model: nn.Module) -> None:
    del model.get_submodule("1").weight


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (pruned, "model.0.weight became model.0.weight_orig of Linear (pruned or parametrized)"),
        (parametrize, "model.0.weight was removed"),
        (tie, "model.1.weight of Linear was tied to model.0.weight"),
        (add, "model.1.scale of Linear was added"),
        (replace, "model.1.weight of Linear was replaced by another parameter"),
        (remove, "model.1.weight was removed"),
    ],
)
def test_parameters_that_the_loop_changes_are_named(
    change: Callable[[nn.Module], None], text: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    protected = ProtectedState({"model": model}, {})
    protected.check_unchanged()
    change(model)
    with pytest.raises(ProtectError, match="other parameters than at protect") as raised:
        protected.check_unchanged()
    assert text in str(raised.value) and "then protect" in str(raised.value)


def test_a_parameter_replaced_later_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    protected = ProtectedState({"model": model}, {})
    model[1] = nn.GELU()  # has no parameters, and a joiner replaces it, too, before its first phase
    protected.check_unchanged()
    model[1] = nn.Linear(1, 1)
    with pytest.raises(ProtectError, match="other parameters"):
        protected.check_unchanged()


def test_a_buffer_registered_later_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    protected = ProtectedState({"model": model}, {})
    model[1].register_buffer("seen", torch.zeros(1))
    undo = UndoCopy(protected)
    model[1].get_buffer("seen").add_(1)
    assert undo.put_back() == ""
    assert model[1].get_buffer("seen").item() == 0


def test_adopted_state_is_not_aliased_by_later_training() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, ProtectedState]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return model, optimizer, ProtectedState(named, {})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    model, optimizer, protected = made()
    step(model, optimizer)
    state = codec.decode(codec.encode(protected.replicated()))
    model, optimizer, protected = made()
    protected.adopt(state)
    before = codec.encode(state)
    step(model, optimizer)
    assert codec.encode(state) == before


def test_modes_and_gradient_flags_are_the_ranks_own() -> None:
    def built() -> tuple[nn.Module, ProtectedState]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        return model, ProtectedState({"model": model}, {})

    model, protected = built()
    model.eval()
    next(model.parameters()).requires_grad_(False)
    own = protected.own_state(protected.own_choices())
    other, joiner = built()
    joiner.restore_own(own)
    assert [part.training for part in other.modules()] == [False] * 3
    assert [p.requires_grad for p in other.parameters()] == [False, True]


def test_an_undo_copy_puts_back_weights_and_all_else_that_ranks_hold_alike() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters())
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    protected = ProtectedState(
        {"model": model, "optimizer": optimizer, "decay": decay, "average": average}, {}
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        decay.step()
        average.update_parameters(model)

    step()
    before = codec.encode(protected.replicated())
    undo = UndoCopy(protected, "step", everything=True)
    step()
    with torch.no_grad():
        model[0].weight.data.add_(1)
    assert codec.encode(protected.replicated()) != before
    assert undo.put_back() == ""
    assert codec.encode(protected.replicated()) == before


def test_new_optimizer_state_is_removed() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    protected = ProtectedState({"model": model, "optimizer": optimizer}, {})
    undo = UndoCopy(protected, "step", everything=True)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    undo.put_back()
    assert not optimizer.state and model.weight.grad is None
