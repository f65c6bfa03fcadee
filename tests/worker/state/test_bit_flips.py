"""Bits that `--fault flip` changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outlast.controller.fault_spec import parse
from outlast.errors import ConfigError
from outlast.worker.state.bit_flips import flip, flip_bit
from outlast.worker.state.protected_state import ProtectedState


def stepped() -> ProtectedState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    return ProtectedState({"model": model, "optimizer": optimizer}, {})


def changed(spec: str) -> list[tuple[str, int]]:
    """Return the tensors that a flip changes, and the bits, as numbers of int32 words."""
    one, other = stepped(), stepped()
    flip(other, parse(spec))
    found = []
    for name, tensor, there in [
        (prefix + name, get(p), get(q))
        for (name, p), (_, q) in zip(one.audited, other.audited, strict=True)
        for prefix, get in (
            ("", lambda x: x.detach()),
            ("grad ", lambda x: x.grad),
            ("exp_avg ", None),
        )
        if get is not None
    ]:
        difference = tensor.view(torch.int32) ^ there.view(torch.int32)
        found += [(name, int(word)) for word in difference.flatten() if word]
    return found


def test_one_bit_of_a_parameter_flips() -> None:
    assert changed("flip:tensor=model.0.bias,bit=37") == [("model.0.bias", 1 << 5)]


@pytest.mark.parametrize("pattern", ["model.1.weight", "model.1.weight.grad", "*1.w*"])
def test_one_bit_of_a_reduced_gradient_flips(pattern: str) -> None:
    spec = f"flip:tensor={pattern},bit=30,phase=reduced"
    assert changed(spec) == [("grad model.1.weight", 1 << 30)]


def test_a_flip_before_the_reduction_is_in_what_backward_adds() -> None:
    held, plain = stepped(), stepped()
    for each in (held, plain):
        for _, parameter in each.audited:
            parameter.grad = None
    flip(held, parse("flip:tensor=model.0.bias,bit=22,phase=backward"))
    for _ in range(2):
        for each in (held, plain):
            each.modules["model"](torch.ones(3, 8)).sum().backward()
    (one,) = [p.grad for name, p in held.audited if name == "model.0.bias"]
    (other,) = [p.grad for name, p in plain.audited if name == "model.0.bias"]
    assert (one != other).sum() == 1, "once, of one element"


def test_a_tensor_that_is_not_there_and_a_bit_too_many_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.0\.weight"):
        flip(stepped(), parse("flip:tensor=model.7.weight"))
    with pytest.raises(ConfigError, match="has 64 bits here, none is 64"):
        flip(stepped(), parse("flip:tensor=model.1.bias,bit=64"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_any_type_and_layout_has_bits(dtype: torch.dtype) -> None:
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last).to(dtype)
    before = image.clone()
    flip_bit("image", image, 8 * image.element_size())
    assert (image != before).sum() == 1


def test_a_bit_of_a_sparse_gradient_flips() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 4])).sum().backward()
    protected = ProtectedState({"table": table}, {})
    flip(protected, parse("flip:rank=0,step=1,phase=reduced,tensor=table.weight,bit=31"))
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.coalesce().values().flatten().tolist() == [-1.0, 1.0, 1.0, 1.0]
