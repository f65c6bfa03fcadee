"""Saved and restored bits of tensors of every kind."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.save.engine_trainer import DEADLINE_S, Trainer, trainer

from outlast.checkpoint.format.manifests import ITEM_BYTES
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.errors import MismatchError

__all__ = ["trainer"]
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """One for many examples: each is another set of tensors, and so another plan."""
    trainer = Trainer(tmp_path_factory.mktemp("steady"))
    yield trainer
    trainer.engine.close(DEADLINE_S)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


DTYPES = [getattr(torch, name) for name in ITEM_BYTES if name != "complex32"]
VIEWS = ("as it is", "transposed", "every other", "expanded", "tied")


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Random bits, NaNs of every kind among them, of every type and many shapes."""
    tensors: dict[str, torch.Tensor] = {}
    for number in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        top = 1 if dtype == torch.bool else 255
        size = math.prod(shape) * dtype.itemsize
        data = draw(st.lists(st.integers(0, top), min_size=size, max_size=size))
        tensor = torch.tensor(data, dtype=torch.uint8).view(dtype).view(shape)
        match draw(st.sampled_from(VIEWS)):
            case "transposed" if shape:
                tensor = tensor.transpose(0, -1)
            case "every other" if shape:
                tensor = tensor[::2]
            case "expanded":
                tensor = tensor.expand(2, *shape)
            case "tied" if tensors:
                tensor = draw(st.sampled_from(list(tensors.values())))
        tensors[draw(st.sampled_from(["w", "é.", "a/b", ""])) + str(number)] = tensor
    return tensors


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=states())
def test_any_tensors_come_back_bit_for_bit(
    steady: Trainer, tensors: dict[str, torch.Tensor]
) -> None:
    reader = steady.save(tensors)
    found = {
        name: torch.empty_strided(value.shape, value.contiguous().stride(), dtype=value.dtype)
        for name, value in tensors.items()
    }
    SaveEngine.read(reader, found)
    assert {n: bits(v) for n, v in found.items()} == {n: bits(v) for n, v in tensors.items()}
    assert reader.checkpoint.tensors.keys() == tensors.keys()
    assert (reader.blob(0, "shared"), reader.blob(0, "own")) == (b"s", b"o")


def test_complex_halves_come_back(trainer: Trainer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ComplexHalf; torch warns once per process
        value = torch.empty(3, dtype=torch.complex32)
    value.view(torch.int32).copy_(torch.tensor([1, -2, 3]))
    found = value.clone()
    found.view(torch.int32).zero_()
    SaveEngine.read(trainer.save({"z": value}), {"z": found})
    assert found.view(torch.int32).tolist() == [1, -2, 3]


def test_everything_that_does_not_fit_is_listed_and_nothing_touched(trainer: Trainer) -> None:
    reader = trainer.save({name: torch.ones(3) for name in ("a", "b", "c", "d")})
    into = {
        "a": torch.zeros(4),
        "b": torch.zeros(3, dtype=torch.float64),
        "c": torch.zeros(3),
        "d": torch.zeros(3),
        "e": torch.zeros(3),
    }
    with pytest.raises(MismatchError) as caught:
        SaveEngine.read(reader, into)
    assert str(caught.value).splitlines()[1:] == [
        "  a: has shape (3,) there, (4,) here",
        "  b: is float32 there, float64 here",
        "  e: is not in the checkpoint",
    ]
    assert not any(value.any() for value in into.values())


def test_tensors_are_filled_where_they_are(trainer: Trainer) -> None:
    """Parameters, strides of all kinds, and what has to be filled from a copy."""
    value = torch.randn(4, 6, dtype=torch.complex64)
    names = ("parameter", "transposed", "every other", "conjugate")
    reader = trainer.save(dict.fromkeys(names, value))
    parameter = torch.nn.Parameter(torch.zeros_like(value))
    wide = torch.zeros(8, 6, dtype=value.dtype)
    into = {
        "parameter": parameter,
        "transposed": torch.zeros(6, 4, dtype=value.dtype).t(),
        "every other": wide[::2],
        "conjugate": torch.zeros_like(value).conj(),
    }
    SaveEngine.read(reader, into)
    assert all(torch.equal(found, value) for found in into.values())
    assert parameter.is_leaf and parameter.requires_grad and not wide[1::2].any()
