"""Objects without `state_dict` in `session.protect`."""

from __future__ import annotations

import collections
import enum
import itertools
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from outlast.checkpoint.format import codec
from outlast.errors import ProtectError
from outlast.worker.state.protected_state import ProtectedState


class Meter:
    """A meter of public trainers."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1


@dataclass
class Best:
    loss: float = 9.0
    epochs: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    history: list[int] = field(default_factory=list)


class Numbers(collections.deque[int]):
    """Keeps its elements outside of its attributes."""


class Stage(enum.Enum):
    TRAIN = 1


def change(objects: dict[str, Any]) -> None:
    objects["meter"].sum, objects["meter"].count = 2.5, 4
    objects["meter"].extra = "made later"
    objects["slots"].number = 7
    objects["best"].epochs.append(3)
    objects["frozen"].history.append(3)
    objects["space"].a = [1]
    objects["array"][1] = 5
    objects["tensor"][0] = 5
    objects["names"].add("b")


def test_a_restore_gives_objects_their_values_in_place() -> None:
    best = Best()
    objects: dict[str, Any] = {
        "meter": Meter(), "slots": Slots(), "best": best, "frozen": Frozen(),
        "space": types.SimpleNamespace(a=[]), "array": np.zeros(3), "tensor": torch.zeros(3),
        "names": {"a"},
    }  # fmt: skip
    epochs, array = best.epochs, objects["array"]
    protected = ProtectedState(objects, {})
    before = protected.own_state(protected.own_choices())
    change(objects)
    after = protected.own_state(protected.own_choices())
    protected.restore_own(before)
    assert (objects["meter"].sum, objects["meter"].count) == (0.0, 0)
    assert not hasattr(objects["meter"], "extra")
    assert objects["slots"].number == 1 and objects["frozen"].history == []
    assert best.epochs == [] and best.epochs is epochs
    assert array.tolist() == [0, 0, 0] and objects["tensor"].tolist() == [0, 0, 0]
    assert objects["names"] == {"a"}
    protected.restore_own(after)
    assert best.epochs == [3] and array.tolist() == [0, 5, 0]
    assert objects["meter"].extra == "made later" and objects["space"].a == [1]


def test_lists_of_loaders_and_modules_are_their_parts() -> None:
    loaders = [DataLoader(TensorDataset(torch.ones(4))) for _ in range(2)]
    models = {"maker": torch.nn.Linear(1, 1), "judge": torch.nn.Linear(1, 1)}
    protected = ProtectedState({"loaders": loaders, "models": models}, {})
    assert protected.loaders == loaders
    assert list(protected.modules) == ["models.maker", "models.judge"]


@pytest.mark.parametrize("kind", [dict, list])
def test_meters_are_restored_where_they_stand(kind: type) -> None:
    first, second = Meter(), Best()
    meters = {"loss": first, "best": second} if kind is dict else [first, second]
    protected = ProtectedState({"meters": meters}, {})
    before = protected.own_choices()
    first.sum, second.loss = 3.0, 1.0
    second.epochs.append(4)
    protected.check_unchanged()
    protected.restore_choices(codec.decode(before))
    assert (first.sum, second.loss, second.epochs) == (0.0, 9.0, [])


@pytest.mark.parametrize("deed", ["add", "remove", "replace", "rename"])
def test_a_container_whose_items_change_is_refused_by_name(deed: str) -> None:
    meters: dict[str, Any] = {"loss": Meter(), "acc": Meter()}
    protected = ProtectedState({"meters": meters}, {})
    match deed:
        case "add":
            meters["top5"] = Meter()
        case "remove":
            del meters["acc"]
        case "replace":
            meters["acc"] = Meter()
        case _:
            meters["top1"] = meters.pop("acc")
    with pytest.raises(ProtectError, match=r"meters has .* at protect\(\)"):
        protected.check_unchanged()


def test_two_objects_of_one_name_are_refused() -> None:
    with pytest.raises(ProtectError, match=r"two protected objects have the name 'm\.1'"):
        ProtectedState({"m": {1: Meter(), "1": Meter()}}, {})


@pytest.mark.parametrize("value", [[Stage.TRAIN], [Meter(), 1.0], {"a": Meter(), "b": print}])
def test_a_container_of_other_values_is_refused(value: Any) -> None:
    with pytest.raises(ProtectError, match=r"value|could take over"):
        ProtectedState({"value": value}, {})


@pytest.mark.parametrize(
    "value",
    [itertools.count(), iter([1]), 3, collections.deque([1]), Numbers([1]), (n for n in (1, 2))],
)
def test_what_cannot_be_restored_in_place_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ProtectError, match="cannot protect 'value'"):
        ProtectedState({"value": value}, {})


def test_an_attribute_that_cannot_be_written_is_named() -> None:
    meter = Meter()
    meter.sum = open  # type: ignore[assignment]
    with pytest.raises(ProtectError, match=r"meter\.sum"):
        ProtectedState({"meter": meter}, {})
