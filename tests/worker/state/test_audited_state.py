"""Digests of the state that replicas share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outlast.checkpoint.format import codec
from outlast.controller.fault_spec import parse
from outlast.worker.state.audited_state import (
    REST,
    collect,
    digest_kinds,
    digest_names,
    replica_set,
)
from outlast.worker.state.bit_flips import flip
from outlast.worker.state.ddp_buckets import BucketState
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import digests, weighted_sum, word_of


def protected() -> ProtectedState:
    """A model that has made one step, a scheduler, and an object that is the rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    held = ProtectedState(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "own": {"drawn": 3}}, {}
    )
    model(torch.randn(5, 8)).sum().backward()
    held.buffers.mark_vote()
    optimizer.step()
    held.completed("step")
    return held


def kinds(held: ProtectedState) -> dict[str, bytes]:
    return digest_kinds(digest_names(collect(held)))


def flip_bit(held: ProtectedState, pattern: str) -> None:
    flip(held, parse(f"flip:tensor={pattern}"))


def test_equal_states_have_equal_digests() -> None:
    one, other = protected(), protected()
    assert kinds(one) == kinds(other)
    assert replica_set(one) == replica_set(other)
    assert {"parameters", "optimizers", "objects"} <= kinds(one).keys()


def test_every_tensor_of_the_model_and_the_optimizer_is_named() -> None:
    names = digest_names(collect(protected()))
    assert "model.0.weight" in names["parameters"]
    assert "optimizer.state.model.2.bias.exp_avg_sq" in names["optimizers"]
    assert "optimizer.state.model.2.bias.step" in names["optimizers"]


def test_all_tensors_that_a_joiner_takes_over_are_audited() -> None:
    """But for BatchNorm's statistics, which are the rank's own."""
    held = protected()
    _, moved = codec.flatten(held.replicated())
    _, audited = codec.flatten(collect(held))
    left = {t.data_ptr() for t in moved} - {t.data_ptr() for t in audited}
    assert left == {buffer.data_ptr() for buffer in held.modules["model"].buffers()}


def test_the_rest_is_what_votes_do_not_compare() -> None:
    one, other = protected(), protected()
    names = digest_names(collect(one, REST))
    assert names["parameters"] == names["optimizers"] == {} and names["objects"]
    flip_bit(other, "model.0.weight")
    flip_bit(other, "optimizer.state.*.exp_avg")
    assert names == digest_names(collect(other, REST))
    tables = []
    for scale in (1.0, 2.0):
        model = nn.Linear(2, 2)
        model.register_buffer("scale", torch.tensor([scale]))
        tables.append(digest_names(collect(ProtectedState({"model": model}, {}), REST)))
    assert tables[0]["buffers"].keys() == {"model.scale"} and tables[0] != tables[1]


def test_a_shared_parameter_is_audited_once_whatever_the_order_of_protect() -> None:
    names = []
    for order in (("body", "head"), ("head", "body")):
        body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        modules = {"body": body, "head": body[1]}
        held = ProtectedState({name: modules[name] for name in order}, {})
        names.append(sorted(collect(held)["parameters"]))
    assert names[0] == names[1] == ["body.0.bias", "body.0.weight", "body.1.bias", "body.1.weight"]


def test_what_is_the_ranks_own_is_not_compared() -> None:
    """BatchNorm's statistics come from the rank's own samples."""
    one, other = protected(), protected()
    assert digest_names(collect(one))["buffers"] == {}
    other.modules["model"][1].running_mean.add_(1)  # type: ignore[index]
    other.own["own"]["drawn"] = 4  # type: ignore[index]
    assert kinds(one) == kinds(other)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("model.2.weight", "parameters"),
        ("optimizer.state.model.0.bias.exp_avg", "optimizers"),
        ("optimizer.state.*.step", "optimizers"),
    ],
)
def test_one_flipped_bit_changes_its_kind_and_its_name(pattern: str, kind: str) -> None:
    one, other = protected(), protected()
    flip_bit(other, pattern)
    a, b = (digest_names(collect(held)) for held in (one, other))
    differing = {
        (group, name)
        for group, named in a.items()
        for name in named
        if named[name] != b[group][name]
    }
    assert len(differing) == 1
    assert next(iter(differing))[0] == kind
    assert [key for key in kinds(one) if kinds(one)[key] != kinds(other)[key]] == [kind]
    flip_bit(other, pattern)
    assert kinds(one) == kinds(other)


def test_what_every_vote_compares_is_not_audited() -> None:
    one, other = protected(), protected()
    other.optimizers["optimizer"].param_groups[0]["lr"] = 2e-3
    other.schedules["scheduler"].last_epoch = 7  # type: ignore[attr-defined]
    assert kinds(one) == kinds(other)


def test_another_order_of_ddps_buckets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = protected(), protected()
    layouts = ([[0, 1], [2]], [[1, 0], [2]])  # of the same sizes
    for held, buckets in zip((one, other), layouts, strict=True):
        state = BucketState(sync=True, buckets=buckets)
        monkeypatch.setattr(held.reducers, "states", lambda state=state: [state])
    assert [k for k in kinds(one) if kinds(one)[k] != kinds(other)[k]] == ["buckets"]


@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=200), bit=st.integers(0, 200 * 8 - 1)
)
def test_a_devices_sum_finds_every_flipped_bit(values: list[int], bit: int) -> None:
    """Computed on the CPU here: the arithmetic is a device's."""
    one = torch.tensor(values, dtype=torch.uint8)
    other = one.clone()
    index, place = divmod(bit % (8 * len(values)), 8)
    other[index] ^= 1 << place
    assert weighted_sum(one) == weighted_sum(one.clone())
    assert weighted_sum(one) != weighted_sum(other)


def test_a_devices_sum_knows_order_and_length() -> None:
    values = torch.arange(100, dtype=torch.float32)
    assert weighted_sum(values) != weighted_sum(values.flip(0))
    zeros = torch.zeros(8), torch.zeros(16)
    assert weighted_sum(zeros[0]) != weighted_sum(zeros[1])


def test_a_range_of_a_tensor_has_the_digest_of_its_copy() -> None:
    values = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    for tensor in (values, values.t()):
        flat = tensor.contiguous().reshape(-1)
        for start, end in ((0, 60), (7, 19), (55, 90), (60, 70), (0, 0)):
            assert word_of(tensor, start, end) == word_of(flat[start:end].clone())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64]
)
def test_any_type_and_layout_has_a_digest(dtype: torch.dtype) -> None:
    plain = torch.arange(35).reshape(5, 7).to(dtype)
    turned = plain.t().contiguous().t()
    assert digests([plain]) == digests([turned])
    assert weighted_sum(plain) == weighted_sum(turned)
    assert digests([plain[:0]]) == digests([plain[:0].clone()])
