"""A short product of matrices on each device: right to the last bit, and fast enough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from outlast.health.contract import About, Check, Probe, Said, Sample
from outlast.health.settings import Compute, Settings

DEADLINE_S = 120.0


class Device(Sample, frozen=True):
    """`wrong`: of `products` those that were not the exact one."""

    name: str
    products: int
    wrong: int
    tflops: float


class Products(Sample, frozen=True):
    devices: tuple[Device, ...]


def judge(sample: Products, about: About) -> Iterator[Said]:
    least = about.settings.compute.tflops_min
    for one in sample.devices:
        symptom = "cpu" if one.name == "cpu" else "gpu-memory"
        speed = f"{one.tflops:.3g} TFLOP/s"
        if one.wrong:
            text = f"{one.wrong} of {one.products} products are wrong: it computes silently amiss"
            yield Said("now", text, one.name, symptom=symptom)
        elif least is not None and one.tflops < least:
            text = f"{speed}, at least {least:g} is expected"
            yield Said("drain", text, one.name, symptom="thermal")
        else:
            yield Said("healthy", f"{one.products} products, {speed}", one.name, symptom=symptom)
    if not sample.devices:
        yield Said("unknown", "torch sees none of the GPUs that it should compute on")


def _probes(settings: Settings) -> Iterable[Probe[Products]]:
    from outlast.health.probes.compute import take

    wanted = settings.compute
    yield Probe("", partial(take, wanted.device, wanted != Compute()), DEADLINE_S)


CHECK = Check("matmul", "other", Products, _probes, judge)
