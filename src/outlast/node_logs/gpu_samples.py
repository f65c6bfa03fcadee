"""Samples of GPUs, and the findings of values beyond limits."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from outlast.log_records import Finding, Severity, Symptom


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one GPU; None and "" are not in the source.

    Errors and rows are counted since the driver was loaded (volatile), or over the lifetime.
    `silent`: queried fields that this GPU does not have; `broken`: queried fields that returned an
    error, with its text. `rest`: other queried fields as text.
    """

    t_ns: int
    index: int | None = None
    pci: str = ""
    uuid: str = ""
    name: str = ""
    serial: str = ""
    driver: str = ""
    state: str = ""  # P0 at full clocks
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_mib: float | None = None
    memory_used_mib: float | None = None
    busy_percent: float | None = None
    pcie_generation: float | None = None
    pcie_generation_max: float | None = None
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    ecc_on: bool | None = None
    corrected: float | None = None
    uncorrected: float | None = None
    corrected_ever: float | None = None
    uncorrected_ever: float | None = None
    rows_corrected: float | None = None
    rows_uncorrected: float | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_pending: bool | None = None
    hw_slowdown: bool | None = None
    hw_thermal: bool | None = None
    hw_power_brake: bool | None = None
    sw_thermal: bool | None = None
    fabric: str = ""
    recovery: str = ""
    silent: tuple[str, ...] = ()
    broken: dict[str, str] = {}
    rest: dict[str, str] = {}


class GpuLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a healthy GPU.

    `must`: fields that every sample must have; otherwise a missing value is accepted. `gpus`:
    expected number of GPUs.
    """

    temperature_c: float = 90.0
    memory_temperature_c: float = 100.0
    corrected: float | None = None
    rows_uncorrected: float | None = None
    must: Collection[str] = ()
    gpus: int | None = None


Trouble = tuple[Symptom, Severity, str]
FLAGS: dict[str, Trouble] = {
    "remap_failed": ("gpu-memory", "now", "a row could not be remapped"),
    "remap_pending": ("gpu-memory", "drain", "a row is remapped at the next reset"),
    "pages_pending": ("gpu-memory", "drain", "a page is retired at the next reset"),
    "hw_slowdown": ("thermal", "warn", "the hardware slows the clocks"),
    "hw_thermal": ("thermal", "drain", "the hardware slows the clocks: too hot"),
    "hw_power_brake": ("thermal", "drain", "the power supply slows the clocks"),
    "sw_thermal": ("thermal", "warn", "the driver slows the clocks: too hot"),
}
RECOVERIES: dict[str, Severity] = {
    "none": "healthy", "reset": "now", "gpu reset": "now", "reboot": "now", "node reboot": "now",
    "drain p2p": "drain", "drain and reset": "drain",
}  # fmt: skip
FABRIC_UP = {"completed", "success", "healthy"}
FABRIC_COMES = {"in progress", "not started"}
LOST = ("is lost", "requires reset", "fallen off")


def troubles(sample: GpuSample, limits: GpuLimits) -> Iterator[Trouble]:
    """Yield the problems of one GPU, in no order of severity."""
    for field, answer in sample.broken.items():
        lost = any(words in answer.lower() for words in LOST)
        yield "gpu-unavailable", "now" if lost else "unknown", f"{field}: {answer}"
    for field in limits.must:
        if field in sample.silent or getattr(sample, field, None) in (None, ""):
            yield "other", "unknown", f"{field}: not said"
    for field, trouble in FLAGS.items():
        if getattr(sample, field):
            yield trouble
    if sample.uncorrected:
        yield "gpu-memory", "now", f"{sample.uncorrected:.0f} uncorrected memory errors"
    if sample.ecc_on is False:
        yield "gpu-memory", "warn", "memory errors are not corrected: ECC is off"
    yield from _beyond(sample, limits)
    yield from _links(sample)
    if sample.recovery and RECOVERIES.get(sample.recovery.lower(), "unknown") != "healthy":
        severity = RECOVERIES.get(sample.recovery.lower(), "unknown")
        yield "gpu-unavailable", severity, f"the driver asks for: {sample.recovery}"


def _beyond(sample: GpuSample, limits: GpuLimits) -> Iterator[Trouble]:
    watched: tuple[tuple[Symptom, str, float | None, float | None], ...] = (
        ("thermal", "temperature_c", sample.temperature_c, limits.temperature_c),
        ("thermal", "memory_temperature_c", sample.memory_temperature_c,
         limits.memory_temperature_c),
        ("gpu-memory", "corrected", sample.corrected, limits.corrected),
        ("gpu-memory", "rows_uncorrected", sample.rows_uncorrected, limits.rows_uncorrected),
    )  # fmt: skip
    for symptom, name, value, limit in watched:
        if value is not None and limit is not None and value > limit:
            yield symptom, "warn", f"{name} is {value:g}, above {limit:g}"


def _links(sample: GpuSample) -> Iterator[Trouble]:
    width, widest = sample.pcie_width, sample.pcie_width_max
    if width is not None and widest is not None and width < widest:
        yield "pcie", "drain", f"PCIe width is {width:g} of {widest:g}"
    speed, fastest = sample.pcie_generation, sample.pcie_generation_max
    at_work = sample.state == "P0" and bool(sample.busy_percent)  # an idle link slows down
    if speed is not None and fastest is not None and speed < fastest and at_work:
        yield "pcie", "warn", f"PCIe generation is {speed:g} of {fastest:g} at work"
    fabric = sample.fabric.lower()
    if fabric and fabric not in FABRIC_UP:
        severity = "unknown" if fabric in FABRIC_COMES else "drain"
        yield "nvlink", severity, f"fabric: {sample.fabric}"


def findings(
    samples: Collection[GpuSample],
    *,
    cluster: str,
    node: str,
    t_ns: int,
    limits: GpuLimits,
    check: str = "nvidia-smi",
) -> Iterator[Finding]:
    """Yield the problems of one reading of all GPUs.

    Fewer GPUs than expected are a problem too.
    """

    def found(at_ns: int, device: str, trouble: Trouble) -> Finding:
        symptom, severity, detail = trouble
        return Finding(
            t_ns=at_ns, cluster=cluster, node=node, check=check, symptom=symptom,
            severity=severity, code="", device=device, detail=detail,
        )  # fmt: skip

    for sample in samples:
        device = sample.pci or sample.uuid or f"GPU {sample.index}"
        for trouble in troubles(sample, limits):
            yield found(sample.t_ns, device, trouble)
    if limits.gpus is not None and len(samples) < limits.gpus:
        fewer = f"{len(samples)} of {limits.gpus} GPUs"
        yield found(t_ns, "", ("gpu-unavailable", "now", fewer))
