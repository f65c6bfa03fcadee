"""Places and workers that an injected fault (`--fault`) strikes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

from outlast.controller.fault_spec import FaultSpec, parse
from outlast.worker.injected_faults import InjectedError, InjectedFaults
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents


class Place:
    """A worker that has committed `step` steps, on seat 0."""

    def __init__(self, markers: Path, *specs: FaultSpec) -> None:
        self.step = 0
        self.resets = 0
        self.flipped: list[str] = []
        self.slowed: list[tuple[int, float]] = []
        self.faults = InjectedFaults(
            list(specs),
            markers,
            WorkerEvents(None, "w"),
            self,
        )
        self.faults.seat = 0

    def progress(self) -> tuple[int, int]:
        return self.step, self.step

    def is_real(self) -> bool:
        return True

    def is_in_phase(self) -> bool:
        return True

    def cut_connections(self) -> None:
        self.resets += 1

    def flip_bit(self, spec: FaultSpec) -> None:
        self.flipped.append(spec.tensor)

    def slow_down(self, factor: float) -> None:
        self.slowed.append((self.step + 1, factor))


def test_the_next_checkpoint_from_there_on_fails_once(tmp_path: Path) -> None:
    place = Place(tmp_path, parse("full:step=10"))
    place.step = 9
    place.faults.reach("checkpoint")
    place.step = 12
    place.faults.reach("forward")
    with pytest.raises(OSError, match="full:step=10") as caught:
        place.faults.reach("checkpoint")
    assert caught.value.errno == errno.ENOSPC
    place.faults.reach("checkpoint")


def test_a_step_is_hit_while_it_is_made_and_what_follows_it_afterwards(tmp_path: Path) -> None:
    place = Place(tmp_path, parse("reset:step=3"), parse("reset:step=3,phase=between"))
    struck = []
    for place.step in range(6):
        for where in ("between", "forward", "forward"):
            before = place.resets
            place.faults.reach(where)
            if place.resets > before:
                struck.append((place.step, where))
    assert struck == [(2, "forward"), (3, "between")]


def test_another_worker_of_the_run_knows_what_has_struck(tmp_path: Path) -> None:
    for struck in (1, 1, 0):
        place = Place(tmp_path, parse("reset:times=2"))
        place.faults.reach("forward")
        assert place.resets == struck


def test_the_spare_that_is_named_is_hit_and_no_other(tmp_path: Path) -> None:
    place = Place(tmp_path, FaultSpec(text="raise:spare=1", kind="raise", spare=1))
    for other in (-1, 0, 2):
        place.faults.warm(other)
    place.faults.reach("forward")
    with pytest.raises(InjectedError):
        place.faults.warm(1)


def test_faults_of_the_launcher_are_ignored_in_workers(tmp_path: Path) -> None:
    place = Place(tmp_path, FaultSpec(text="reset:after=3", kind="reset", after_s=3.0))
    place.faults.reach("forward")
    place.faults.warm(-1)
    assert place.resets == 0


def test_a_flip_comes_once_after_the_commit(tmp_path: Path) -> None:
    place = Place(tmp_path, parse("flip:rank=0,step=3,tensor=model.0.*"))
    place.step = 3
    for where in ("forward", "backward", "apply", "done", "committed", "committed"):
        place.faults.reach(where)
    assert place.flipped == ["model.0.*"]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_parts_of_a_container_that_is_never_called_are_struck(tmp_path: Path, phase: str) -> None:
    place = Place(tmp_path, parse(f"raise:step=1,phase={phase}"))
    inner = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2))})
    container = nn.ModuleList([inner])
    place.faults.watch_state(ProtectedState({"layers": container}, {}), lambda: True)
    with pytest.raises(InjectedError):
        inner["b"](torch.ones(1, 2)).sum().backward()


def test_a_rank_is_slow_from_a_step_on_in_one_worker_alone(tmp_path: Path) -> None:
    place = Place(tmp_path, parse("slow:rank=0,step=3,factor=1.5"))
    successor = Place(tmp_path, parse("slow:rank=0,step=3,factor=1.5"))
    for place.step in range(5):
        place.faults.reach("forward")
        place.faults.reach("forward")
        place.faults.reach("backward")
    assert place.slowed == [(3, 1.5), (4, 1.5), (5, 1.5)], "once a step"
    for successor.step in range(5, 8):
        successor.faults.reach("forward")
    assert successor.slowed == []


@pytest.mark.parametrize("cause", ["once", "device", "data"])
def test_a_poisoned_gradient_has_left_its_marker(tmp_path: Path, cause: str) -> None:
    """Else the launcher notes that the fault did not strike."""
    spec = parse(f"nan:step=3,cause={cause}")
    place = Place(tmp_path, spec)
    place.step = 2
    place.faults.reach("backward")
    place.faults.reach("backward")
    assert (tmp_path / spec.marker(0)).exists()


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:DeprecationWarning")
def test_a_protected_module_of_torchscript_is_no_place_of_a_fault(tmp_path: Path) -> None:
    place = Place(tmp_path, parse("raise:rank=0,step=1,phase=forward"))
    scripted: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    place.faults.watch_state(ProtectedState({"scripted": scripted}, {}), lambda: True)
    assert scripted(torch.ones(1, 2)).shape == (1, 2)


class NamedOutputs(nn.Module):
    """A model whose output is a dict, as in Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x)
        return {"loss": found.sum(), "logits": found}


def test_a_nan_strikes_a_model_with_named_outputs(tmp_path: Path) -> None:
    place = Place(tmp_path, parse("nan:step=1,phase=forward"))
    model = NamedOutputs()
    place.faults.watch_model(model, lambda: True)
    assert model(torch.ones(1, 1))["loss"].isnan()
