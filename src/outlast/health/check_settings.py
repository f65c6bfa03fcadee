"""Settings of checks: a TOML file of what a node should have, checked before any probe."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from outlast import toml_files
from outlast.errors import ConfigError

Profile = Literal["prolog", "periodic", "epilog", "preflight"]


class SettingsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a table of the file."""


class GpuSettings(SettingsTable, frozen=True):
    """`count`: None is not said; then what the PCI bus shows is what there should be."""

    count: int | None = None
    name: str = ""
    driver: str = ""
    nvlinks: int | None = None  # active ones of each GPU
    hot_c: int = 88
    memory_hot_c: int = 100
    remapped_rows_max: int = 512  # as NVIDIA's rule for an exchange
    retired_pages_max: int = 60
    pcie_width: int | None = None  # lanes; None: what card and slot allow
    allowed: tuple[str, ...] = ("nv-hostengine", "nvidia-persiste", "dcgm-exporter")
    deadline_s: float = 15.0  # drivers of eight GPUs that nobody holds open take seconds


class PortSettings(SettingsTable, frozen=True):
    """One port (mlx5_0/1) or interface (eth0). `rate_gbps`: at least; None: only that it is up."""

    up: bool = True
    rate_gbps: float | None = None


class LinkSettings(SettingsTable, frozen=True):
    """`expected`: by name. A port that is not named is judged by its errors alone."""

    expected: dict[str, PortSettings] = {}
    ignore: tuple[str, ...] = ()
    errors_per_hour: float = 100.0
    discards_per_hour: float = 10_000.0


class MountPointSettings(SettingsTable, frozen=True):
    type: str = ""  # "": any
    writable: bool = True
    full_percent: float = 97.0
    inodes_percent: float = 97.0


class MountSettings(SettingsTable, frozen=True):
    """`expected`: by place. Others are looked at too: file systems of servers and of disks."""

    expected: dict[str, MountPointSettings] = {}
    ignore: tuple[str, ...] = ()
    deadline_s: float = 5.0


class DiskSettings(SettingsTable, frozen=True):
    """`count`: of whole drives; None: not said. `smart`: ask each drive with smartctl."""

    count: int | None = None
    smart: bool = False
    worn_percent: float = 95.0


class MemorySettings(SettingsTable, frozen=True):
    """`total_gib`: at least 98 % of it must be there."""

    total_gib: float | None = None
    hugepages: int | None = None
    corrected_per_hour: float = 100.0
    available_percent: float = 0.0  # below it is said; 0: never


class ClockSettings(SettingsTable, frozen=True):
    source: str = ""  # "": the best of those that the kernel offers
    skew_s: float = 0.1
    synchronized: bool | None = None  # True: unknown is not enough


class ServiceSettings(SettingsTable, frozen=True):
    active: tuple[str, ...] = ()


class KernelLogSettings(SettingsTable, frozen=True):
    """`policy`: a file over the XID policy (see docs/fleet.md). `window_s`: how far back, where
    there is no mark of an earlier check."""

    policy: str = ""
    window_s: float = 3600.0
    ignore: tuple[str, ...] = ()  # checks or codes: kernel.oom, XID 13


class FlapSettings(SettingsTable, frozen=True):
    times: int = 3
    window_s: float = 3600.0
    recovery_s: float = 1800.0


class ComputeSettings(SettingsTable, frozen=True):
    """The matmul probe. `tflops_min`: None only checks the result."""

    tflops_min: float | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


class RingSettings(SettingsTable, frozen=True):
    """All-reduces between neighbours. `address`: of the first node, as in host:29500; it, the rank
    and their number come from the command line."""

    address: str = ""
    rank: int = 0
    world: int = 1
    mbytes: int = 64
    gbytes_min: float | None = None  # a second; None: of what others do
    step_s: float = 20.0
    within_s: float = 240.0


class ProfileSettings(SettingsTable, frozen=True):
    """Which checks; None: those that are shipped with the profile."""

    prolog: tuple[str, ...] | None = None
    periodic: tuple[str, ...] | None = None
    epilog: tuple[str, ...] | None = None
    preflight: tuple[str, ...] | None = None


class DrainSettings(SettingsTable, frozen=True):
    """At most `percent` of the nodes, but always one, within `window_s`."""

    percent: float = 2.0
    window_s: float = 3600.0
    deadline_s: float = 5.0
    shared: str = ""  # a directory that all nodes see


class CheckSettings(SettingsTable, frozen=True):
    version: int = 1
    cluster: str = ""
    node: str = ""
    unknown_passes: bool = False
    own: tuple[str, ...] = ()
    gpus: GpuSettings = GpuSettings()
    links: LinkSettings = LinkSettings()
    mounts: MountSettings = MountSettings()
    disks: DiskSettings = DiskSettings()
    memory: MemorySettings = MemorySettings()
    clock: ClockSettings = ClockSettings()
    services: ServiceSettings = ServiceSettings()
    kernel: KernelLogSettings = KernelLogSettings()
    flaps: FlapSettings = FlapSettings()
    compute: ComputeSettings = ComputeSettings()
    ring: RingSettings = RingSettings()
    profiles: ProfileSettings = ProfileSettings()
    drain: DrainSettings = DrainSettings()


ABOVE_ZERO = (
    "flaps.times", "flaps.window_s", "flaps.recovery_s", "kernel.window_s", "mounts.deadline_s",
    "gpus.deadline_s", "drain.percent", "drain.window_s", "drain.deadline_s", "clock.skew_s",
    "ring.mbytes", "ring.step_s", "ring.within_s",
)  # fmt: skip


def read_settings(path: Path) -> CheckSettings:
    """Raises ConfigError, which names the file, the key, and what was probably meant."""
    return parse_settings(
        toml_files.read(path, "file of settings", "nothing was checked"), str(path)
    )


def parse_settings(found: dict[str, Any], where: str) -> CheckSettings:
    """Raises ConfigError."""
    _refuse_unknown_checks(found, CheckSettings, where, "")
    _numbers(found, where, "")
    try:
        settings = msgspec.convert(found, CheckSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}; nothing was checked") from error
    if settings.version != 1:
        raise ConfigError(f"{where}: version {settings.version} is not known; this reads 1")
    for key in ABOVE_ZERO:
        part, _, name = key.partition(".")
        value = getattr(getattr(settings, part), name)
        if not 0 < value < 1e9:  # nan is neither
            raise ConfigError(f"{where}: {key} must be above zero and below 1e9, not {value}")
    for path in settings.mounts.expected:
        if not path.startswith("/"):
            raise ConfigError(f"{where}: mounts.expected: {path!r} is no absolute path")
    for name, part in (("mounts", settings.mounts), ("links", settings.links)):
        if both := sorted(part.expected.keys() & set(part.ignore)):
            raise ConfigError(
                f"{where}: {name}: {both[0]} is expected and ignored: say one of them; nothing was"
                " checked"
            )
    for unit in settings.services.active:
        if not re.fullmatch(r"[\w@.:\\-]+", unit) or unit.startswith("-"):
            raise ConfigError(f"{where}: services.active: {unit!r} is no name of a service")
    return settings


def _numbers(found: dict[str, Any], where: str, above: str) -> None:
    """None of the numbers may be below zero; and nothing is ever less than one that is not a
    number, so that a check would pass for ever. Raises ConfigError."""
    for key, value in found.items():
        if isinstance(value, dict):
            _numbers(value, where, f"{above}{key}.")
        elif isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {above}{key} must be a number from zero on, not {value}")
        elif isinstance(value, int | float) and key.endswith("percent") and value > 100:
            raise ConfigError(f"{where}: {above}{key} must be from 0 to 100, not {value}")


def _refuse_unknown_checks(
    found: dict[str, Any], kind: type[SettingsTable], where: str, above: str
) -> None:
    """Raises ConfigError for a key that there is not."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in found.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {above}{close[0]}?" if close else f"there are {', '.join(fields)}"
            raise ConfigError(f"{where}: {above}{key} is not known: {hint}; nothing was checked")
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, SettingsTable):
            _refuse_unknown_checks(value, inner, where, f"{above}{key}.")
        elif key == "expected" and isinstance(value, dict):
            part = PortSettings if kind is LinkSettings else MountPointSettings
            for name, each in value.items():
                if isinstance(each, dict):
                    _refuse_unknown_checks(each, part, where, f'{above}expected."{name}".')
