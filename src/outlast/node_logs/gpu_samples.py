"""GPU samples from fields of nvidia-smi, and findings for values beyond limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from outlast.log_records import Finding, Severity, Symptom
from outlast.node_logs.log_readings import device_address


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one GPU; None and "" mean missing.

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
    "none": "healthy",
    "reset": "now",
    "gpu reset": "now",
    "reboot": "now",
    "node reboot": "now",
    "drain p2p": "drain",
    "drain and reset": "drain",
}
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
            yield "other", "unknown", f"{field}: not reported"
    for field, trouble in FLAGS.items():
        if getattr(sample, field):
            yield trouble
    if sample.uncorrected:
        yield "gpu-memory", "now", f"{sample.uncorrected:.0f} uncorrected memory errors"
    if sample.ecc_on is False:
        yield "gpu-memory", "warn", "memory errors are not corrected: ECC is off"
    yield from _beyond_limits(sample, limits)
    yield from _links(sample)
    if sample.recovery and RECOVERIES.get(sample.recovery.lower(), "unknown") != "healthy":
        severity = RECOVERIES.get(sample.recovery.lower(), "unknown")
        yield "gpu-unavailable", severity, f"the driver requests: {sample.recovery}"


def _beyond_limits(sample: GpuSample, limits: GpuLimits) -> Iterator[Trouble]:
    watched: tuple[tuple[Symptom, str, float | None, float | None], ...] = (
        ("thermal", "temperature_c", sample.temperature_c, limits.temperature_c),
        (
            "thermal",
            "memory_temperature_c",
            sample.memory_temperature_c,
            limits.memory_temperature_c,
        ),
        ("gpu-memory", "corrected", sample.corrected, limits.corrected),
        ("gpu-memory", "rows_uncorrected", sample.rows_uncorrected, limits.rows_uncorrected),
    )
    for symptom, name, value, limit in watched:
        if value is not None and limit is not None and value > limit:
            yield symptom, "warn", f"{name} is {value:g}, above {limit:g}"


def _links(sample: GpuSample) -> Iterator[Trouble]:
    width = sample.pcie_width
    widest = sample.pcie_width_max
    if width is not None and widest is not None and width < widest:
        yield "pcie", "drain", f"PCIe width is {width:g} of {widest:g}"
    speed = sample.pcie_generation
    fastest = sample.pcie_generation_max
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
    """Yield the problems in one sample of all GPUs, including missing GPUs."""

    def found(at_ns: int, device: str, trouble: Trouble) -> Finding:
        symptom, severity, detail = trouble
        return Finding(
            t_ns=at_ns,
            cluster=cluster,
            node=node,
            check=check,
            symptom=symptom,
            severity=severity,
            code="",
            device=device,
            detail=detail,
        )

    for sample in samples:
        device = sample.pci or sample.uuid or f"GPU {sample.index}"
        for trouble in troubles(sample, limits):
            yield found(sample.t_ns, device, trouble)
    if limits.gpus is not None and len(samples) < limits.gpus:
        fewer = f"{len(samples)} of {limits.gpus} GPUs"
        yield found(t_ns, "", ("gpu-unavailable", "now", fewer))


COLUMNS: dict[str, str] = {
    "index": "index", "pci.bus_id": "pci", "gpu_bus_id": "pci", "uuid": "uuid", "gpu_uuid": "uuid",
    "name": "name", "gpu_name": "name", "serial": "serial", "gpu_serial": "serial",
    "driver_version": "driver", "pstate": "state", "temperature.gpu": "temperature_c",
    "temperature.memory": "memory_temperature_c", "power.draw": "power_w",
    "power.draw.instant": "power_w", "power.draw.average": "power_w",
    "enforced.power.limit": "power_limit_w", "power.limit": "power_limit_w",
    "clocks.sm": "clock_mhz", "clocks.current.sm": "clock_mhz", "clocks.mem": "memory_clock_mhz",
    "clocks.current.memory": "memory_clock_mhz", "memory.total": "memory_mib",
    "memory.used": "memory_used_mib", "utilization.gpu": "busy_percent",
    "pcie.link.gen.current": "pcie_generation", "pcie.link.gen.gpucurrent": "pcie_generation",
    "pcie.link.gen.max": "pcie_generation_max", "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max", "ecc.mode.current": "ecc_on",
    "ecc.errors.corrected.volatile.total": "corrected",
    "ecc.errors.uncorrected.volatile.total": "uncorrected",
    "ecc.errors.corrected.aggregate.total": "corrected_ever",
    "ecc.errors.uncorrected.aggregate.total": "uncorrected_ever",
    "remapped_rows.correctable": "rows_corrected",
    "remapped_rows.uncorrectable": "rows_uncorrected", "remapped_rows.pending": "remap_pending",
    "remapped_rows.failure": "remap_failed", "retired_pages.pending": "pages_pending",
    "fabric.state": "fabric", "gpu_recovery_action": "recovery",
}  # fmt: skip
REASONS = {
    "hw_slowdown": "hw_slowdown",
    "hw_thermal_slowdown": "hw_thermal",
    "hw_power_brake_slowdown": "hw_power_brake",
    "sw_thermal_slowdown": "sw_thermal",
}
for _kind in ("clocks_throttle_reasons", "clocks_event_reasons"):
    COLUMNS.update({f"{_kind}.{name}": field for name, field in REASONS.items()})
PATHS: dict[str, str] = {
    "uuid": "uuid", "product_name": "name", "serial": "serial", "performance_state": "state",
    "pci/pci_bus_id": "pci", "temperature/gpu_temp": "temperature_c",
    "temperature/memory_temp": "memory_temperature_c",
    "gpu_power_readings/power_draw": "power_w", "power_readings/power_draw": "power_w",
    "gpu_power_readings/instant_power_draw": "power_w",
    "gpu_power_readings/current_power_limit": "power_limit_w",
    "power_readings/enforced_power_limit": "power_limit_w", "clocks/sm_clock": "clock_mhz",
    "clocks/mem_clock": "memory_clock_mhz", "fb_memory_usage/total": "memory_mib",
    "fb_memory_usage/used": "memory_used_mib", "utilization/gpu_util": "busy_percent",
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "pcie_generation",
    "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "pcie_generation_max",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "pcie_width",
    "pci/pci_gpu_link_info/link_widths/max_link_width": "pcie_width_max",
    "ecc_mode/current_ecc": "ecc_on", "remapped_rows/remapped_row_corr": "rows_corrected",
    "remapped_rows/remapped_row_unc": "rows_uncorrected",
    "remapped_rows/remapped_row_pending": "remap_pending",
    "remapped_rows/remapped_row_failure": "remap_failed",
    "retired_pages/pending_retirement": "pages_pending",
    "retired_pages/pending_blacklist": "pages_pending", "fabric/state": "fabric",
    "gpu_recovery_action": "recovery",
}  # fmt: skip
for _kind in ("clocks_throttle_reasons", "clocks_event_reasons"):
    _one = _kind.removesuffix("s")
    PATHS.update({f"{_kind}/{_one}_{name}": field for name, field in REASONS.items()})

SILENT = {
    "",
    "n/a",
    "not supported",
    "not found",
    "not available",
    "none found",
    "requested functionality has been deprecated",
}
WORDS = {
    "yes": True,
    "no": False,
    "active": True,
    "not active": False,
    "enabled": True,
    "disabled": False,
    "1": True,
    "0": False,
    "true": True,
    "false": False,
}


@cache
def _number() -> re.Pattern[str]:
    return re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:%|[A-Za-z]{1,4})?", re.ASCII)


def _float(text: str) -> float:
    found = _number().fullmatch(text)
    if not found or not math.isfinite(float(found[1])):
        raise ValueError(text)
    return float(found[1])


def _int(text: str) -> int:
    return int(_float(text))


def _bool(text: str) -> bool:
    if text.lower() not in WORDS:
        raise ValueError(text)
    return WORDS[text.lower()]


def _text(text: str) -> str:
    return text


@cache
def field_readers() -> dict[str, Callable[[str], Any]]:
    """Return the parser of each field's value. Parsers raise ValueError."""
    kinds: dict[str, Callable[[str], Any]] = {
        "float | None": _float,
        "int | None": _int,
        "bool | None": _bool,
        "str": _text,
    }
    hints = GpuSample.__annotations__
    known = {name: kinds[hints[name]] for name in {*COLUMNS.values(), *PATHS.values()}}
    return {**known, "pci": device_address, **dict.fromkeys(ECC_FIELDS, _float)}


ECC_FIELDS = ("corrected", "uncorrected", "corrected_ever", "uncorrected_ever")


def make_sample(
    values: Mapping[str, str], fields: Mapping[str, str], t_ns: int, extra: Mapping[str, Any]
) -> GpuSample:
    """Build a sample.

    `values`: text by name; `fields`: the sample's field by name; the first name with a value is
    used. A text without a value makes the field silent or broken.
    """
    parsed: dict[str, Any] = dict(extra)
    silent: list[str] = []
    broken: dict[str, str] = {}
    rest: dict[str, str] = {}
    for name, text in values.items():
        field = fields.get(name)
        answer = text.strip()
        bare = answer.removeprefix("[").removesuffix("]").strip()
        if field is None:
            rest[name] = answer
        elif bare.lower() in SILENT:
            silent.append(field)
        elif field not in parsed:
            try:
                if bare != answer:  # brackets enclose the reason for a missing value
                    raise ValueError(answer)
                parsed[field] = field_readers()[field](answer)
            except ValueError:
                broken[field] = answer[:100]
    quiet = tuple(field for field in dict.fromkeys(silent) if field not in parsed)
    return GpuSample(t_ns=t_ns, silent=quiet, broken=broken, rest=rest, **parsed)
