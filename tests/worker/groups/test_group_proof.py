"""Proof of groups before a job uses them, and refusal of a torch release that breaks them."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from outlast.errors import ConfigError, GroupProofError
from outlast.worker.groups import prove_groups, warn_if_untried
from outlast.worker.groups.device_drivers import NcclDriver, nccl_name
from outlast.worker.groups.gloo_device import GlooDevice
from outlast.worker.groups.rendezvous import meeting_name
from outlast.worker.groups.stable_group import StableGroup
from outlast.worker.groups.work_handles import FinishedWork

DEADLINE_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left() -> Iterator[None]:
    """Other modules fork: a child that collected gloo's objects would crash."""
    yield
    for thread in threading.enumerate():
        if thread.name == "outlast-proof":
            thread.join(DEADLINE_S)
    gc.collect()


def _answer_at_once(group: StableGroup, output: torch.Tensor, *_: Any) -> FinishedWork:
    return FinishedWork([output])


def test_this_torch_passes_and_nothing_is_left_to_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[GlooDevice]] = []
    init = GlooDevice.__init__

    def remember(device: GlooDevice, interface: str) -> None:
        made.append(weakref.ref(device))
        init(device, interface)

    monkeypatch.setattr(GlooDevice, "__init__", remember)
    gc.disable()
    try:
        prove_groups()
        assert len(made) == 2
        assert [device() for device in made] == [None, None]
    finally:
        gc.enable()


def test_the_scripts_default_device_changes_nothing() -> None:
    torch.set_default_device("meta")
    try:
        prove_groups()
    finally:
        torch.set_default_device(None)


def test_a_wrong_sum_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StableGroup, "reduce_scatter_single", _answer_at_once)
    with pytest.raises(GroupProofError, match=r"\[0.0, 0.0\] for reduce_scatter, not \["):
        prove_groups()


def test_a_group_that_cpp_passes_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch whose C++ does not call a group's methods in Python."""
    monkeypatch.setattr(dist, "_broadcast_coalesced", lambda *_: None)
    with pytest.raises(GroupProofError, match=r"for a broadcast from C\+\+, not \[11.0\]"):
        prove_groups()


def test_a_sever_that_wakes_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = GlooDevice.cut
    left: list[tuple[GlooDevice, Any]] = []
    monkeypatch.setattr(GlooDevice, "cut", lambda *known: left.append(known) or 0)
    with pytest.raises(GroupProofError, match=r"did not wake.*; no step was run; install"):
        prove_groups(timeout_s=5.0)
    for device, peers in left:
        cut(device, peers)  # let the operation end, and its threads with it


def test_an_error_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(StableGroup, "broadcast", fail)
    with pytest.raises(GroupProofError, match="raised TypeError: incompatible function arguments"):
        prove_groups()


def test_a_release_that_was_never_tried_warns_by_name() -> None:
    with pytest.warns(UserWarning, match=r"untested on torch 2\.99\.1\+cpu"):
        warn_if_untried("2.99.1+cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untried("2.13.0+cpu")
        warn_if_untried(torch.__version__)


@pytest.mark.parametrize(
    ("ranks", "earlier", "expected"),
    [
        ((0, 1, 2, 3), 0, "ranks 0-3"),
        ((0, 1, 2, 3), 1, "ranks 0-3 #2"),
        ((1,), 0, "ranks 1"),
        ((0, 2), 0, "ranks 0,2"),
        ((2, 0), 0, "ranks 2,0"),
        (tuple(range(0, 400, 4)), 0, "ranks 0-396 of 100 "),
    ],
)
def test_groups_meet_by_their_ranks(ranks: tuple[int, ...], earlier: int, expected: str) -> None:
    name = meeting_name(ranks, earlier)
    assert name == expected or (name.startswith(expected) and len(name) < 64)


@pytest.mark.parametrize(
    ("choice", "has_nccl2", "expected"),
    [("", False, "nccl-legacy"), ("0", True, "nccl-legacy"), ("1", True, "nccl2")],
)
def test_the_nccl_driver_is_chosen_by_name(
    monkeypatch: pytest.MonkeyPatch, choice: str, has_nccl2: bool, expected: str
) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", choice)
    if has_nccl2:
        monkeypatch.setattr(dist, "ProcessGroupNCCL2", object, raising=False)
    assert NcclDriver(nccl_name()).name == expected


def test_nccl2_where_torch_has_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    monkeypatch.delattr(dist, "ProcessGroupNCCL2", raising=False)
    with pytest.raises(ConfigError, match="unset TORCH_DIST_USE_NCCL2"):
        nccl_name()
