"""Check of each device by matrix products: exact, and fast enough."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from outlast.config import python_executable
from outlast.health.check_contract import (
    AbsentError,
    Check,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    ToolError,
    run_tool,
)
from outlast.health.check_settings import CheckSettings, ComputeSettings
from outlast.health.checks.gpu_probe import on_bus

DEADLINE_S = 120.0


class ComputeDevice(Sample, frozen=True):
    """Result of one device. `wrong`: number of the `products` that were not exact."""

    name: str
    products: int
    wrong: int
    tflops: float


class ComputeSample(Sample, frozen=True):
    """Results of all devices that torch can use."""

    devices: tuple[ComputeDevice, ...]


def judge(sample: ComputeSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge the products' exactness, and the speed if a minimum is configured."""
    least = about.settings.compute.tflops_min
    for one in sample.devices:
        symptom = "cpu" if one.name == "cpu" else "gpu-memory"
        speed = f"{one.tflops:.3g} TFLOP/s"
        if one.wrong:
            text = f"{one.wrong} of {one.products} products are wrong: silent corruption"
            yield Observation("now", text, one.name, symptom=symptom)
        elif least is not None and one.tflops < least:
            text = f"{speed}, at least {least:g} is expected"
            yield Observation("drain", text, one.name, symptom="thermal")
        else:
            yield Observation(
                "healthy", f"{one.products} products, {speed}", one.name, symptom=symptom
            )
    if not sample.devices:
        yield Observation("unknown", "torch finds none of the expected GPUs")


def _probes(settings: CheckSettings) -> Iterable[Probe[ComputeSample]]:

    wanted = settings.compute
    yield Probe("", partial(take, wanted.device, wanted != ComputeSettings()), DEADLINE_S)


CHECK = Check("matmul", "other", ComputeSample, _probes, judge)


SIZE = {"cpu": 512, "cuda": 8192}
ROUNDS = {"cpu": 4, "cuda": 10}
LARGEST = 8  # of an entry: 8 x 8 x 8192 is far below the 2^24 that float32 counts exactly


def take(device: str, expected: bool) -> ComputeSample:
    """Run the products in a process of their own.

    `device`: auto, cpu or cuda. If torch is not installed, raises ToolError if the settings
    configure this check, else AbsentError.
    """
    if find_spec("torch") is None:
        raise (ToolError if expected else AbsentError)("torch is not installed")
    alone = [python_executable(), "-m", "outlast.health.checks.compute_check", device]
    return msgspec.json.decode(run_tool(alone, within_s=DEADLINE_S), type=ComputeSample)


def compute_products(device: str) -> ComputeSample:
    """Compute the products on each device, in this process."""
    torch = import_module("torch")
    has_cuda = device != "cpu" and torch.cuda.is_available()
    if not has_cuda and (device == "cuda" or (device == "auto" and on_bus())):
        return ComputeSample(devices=())
    places = [f"cuda:{k}" for k in range(torch.cuda.device_count())] if has_cuda else ["cpu"]
    torch.set_float32_matmul_precision("high")  # TF32, where the device has it
    return ComputeSample(devices=tuple(_compute_on(torch, place) for place in places))


def _compute_on(torch: Any, place: str) -> ComputeDevice:
    kind = place.partition(":")[0]
    n = SIZE[kind]
    rounds = ROUNDS[kind]
    random = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-LARGEST, LARGEST + 1, (n, n), generator=random).to(place, torch.float32)
        for _ in range(2)
    )
    wrong = 0
    best_s = float("inf")
    for _ in range(rounds):
        _wait(torch, kind)
        began = time.perf_counter()
        c = a @ b
        _wait(torch, kind)
        best_s = min(best_s, time.perf_counter() - began)
        wrong += not product_is_right(torch, a, b, c, random)
    return ComputeDevice(name=place, products=rounds, wrong=wrong, tflops=2 * n**3 / best_s / 1e12)


def product_is_right(torch: Any, a: Any, b: Any, c: Any, random: Any) -> bool:
    """Return whether c = a b, by Freivalds' algorithm: c x = a (b x) for a random x.

    Computed in integers on the CPU. A wrong entry is missed only if x is 0 there: once in 2^31.
    """
    x = torch.randint(-(2**30), 2**30, (b.shape[1],), generator=random, dtype=torch.int64)
    a, b, c = (each.to("cpu", torch.float64) for each in (a, b, c))
    if not bool(torch.equal(c, c.round())):  # NaN and infinity are not equal to themselves either
        return False
    a, b, c = (each.to(torch.int64) for each in (a, b, c))
    return bool(torch.equal((c * x).sum(1), (a * (b * x).sum(1)).sum(1)))


def _wait(torch: Any, kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(compute_products(sys.argv[1])))
