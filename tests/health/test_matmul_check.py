"""Products of matrices: an error in one entry is found, and this machine computes right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import about, said, severities

from outlast.health.checks.compute import CHECK, Device, Products
from outlast.health.contract import AbsentError
from outlast.health.probes import compute, neighbours
from outlast.health.probes.asking import ToolError
from outlast.health.probes.compute import computed, product_is_right
from outlast.health.settings import Ring, Settings, settled


def one(wrong: int = 0, tflops: float = 400.0) -> Products:
    return Products(devices=(Device(name="cuda:0", products=4, wrong=wrong, tflops=tflops),))


def test_products_are_judged() -> None:
    assert severities(CHECK, one(), about()) == ["healthy"]
    assert severities(CHECK, one(), about(compute={"tflops_min": 300})) == ["healthy"]
    assert severities(CHECK, one(), about(compute={"tflops_min": 500})) == ["drain"]
    assert said(CHECK, one(wrong=1), about())[0][0] == "now"
    assert severities(CHECK, Products(devices=()), about()) == ["unknown"]


def test_this_machine_computes_right() -> None:
    torch = pytest.importorskip("torch")
    sample = computed("cpu")
    (device,) = sample.devices
    assert device.name == "cpu" and device.wrong == 0 and device.tflops > 0
    if not torch.cuda.is_available():
        assert computed("cuda").devices == ()


def test_a_gpu_that_torch_does_not_see_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compute, "on_bus", lambda: 8)
    assert computed("auto").devices == ()
    assert computed("cpu").devices[0].name == "cpu", "where the settings say so"


def test_where_torch_is_missing_what_was_asked_of_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compute, "find_spec", lambda _: None)
    monkeypatch.setattr(neighbours, "find_spec", lambda _: None)
    (bare,) = CHECK.probes(Settings())
    (asked,) = CHECK.probes(settled({"compute": {"tflops_min": 100}}, "t"))
    with pytest.raises(AbsentError):
        bare.take()
    with pytest.raises(ToolError, match="torch is not installed"):
        asked.take()
    with pytest.raises(AbsentError):
        neighbours.take(Ring())
    with pytest.raises(ToolError, match="torch is not installed"):
        neighbours.take(Ring(address="a:1", world=2))


@given(
    st.integers(0, 15), st.integers(0, 15),
    st.sampled_from([1.0, -1.0, 2.0**20, 0.5, float("nan"), float("inf")]), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=40)
def test_one_wrong_entry_is_found(row: int, column: int, error: float, seed: int) -> None:
    torch = pytest.importorskip("torch")
    random = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, (16, 16), generator=random).float() for _ in range(2))
    c = a @ b
    assert product_is_right(torch, a, b, c, random)
    c[row, column] += error
    assert not product_is_right(torch, a, b, c, random)
