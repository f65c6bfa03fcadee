"""Code that can write weights past torch's version counters, found in bytecode."""

from __future__ import annotations

import importlib
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outlast.worker.script import unversioned_writes
from outlast.worker.script.reachable_values import ReachableValues
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.script.unversioned_writes import can_write_unversioned, writes_unversioned
from outlast.worker.script.value_fingerprints import identities
from outlast.worker.state.protected_state import ProtectedState


@pytest.mark.parametrize(
    ("source", "writes"),
    [
        ("p.data.add_(1)", True),
        ("p.data[0] = 1", True),
        ("p.data = q", True),
        ("w = p.data", True),
        ("p.data.copy_(q)", True),
        ("p.data.clamp_(-1, 1)", True),
        ("nn.init.zeros_(p.data)", True),
        ("p.detach().numpy()[0] = 1", True),
        ("np.asarray(p)[0] = 1", True),
        ("setattr(p, 'data', q)", True),
        ("getattr(p, 'data').add_(1)", True),
        ("vector_to_parameters(vector, model.parameters())", True),
        ("p.untyped_storage().copy_(q)", True),
        ("p.grad.data.zero_()", False),
        ("loss = x.data.item()", False),
        ("before = p.data.clone()", False),
        ("n = p.data.norm()", False),
        ("data = batch['data']", False),
        ("p.add_(1); p.detach().add_(1)", False),
    ],
)
def test_detection_of_unversioned_writes_in_code(source: str, writes: bool) -> None:
    assert writes_unversioned(compile(source, "script", "exec")) is writes


def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> types.ModuleType:
    """Import a library's module from a folder of site-packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_ema.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("somebodys_ema")


@pytest.fixture
def ema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    source = """
        from torch import nn

        class EMA:
            def __init__(self, model):
                self.model, self.shadow = model, [p.detach().clone() for p in model.parameters()]

            def update(self):
                for old, p in zip(self.shadow, self.model.parameters()):
                    old.mul_(0.9).add_(p.detach(), alpha=0.1)

            def copy_to(self):
                _copy(self.shadow, self.model)

        def _copy(values, model):
            for value, p in zip(values, model.parameters()):
                p.data.copy_(value)

        class Expiring(nn.Linear):
            def _init_weights(self):
                self.weight.data.normal_()

            def expire(self):
                self.weight.data[0] = 0

            def forward(self, x):
                if self.training:
                    self.expire()
                return super().forward(x)

        class Plain(nn.Linear):
            def _init_weights(self):
                self.weight.data.normal_()

            def forward(self, x):
                return super().forward(x)
    """
    yield library(tmp_path, monkeypatch, source)
    sys.modules.pop("somebodys_ema")


def can(
    source: str, ema: types.ModuleType, model: nn.Module | None = None, *, protected: bool = False
) -> bool:
    plain = model or nn.Linear(2, 2)
    average = ema.EMA(plain)
    reach = ReachableValues({id(average)} if protected else set())
    reach.add((("module", "script"), ("name", "ema")), average)
    reach.add_code(compile(source, "script", "exec"), {})
    reach.walk()
    return can_write_unversioned(reach, plain.modules())


def test_a_librarys_methods_count_where_the_script_names_them(ema: types.ModuleType) -> None:
    for protected in (False, True):
        assert can("ema.copy_to()", ema, protected=protected)
        assert not can("ema.update()", ema, protected=protected)


def test_more_code_than_is_read_counts_as_code_that_can_write(
    ema: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unversioned_writes, "_CODES_MAX", -1)
    assert can("ema.update()", ema)


def test_a_librarys_layer_counts_by_what_its_forward_reaches(ema: types.ModuleType) -> None:
    assert can("model(x)", ema, nn.Sequential(ema.Expiring(2, 2)))
    assert not can("model(x)", ema, nn.Sequential(ema.Plain(2, 2)))


def test_a_hook_counts(ema: types.ModuleType) -> None:
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda *_: model.weight.data.clamp_(-1, 1) and None)
    assert can("model(x)", ema, model)
    other = nn.Linear(2, 2)
    other.register_forward_pre_hook(lambda _module, _: None)
    assert not can("model(x)", ema, other)


class OwnOptimizer(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


MODEL = nn.Linear(2, 2)
OPTIMIZER = OwnOptimizer(MODEL.parameters(), lr=0.1)


class OwnModel(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.reset()

    def reset(self) -> None:
        self.weight.data.uniform_(-1, 1)

    def clip(self) -> None:
        self.weight.data.clamp_(-1, 1)

    @property
    def clipped(self) -> torch.Tensor:
        self.clip()
        return self.weight


OWN = OwnModel()
CALLBACKS = [OWN.clip]


def step_of_own(x: torch.Tensor) -> None:
    OWN(x).sum().backward()


def step_with_clip(x: torch.Tensor) -> None:
    OWN(x).sum().backward()
    OWN.clip()


def step_with_property(x: torch.Tensor) -> None:
    (OWN.clipped @ x).sum().backward()


def step_with_callbacks(x: torch.Tensor) -> None:
    OWN(x).sum().backward()
    for call in CALLBACKS:
        call()


def clipped_step(x: torch.Tensor) -> None:
    MODEL(x).sum().backward()
    helper(MODEL)
    OPTIMIZER.step()


def helper(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-1, 1)


def plain_step(x: torch.Tensor) -> None:
    MODEL(x).sum().backward()
    OPTIMIZER.step()


def test_a_phase_counts_by_all_that_it_reaches_but_an_optimizers_step() -> None:
    held = ProtectedState({"model": MODEL, "own": OWN, "optimizer": OPTIMIZER}, {})
    script = ScriptVariables(lambda: identities(held), "stop", lambda *_, **__: None)
    for function, expected in (
        (clipped_step, True),
        (plain_step, False),
        (step_of_own, False),  # its constructor alone names `reset`
        (step_with_clip, True),
        (step_with_property, True),
        (step_with_callbacks, True),
    ):
        script.begin_phase(function.__name__, function)
        assert script.writes_unversioned(function.__name__, held.tree) is expected
