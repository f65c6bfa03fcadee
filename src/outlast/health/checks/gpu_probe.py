"""Probe of GPUs through NVML (package nvidia-ml-py, extra `health`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from outlast.health.check_contract import (
    AbsentError,
    Sample,
    ToolError,
    list_names,
    read_number,
    read_text,
)
from outlast.node_logs.log_readings import device_address

NVIDIA = 0x10DE
CLASSES = (0x0300, 0x0302)  # a display, a 3D controller
NVLINKS_MAX = 36
VOLATILE = 0
AGGREGATE = 1
UNCORRECTED = 1
CAUSES = (0, 1)  # of retired pages
CORE = 0  # the sensor
MEMORY_TEMPERATURE = 82  # a field's number
LINK_ERRORS = range(4)  # replays, recoveries, errors of flits and of data


class NvLink(Sample, frozen=True):
    """One NVLink. `errors`: None if the driver does not count them for this generation."""

    number: int
    active: bool
    errors: int | None = None


class Gpu(Sample, frozen=True):
    """State of one GPU; None: this GPU has no such value.

    `unread`: values that the driver failed to report, with its reason. `lost`: it fell off the bus.
    """

    index: int
    pci: str = ""
    uuid: str = ""
    name: str = ""
    lost: bool = False
    temperature_c: int | None = None
    memory_c: int | None = None
    ecc: bool | None = None
    uncorrected: int | None = None  # since the driver was loaded
    uncorrected_ever: int | None = None
    remapped: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pages: int | None = None
    retirement_pending: bool | None = None
    held_back: int | None = None  # bits
    power_w: float | None = None
    power_limit_w: float | None = None
    width: int | None = None
    width_max: int | None = None
    speed: int | None = None  # generation of PCIe
    speed_max: int | None = None
    nvlinks: tuple[NvLink, ...] = ()
    fabric_state: int | None = None
    fabric_status: int | None = None
    unread: dict[str, str] = msgspec.field(default_factory=dict)


class GpusSample(Sample, frozen=True):
    """GPUs of the node.

    `on_bus`: NVIDIA's devices of class 3D on the PCI bus. `trouble`: error of the driver if it
    could not be queried at all.
    """

    on_bus: int
    driver: str = ""
    trouble: str = ""
    gpus: tuple[Gpu, ...] = ()


class GpuProcess(Sample, frozen=True):
    """Process on a GPU. `bytes`: GPU memory in use; None if unknown."""

    pid: int
    name: str
    bytes: int | None = None


class LeftoversSample(Sample, frozen=True):
    """Processes by GPU."""

    on: dict[str, tuple[GpuProcess, ...]]


class _Driver:
    """Calls of NVML: None for an unsupported value; errors are recorded with their reason."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.unread: dict[str, str] = {}
        self.lost = False

    def query(self, what: str, call: str, *arguments: Any) -> Any:
        nvml = self.nvml
        try:
            return getattr(nvml, call)(*arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, AttributeError):
            return None
        except nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code in {nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_GPU_NOT_FOUND}:
                self.lost = True
            elif what and code != nvml.NVML_ERROR_INVALID_ARGUMENT:
                self.unread[what] = str(error)
            return None


def on_bus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, independent of the driver."""
    place = root / "sys/bus/pci/devices"
    return sum(
        read_number(place / name / "vendor") == NVIDIA
        and (read_number(place / name / "class") or 0) >> 8 in CLASSES
        for name in list_names(place)
    )


def take(count: int | None, root: Path = Path("/")) -> GpusSample:
    """Query all GPUs.

    `count`: number that the settings expect. Raises AbsentError if there is none and none is
    expected.
    """
    devices = on_bus(root)
    _refuse_none(count, devices, root)
    try:
        with _driver() as nvml:
            driver = str(nvml.nvmlSystemGetDriverVersion())
            gpus = tuple(_gpu(nvml, k) for k in range(nvml.nvmlDeviceGetCount()))
    except ToolError as error:
        return GpusSample(on_bus=devices, trouble=str(error))
    # A virtual machine may hide the bus.
    return GpusSample(on_bus=max(devices, len(gpus)), driver=driver, gpus=gpus)


def _refuse_none(count: int | None, devices: int, root: Path) -> None:
    """Raise AbsentError if no GPU exists and none is expected; FileNotFoundError without sysfs."""
    if devices or count:
        return
    if count is None and any(re.fullmatch(r"nvidia\d+", name) for name in list_names(root / "dev")):
        return  # a container or a virtual machine may hide the bus
    if count is None and not (root / "sys/bus").is_dir():
        raise FileNotFoundError("/sys/bus does not exist: the GPUs are unknown")
    expected = "and none is expected" if count == 0 else "and the settings expect none"
    raise AbsentError(f"no NVIDIA GPU is on the PCI bus, {expected}")


@contextlib.contextmanager
def _driver() -> Iterator[Any]:
    """Open NVML. Raises ToolError if the driver cannot be queried."""
    try:
        nvml = import_module("pynvml")
    except ModuleNotFoundError as error:
        raise ToolError(
            "nvidia-ml-py is not installed; add it with: pip install 'outlast[health]'"
        ) from error
    try:
        nvml.nvmlInit()
        yield nvml
    except nvml.NVMLError as error:
        raise ToolError(f"the NVIDIA driver could not be queried: {error}") from error


def _gpu(nvml: Any, index: int) -> Gpu:
    driver = _Driver(nvml)
    handle = driver.query("handle", "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(index=index, lost=driver.lost, unread=driver.unread)

    def query(what: str, call: str, *more: Any) -> Any:
        return driver.query(what, call, handle, *more)

    pci = query("PCI address", "nvmlDeviceGetPciInfo")
    rows = query("remapped rows", "nvmlDeviceGetRemappedRows")
    ecc = query("error correction", "nvmlDeviceGetEccMode")
    pending = query("pending pages", "nvmlDeviceGetRetiredPagesPendingStatus")
    state, status = _fabric(nvml, query)
    width, width_max, speed, speed_max = (
        query(f"PCIe {what}", f"nvmlDeviceGet{call}")
        for what, call in (
            ("width", "CurrPcieLinkWidth"),
            ("widest", "MaxPcieLinkWidth"),
            ("speed", "CurrPcieLinkGeneration"),
            ("fastest", "MaxPcieLinkGeneration"),
        )
    )
    return Gpu(
        index=index,
        pci=device_address(_text(pci.busId)) if pci else "",
        uuid=_text(query("UUID", "nvmlDeviceGetUUID")),
        name=_text(query("name", "nvmlDeviceGetName")),
        temperature_c=query("temperature", "nvmlDeviceGetTemperature", CORE),
        memory_c=_memory_c(nvml, query),
        ecc=bool(ecc[0]) if ecc else None,
        uncorrected=query("errors", "nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        uncorrected_ever=query(
            "errors ever", "nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE
        ),
        remapped=rows[1] if rows else None,
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
        retired_pages=_retired_pages(query),
        retirement_pending=None if pending is None else bool(pending),
        held_back=query("clock throttle reasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        power_w=_watts(query("power", "nvmlDeviceGetPowerUsage")),
        power_limit_w=_watts(query("power limit", "nvmlDeviceGetEnforcedPowerLimit")),
        width=width,
        width_max=width_max,
        speed=speed,
        speed_max=speed_max,
        nvlinks=tuple(_nvlinks(query)),
        fabric_state=state,
        fabric_status=status,
        lost=driver.lost,
        unread=driver.unread,
    )


Query = Callable[..., Any]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _retired_pages(query: Query) -> int | None:
    pages = [query("retired pages", "nvmlDeviceGetRetiredPages", cause) for cause in CAUSES]
    return None if None in pages else sum(len(each) for each in pages)


def _memory_c(nvml: Any, query: Query) -> int | None:
    fields = query("temperature of memory", "nvmlDeviceGetFieldValues", [MEMORY_TEMPERATURE])
    if not fields or fields[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(fields[0].value.uiVal)


def _nvlinks(query: Query) -> Iterator[NvLink]:
    """Yield the links up to the first that this GPU does not have."""
    for link in range(NVLINKS_MAX):
        active = query("NVLinks", "nvmlDeviceGetNvLinkState", link)
        if active is None:
            return
        errors = [query("", "nvmlDeviceGetNvLinkErrorCounter", link, kind) for kind in LINK_ERRORS]
        known = [each for each in errors if each is not None]
        yield NvLink(number=link, active=bool(active), errors=sum(known) if known else None)


def _fabric(nvml: Any, query: Query) -> tuple[int | None, int | None]:
    """Return state and status of the NVLink fabric; the state is 0 for GPUs without NVSwitch."""
    if not hasattr(nvml, "c_nvmlGpuFabricInfo_t"):
        return None, None
    info = nvml.c_nvmlGpuFabricInfo_t()
    if query("NVLink fabric", "nvmlDeviceGetGpuFabricInfo", nvml.byref(info)) is None:
        return None, None
    return int(info.state), int(info.status)


def take_leftovers(count: int | None, root: Path = Path("/")) -> LeftoversSample:
    """List the processes on each GPU.

    Raises AbsentError as `take` does, ToolError if the driver cannot be queried.
    """
    _refuse_none(count, on_bus(root), root)
    on: dict[str, tuple[GpuProcess, ...]] = {}
    with _driver() as nvml:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            pci = device_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
            on[pci] = tuple(
                GpuProcess(
                    pid=one.pid,
                    name=read_text(root / f"proc/{one.pid}/comm") or "",
                    bytes=one.usedGpuMemory,
                )
                for one in running
            )
    return LeftoversSample(on=on)
