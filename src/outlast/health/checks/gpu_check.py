"""Check of GPUs by their driver: count, memory, throttling, links, leftovers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from outlast.health.check_contract import Check, CounterReading, JudgeContext, Observation, Probe
from outlast.health.check_settings import CheckSettings
from outlast.health.check_settings import GpuSettings as Wanted
from outlast.health.checks.gpu_probe import (
    Gpu,
    GpusSample,
    LeftoversSample,
    NvLink,
    take,
    take_leftovers,
)
from outlast.log_records import Severity, Symptom

HOUR_S = 3600.0
IDLE = 0x1
SLOWED: dict[int, tuple[str, Severity]] = {
    0x08: ("clocks throttled by the hardware", "drain"),
    0x20: ("clocks throttled by the driver: too hot", "warn"),
    0x40: ("clocks throttled by the hardware: too hot", "drain"),
    0x80: ("clocks throttled by the hardware: too little power", "drain"),
}
"""NVML's bits of clock throttle reasons. 0x08 is also set with a more specific one."""
FABRIC_READY = (0, 3)  # not supported, completed
ON_BUS = "gpu|on bus"


def counts(sample: GpusSample) -> Iterable[CounterReading]:
    """Yield the counters that are remembered: GPUs on the bus, uncorrected and NVLink errors."""
    yield CounterReading(ON_BUS, sample.on_bus)
    for gpu in sample.gpus:
        if gpu.uncorrected_ever is not None:
            yield CounterReading(_key(gpu, "uncorrected"), gpu.uncorrected_ever)
        for link in gpu.nvlinks:
            if link.errors is not None:
                yield _link_count(gpu, link)


def _link_count(gpu: Gpu, link: NvLink) -> CounterReading:
    return CounterReading(_key(gpu, f"nvlink {link.number}"), link.errors or 0)


def _key(gpu: Gpu, counter: str) -> str:
    """Return a counter's key, by the card's UUID where the driver reports it."""
    return f"gpu|{gpu.uuid or gpu.pci or gpu.index}|{counter}"


def judge(sample: GpusSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge the number of GPUs, the driver version and each GPU."""
    wanted = about.settings.gpus
    expected = sample.on_bus if wanted.count is None else wanted.count
    before = max((value for _, value in about.memory.counters.get(ON_BUS, ())), default=0)
    if wanted.count is None and sample.on_bus < before:
        text = f"{sample.on_bus} on the PCI bus, and {before} at an earlier check"
        yield Observation("now", text, symptom="gpu-unavailable")
    if sample.on_bus < expected:
        text = f"{sample.on_bus} on the PCI bus, {expected} are expected"
        yield Observation("now", text, symptom="gpu-unavailable")
    if sample.trouble:
        yield Observation("unknown", sample.trouble, symptom="gpu-driver")
        return
    if len(sample.gpus) < expected <= sample.on_bus:
        text = f"the driver reports {len(sample.gpus)}, {expected} are expected"
        yield Observation("now", text, symptom="gpu-unavailable")
    if wanted.driver and sample.driver != wanted.driver:
        text = f"driver {sample.driver}, {wanted.driver} is expected"
        yield Observation("drain", text, symptom="gpu-driver")
    links = _links_expected(sample, wanted)
    for gpu in sample.gpus:
        found = [*_judge_gpu(gpu, about, links)]
        for observed in found or [Observation("healthy", _describe_healthy(gpu))]:
            yield observed._replace(device=gpu.pci or f"GPU {gpu.index}")


def _links_expected(sample: GpusSample, wanted: Wanted) -> int:
    """Return the configured number of NVLinks, or that of most of the node's GPUs."""
    if wanted.nvlinks is not None:
        return wanted.nvlinks
    active = Counter(sum(link.active for link in gpu.nvlinks) for gpu in sample.gpus)
    return max(active, key=lambda many: (active[many], many), default=0)


def _judge_gpu(gpu: Gpu, about: JudgeContext, links: int) -> Iterator[Observation]:
    wanted = about.settings.gpus
    if gpu.lost:
        yield Observation("now", "lost: it fell off the bus", symptom="gpu-unavailable")
        return
    if wanted.name and gpu.name != wanted.name:
        yield Observation("drain", f"is a {gpu.name}; a {wanted.name} is expected")
    yield from _memory(gpu, about)
    yield from _heat(gpu, wanted)
    yield from _bus(gpu, wanted)
    yield from _nvlinks(gpu, about, links)
    for what, why in gpu.unread.items():
        yield Observation("unknown", f"{what}: {why}", symptom="gpu-driver")


def _memory(gpu: Gpu, about: JudgeContext) -> Iterator[Observation]:
    wanted = about.settings.gpus
    symptom = "gpu-memory"
    if gpu.ecc is False:
        yield Observation("warn", "error correction is off", symptom=symptom)
    if gpu.uncorrected:
        text = f"{gpu.uncorrected} uncorrected errors since the driver was loaded"
        yield Observation("drain", text, symptom=symptom)
    if gpu.uncorrected_ever is not None:
        count = CounterReading(_key(gpu, "uncorrected"), gpu.uncorrected_ever)
        new = about.since(count, about.settings.flaps.window_s)
        if new and not gpu.uncorrected:
            yield Observation("drain", f"{new} new uncorrected errors", symptom=symptom)
    if gpu.remap_failed:
        yield Observation("drain", "a row could not be remapped: replace it", symptom=symptom)
    if gpu.remap_pending:
        yield Observation("drain", "a row remapping is pending: reset it", symptom=symptom)
    if gpu.retirement_pending:
        yield Observation("drain", "a page retirement is pending: reset it", symptom=symptom)
    for what, many, most in (
        ("remapped rows", gpu.remapped, wanted.remapped_rows_max),
        ("retired pages", gpu.retired_pages, wanted.retired_pages_max),
    ):
        if many is not None and many >= most:
            text = f"{many} {what}: replace it (limit {most})"
            yield Observation("drain", text, symptom=symptom)


def _heat(gpu: Gpu, wanted: Wanted) -> Iterator[Observation]:
    for what, now_c, most_c in (
        ("", gpu.temperature_c, wanted.hot_c),
        ("its memory: ", gpu.memory_c, wanted.memory_hot_c),
    ):
        if now_c is not None and now_c >= most_c:
            yield Observation(
                "warn", f"{what}{now_c} C, below {most_c} is expected", symptom="thermal"
            )
    bits = gpu.held_back or 0
    exact = [bit for bit in SLOWED if bits & bit and bit != 0x08]
    for bit in exact or [0x08] * bool(bits & 0x08):
        text, severity = SLOWED[bit]
        yield Observation(severity, text, symptom="thermal")


def _bus(gpu: Gpu, wanted: Wanted) -> Iterator[Observation]:
    width = wanted.pcie_width or gpu.width_max
    if gpu.width is not None and width is not None and gpu.width < width:
        yield Observation("drain", f"PCIe x{gpu.width}, x{width} is expected", symptom="pcie")
    if gpu.speed is None or gpu.speed_max is None or gpu.speed >= gpu.speed_max:
        return
    if gpu.held_back is None or not gpu.held_back & IDLE:  # an idle GPU may save power
        text = f"PCIe generation {gpu.speed}, {gpu.speed_max} is expected"
        yield Observation("drain", text, symptom="pcie")


def _nvlinks(gpu: Gpu, about: JudgeContext, expected: int) -> Iterator[Observation]:
    symptom: Symptom = "nvlink"
    active = sum(link.active for link in gpu.nvlinks)
    if active < expected:
        down = ", ".join(str(link.number) for link in gpu.nvlinks if not link.active)
        which = f" (down: {down})" if down else ""
        yield Observation("now", f"{active} of {expected} NVLinks are up{which}", symptom=symptom)
    for link in gpu.nvlinks:
        new = None if link.errors is None else about.since(_link_count(gpu, link), HOUR_S)
        if new is not None and new > about.settings.links.errors_per_hour:
            text = f"NVLink {link.number}: {new} errors in the last hour"
            yield Observation("warn", text, symptom=symptom)
    if gpu.fabric_state is not None and gpu.fabric_state not in FABRIC_READY:
        text = "it has not joined the NVLink fabric: check the fabric manager"
        yield Observation("now", text, symptom=symptom)
    elif gpu.fabric_status:
        yield Observation("now", f"the NVLink fabric failed ({gpu.fabric_status})", symptom=symptom)


def _describe_healthy(gpu: Gpu) -> str:
    heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} C"
    if gpu.power_w is not None and gpu.power_limit_w is not None:
        heat += f", {gpu.power_w:.0f} of {gpu.power_limit_w:.0f} W"
    links = sum(link.active for link in gpu.nvlinks)
    return f"{gpu.name}{heat}" + (f", {links} NVLinks" if links else "")


def judge_leftovers(sample: LeftoversSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge processes on the GPUs after a job that had the node exclusively: none may remain."""
    found = False
    for gpu, processes in sample.on.items():
        others = [one for one in processes if one.name not in about.settings.gpus.allowed]
        if others:
            found = True
            names = ", ".join(f"{one.name or '?'} ({one.pid})" for one in others[:5])
            yield Observation("drain", f"{len(others)} leftover processes: {names}", gpu)
    if not sample.on:
        yield Observation("unknown", "no GPU could be queried for its processes")
    elif not found:
        yield Observation("healthy", f"no process on {len(sample.on)} GPUs")


def _probes(settings: CheckSettings) -> Iterable[Probe[GpusSample]]:
    yield Probe("", partial(take, settings.gpus.count), settings.gpus.deadline_s)


def _leftover_probes(settings: CheckSettings) -> Iterable[Probe[LeftoversSample]]:
    yield Probe("", partial(take_leftovers, settings.gpus.count), settings.gpus.deadline_s)


CHECK = Check("gpu", "other", GpusSample, _probes, judge, counts)
LEFTOVER = Check("leftover", "services", LeftoversSample, _leftover_probes, judge_leftovers)
