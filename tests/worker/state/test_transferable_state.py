"""State that another worker can take over, and refusal of other state."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outlast.checkpoint.format import codec
from outlast.errors import ProtectError
from outlast.worker.phases.phase_attempt import UndoCopy
from outlast.worker.state.protected_state import ProtectedState, Replicated


@dataclasses.dataclass
class Plan:
    warm: int = 3


class Planned(torch.optim.SGD):
    """Keeps in its groups what cannot be written, once it has stepped."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.param_groups[0]["plan"] = Plan()


def test_state_that_no_worker_could_take_over_is_named_at_protect() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["plan"] = Plan()
    place = r"optimizers\.optimizer\.groups\[0\]\.plan is a .*Plan"
    with pytest.raises(ProtectError, match=place):
        ProtectedState({"model": model, "optimizer": optimizer}, {})
    with pytest.raises(ProtectError, match=r"objects\.notes\[0\]\[1\] is a .*Plan"):
        ProtectedState({"notes": [[1, Plan()]]}, {})


def test_state_that_the_first_step_makes_is_looked_at_too() -> None:
    model = nn.Linear(1, 1)
    optimizer = Planned(model.parameters())
    protected = ProtectedState({"model": model, "optimizer": optimizer}, {})
    protected.completed("warm up")
    protected.check_unchanged()
    optimizer.step()
    protected.completed("step")
    with pytest.raises(ProtectError, match=r"groups\[0\]\.plan"):
        protected.check_unchanged()


def test_what_the_script_holds_of_its_state_stays_the_same_object() -> None:
    state: dict[str, Any] = {
        "history": [1.0, {"deep": [1]}],
        "moment": torch.ones(3),
        "array": np.ones(3),
        "pair": ([1], {2}),
        "often": Counter(a=2),
    }
    history, moment, array, pair = (state[k] for k in ("history", "moment", "array", "pair"))
    deep, often = history[1]["deep"], state["often"]
    undo = UndoCopy(ProtectedState({}, state))
    history.append(2.0)
    deep.append(2)
    moment.add_(1)
    array += 1
    pair[0].append(2)
    pair[1].add(3)
    often.update("ab")
    state["new"] = object()
    undo.put_back()
    assert state.keys() == {"history", "moment", "array", "pair", "often"}
    assert state["history"] is history
    assert history == [1.0, {"deep": [1]}]
    assert history[1]["deep"] is deep
    assert state["moment"] is moment
    assert torch.equal(moment, torch.ones(3))
    assert state["array"] is array
    assert array.tolist() == [1.0] * 3
    assert state["pair"] is pair
    assert pair == ([1], {2})
    assert state["often"] is often
    assert often == Counter(a=2)


def test_state_of_another_shape_replaces_what_was_there() -> None:
    state: dict[str, Any] = {"list": [1, 2, 3], "tensor": torch.ones(2), "pair": (1, 2)}
    before = {"list": [1, 2, 3], "tensor": torch.ones(2), "pair": (1, 2)}
    undo = UndoCopy(ProtectedState({}, state))
    state.update(list=[1], tensor=torch.ones(3), pair=(1, [2], 3))
    undo.put_back()
    assert torch.equal(state.pop("tensor"), before.pop("tensor"))
    assert state == before
    state["tensor"] = torch.ones(1).expand(4)
    undo = UndoCopy(ProtectedState({}, state))
    state["tensor"] = torch.zeros(1).expand(4)
    undo.put_back()
    assert torch.equal(state["tensor"], torch.ones(4))


class Meter:
    """Counts how often it is loaded."""

    def __init__(self) -> None:
        self.total, self.loads = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total, self.loads = state["total"], self.loads + 1


def test_what_has_not_changed_is_not_loaded() -> None:
    meter = Meter()
    undo = UndoCopy(ProtectedState({"meter": meter}, {}))
    undo.put_back()
    assert meter.loads == 0
    meter.total = 5
    undo.put_back()
    assert (meter.total, meter.loads) == (0, 1)


def test_state_of_other_names_or_groups_is_refused_and_nothing_is_taken_over() -> None:
    def build(**names: str) -> ProtectedState:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        groups = [{"params": list(part.parameters())} for part in model]
        wide = torch.optim.SGD(groups if "split" in names else model.parameters())
        return ProtectedState({names.get("model", "model"): model, "optimizer": wide}, {})

    here = build()
    before = here.modules["model"].state_dict()["0.weight"].clone()
    with pytest.raises(ProtectError, match=r"saved modules are \['net'\], the script protects"):
        here.adopt(build(model="net").replicated())
    with pytest.raises(ProtectError, match=r"saved with 2 groups of 4 parameters in all"):
        here.adopt(build(split="yes").replicated())
    assert torch.equal(here.modules["model"].state_dict()["0.weight"], before)


class Prompt:
    """Object with a `state_dict` that keeps what it is given."""

    def __init__(self, value: float) -> None:
        self.parts: dict[str, Any] = {
            "soft": nn.Parameter(torch.full((2,), value)),
            "frozen": [nn.Parameter(torch.full((1,), value), requires_grad=False)],
            "leaf": torch.full((3,), value, requires_grad=True),
            "plain": torch.full((3,), value),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.parts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts = state


def flags(parts: dict[str, Any]) -> list[tuple[float, type, bool]]:
    tensors = [parts["soft"], parts["frozen"][0], parts["leaf"], parts["plain"]]
    return [(t.detach().sum().item(), type(t), t.requires_grad) for t in tensors]


@pytest.mark.parametrize("kind", ["object", "dict", "replicated"])
def test_parameters_in_an_object_still_require_gradients(kind: str) -> None:
    """In a redo, and in a successor, whose object is another one or has none of the tensors yet."""

    def protect(parts: dict[str, Any]) -> tuple[ProtectedState, Prompt]:
        prompt = Prompt(0.0)
        prompt.parts = parts
        value = {"object": prompt, "dict": parts, "replicated": Replicated(prompt)}[kind]
        return ProtectedState({"prompt": value}, {}), prompt

    one, prompt = protect(Prompt(1.0).parts)
    expected = flags(prompt.parts)
    own, staged = one.own_choices(), codec.encode(one.replicated())
    changed = Prompt(2.0).parts
    changed["soft"].requires_grad_(requires_grad=False)
    for parts in (changed, {}) if kind != "replicated" else (changed,):
        other, prompt = protect(dict(parts))
        if kind == "replicated":
            other.adopt(codec.decode(staged))
        else:
            other.restore_choices(codec.decode(own))
        adopted: Any = other.own["prompt"] if kind == "dict" else prompt.parts
        assert flags(adopted) == expected
    held = one.own.get("prompt")
    undo = UndoCopy(one)
    if isinstance(held, dict):
        soft = held["soft"]
        with torch.no_grad():
            soft.add_(1)
        soft.requires_grad_(requires_grad=False)
        undo.put_back()
        assert held["soft"] is soft and flags(held) == expected


def test_a_module_is_given_directly_and_not_as_replicated() -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))
    with pytest.raises(ProtectError, match=r"give session\.protect the module itself"):
        Replicated(average)
