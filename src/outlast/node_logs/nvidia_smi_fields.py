"""Fields of a GPU as nvidia-smi names them in CSV and XML, and readers of their values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from outlast.node_logs.gpu_samples import GpuSample
from outlast.node_logs.log_readings import device_address

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
    "hw_slowdown": "hw_slowdown", "hw_thermal_slowdown": "hw_thermal",
    "hw_power_brake_slowdown": "hw_power_brake", "sw_thermal_slowdown": "sw_thermal",
}  # fmt: skip
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

SILENT = {"", "n/a", "not supported", "not found", "not available", "none found",
          "requested functionality has been deprecated"}  # fmt: skip
WORDS = {
    "yes": True, "no": False, "active": True, "not active": False, "enabled": True,
    "disabled": False, "1": True, "0": False, "true": True, "false": False,
}  # fmt: skip


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
        "float | None": _float, "int | None": _int, "bool | None": _bool, "str": _text,
    }  # fmt: skip
    hints = GpuSample.__annotations__
    known = {name: kinds[hints[name]] for name in {*COLUMNS.values(), *PATHS.values()}}
    return {**known, "pci": device_address, **dict.fromkeys(ECC_FIELDS, _float)}


ECC_FIELDS = ("corrected", "uncorrected", "corrected_ever", "uncorrected_ever")


def make_sample(
    values: Mapping[str, str], fields: Mapping[str, str], t_ns: int, extra: Mapping[str, Any]
) -> GpuSample:
    """Build a sample.

    `values`: text by name; `fields`: the sample's field by name; the first name with a value
    counts. A text without a value is silent or broken.
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
