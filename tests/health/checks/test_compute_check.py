"""Compute check: errors in matrix products are found, and this machine passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.health.judged_samples import about, said, severities

from outlast.health.check_contract import AbsentError, ToolError
from outlast.health.check_settings import CheckSettings, RingSettings, parse_settings
from outlast.health.checks import compute_check, neighbour_check
from outlast.health.checks.compute_check import (
    CHECK,
    ComputeDevice,
    ComputeSample,
    compute_products,
    product_is_right,
)


def one(wrong: int = 0, tflops: float = 400.0) -> ComputeSample:
    return ComputeSample(
        devices=(ComputeDevice(name="cuda:0", products=4, wrong=wrong, tflops=tflops),)
    )


def test_products_are_judged() -> None:
    assert severities(CHECK, one(), about()) == ["healthy"]
    assert severities(CHECK, one(), about(compute={"tflops_min": 300})) == ["healthy"]
    assert severities(CHECK, one(), about(compute={"tflops_min": 500})) == ["drain"]
    assert said(CHECK, one(wrong=1), about())[0][0] == "now"
    assert severities(CHECK, ComputeSample(devices=()), about()) == ["unknown"]


def test_this_machine_computes_right() -> None:
    torch = pytest.importorskip("torch")
    sample = compute_products("cpu")
    (device,) = sample.devices
    assert device.name == "cpu" and device.wrong == 0 and device.tflops > 0
    if not torch.cuda.is_available():
        assert compute_products("cuda").devices == ()


def test_a_gpu_that_torch_does_not_see_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compute_check, "on_bus", lambda: 8)
    assert compute_products("auto").devices == ()
    assert compute_products("cpu").devices[0].name == "cpu", "where the settings say so"


def test_a_configured_check_without_torch_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compute_check, "find_spec", lambda _: None)
    monkeypatch.setattr(neighbour_check, "find_spec", lambda _: None)
    (bare,) = CHECK.probes(CheckSettings())
    (asked,) = CHECK.probes(parse_settings({"compute": {"tflops_min": 100}}, "t"))
    with pytest.raises(AbsentError):
        bare.take()
    with pytest.raises(ToolError, match="torch is not installed"):
        asked.take()
    with pytest.raises(AbsentError):
        neighbour_check.take(RingSettings())
    with pytest.raises(ToolError, match="torch is not installed"):
        neighbour_check.take(RingSettings(address="a:1", world=2))


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
