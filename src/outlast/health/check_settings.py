"""Settings of checks: a TOML file with a node's expected state, validated before any probe."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from outlast.config import read_toml
from outlast.errors import ConfigError

Profile = Literal["prolog", "periodic", "epilog", "preflight"]


class SettingsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of the settings file."""


class GpuSettings(SettingsTable, frozen=True):
    """Expected GPUs. `count`: None takes the number of GPUs on the PCI bus."""

    count: int | None = None
    name: str = ""
    driver: str = ""
    nvlinks: int | None = None  # active ones of each GPU
    hot_c: int = 88
    memory_hot_c: int = 100
    remapped_rows_max: int = 512  # NVIDIA's criterion for a replacement
    retired_pages_max: int = 60
    pcie_width: int | None = None  # lanes; None: what card and slot allow
    allowed: tuple[str, ...] = ("nv-hostengine", "nvidia-persiste", "dcgm-exporter")
    deadline_s: float = 15.0  # drivers of eight GPUs without persistence take seconds


class PortSettings(SettingsTable, frozen=True):
    """Expected state of a port (mlx5_0/1) or interface (eth0).

    `rate_gbps`: minimum rate; None only expects it up.
    """

    up: bool = True
    rate_gbps: float | None = None


class LinkSettings(SettingsTable, frozen=True):
    """Expected links.

    `expected`: by name. A port without an entry is judged by its errors alone.
    """

    expected: dict[str, PortSettings] = {}
    ignore: tuple[str, ...] = ()
    errors_per_hour: float = 100.0
    discards_per_hour: float = 10_000.0


class MountPointSettings(SettingsTable, frozen=True):
    """Expected file system of one mount point; limits in percent used."""

    type: str = ""  # "": any
    writable: bool = True
    full_percent: float = 97.0
    inodes_percent: float = 97.0


class MountSettings(SettingsTable, frozen=True):
    """Expected mount points, by path. Other network and disk file systems are checked as well."""

    expected: dict[str, MountPointSettings] = {}
    ignore: tuple[str, ...] = ()
    deadline_s: float = 5.0


class DiskSettings(SettingsTable, frozen=True):
    """Expected drives.

    `count`: number of whole drives, None if unspecified. `smart`: query each drive with smartctl.
    """

    count: int | None = None
    smart: bool = False
    worn_percent: float = 95.0


class MemorySettings(SettingsTable, frozen=True):
    """Expected main memory. `total_gib`: at least 98 % of it must be present."""

    total_gib: float | None = None
    hugepages: int | None = None
    corrected_per_hour: float = 100.0
    available_percent: float = 0.0  # below it the check warns; 0: never


class ClockSettings(SettingsTable, frozen=True):
    """Expected clock source and largest offset from the time service, in seconds."""

    source: str = ""  # "": the best of those that the kernel offers
    skew_s: float = 0.1
    synchronized: bool | None = None  # True: an unknown state is not accepted


class ServiceSettings(SettingsTable, frozen=True):
    """Systemd services that must be active."""

    active: tuple[str, ...] = ()


class KernelLogSettings(SettingsTable, frozen=True):
    """Settings of the kernel log check.

    `policy`: file that overrides the XID policy (see docs/fleet.md). `window_s`: span of the log
    that is read if no earlier check left a mark.
    """

    policy: str = ""
    window_s: float = 3600.0
    ignore: tuple[str, ...] = ()  # checks or codes: kernel.oom, XID 13


class FlapSettings(SettingsTable, frozen=True):
    """Definition of a link flap: `times` events within `window_s`, until quiet for `recovery_s`."""

    times: int = 3
    window_s: float = 3600.0
    recovery_s: float = 1800.0


class ComputeSettings(SettingsTable, frozen=True):
    """Settings of the matmul probe. `tflops_min`: None only verifies the result."""

    tflops_min: float | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


class RingSettings(SettingsTable, frozen=True):
    """Settings of the all-reduces between neighbours.

    `address`: the first node as host:29500; address, rank and world size come from the command
    line.
    """

    address: str = ""
    rank: int = 0
    world: int = 1
    mbytes: int = 64
    gbytes_min: float | None = None  # per second; None: relative to the other pairs
    step_s: float = 20.0
    within_s: float = 240.0


class ProfileSettings(SettingsTable, frozen=True):
    """Names of the checks of each profile; None takes the profile's shipped checks."""

    prolog: tuple[str, ...] | None = None
    periodic: tuple[str, ...] | None = None
    epilog: tuple[str, ...] | None = None
    preflight: tuple[str, ...] | None = None


class DrainSettings(SettingsTable, frozen=True):
    """Drain budget: at most `percent` of the nodes, but always one, within `window_s` seconds."""

    percent: float = 2.0
    window_s: float = 3600.0
    deadline_s: float = 5.0
    shared: str = ""  # directory on a file system that all nodes share


class CheckSettings(SettingsTable, frozen=True):
    """All settings of a node's checks."""

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
    """Read and validate a settings file.

    Raises ConfigError, which names the file, the key and a close match.
    """
    return parse_settings(read_toml(path, "file of settings", "nothing was checked"), str(path))


def parse_settings(found: dict[str, Any], where: str) -> CheckSettings:
    """Return validated settings from decoded TOML. Raises ConfigError."""
    _refuse_unknown_checks(found, CheckSettings, where, "")
    _numbers(found, where, "")
    try:
        settings = msgspec.convert(found, CheckSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}; nothing was checked") from error
    if settings.version != 1:
        raise ConfigError(f"{where}: version {settings.version} is unknown; this Outlast reads 1")
    for key in ABOVE_ZERO:
        part, _, name = key.partition(".")
        value = getattr(getattr(settings, part), name)
        if not 0 < value < 1e9:  # nan is neither
            raise ConfigError(f"{where}: {key} must be above zero and below 1e9, not {value}")
    for path in settings.mounts.expected:
        if not path.startswith("/"):
            raise ConfigError(f"{where}: mounts.expected: {path!r} is not an absolute path")
    for name, part in (("mounts", settings.mounts), ("links", settings.links)):
        if both := sorted(part.expected.keys() & set(part.ignore)):
            raise ConfigError(
                f"{where}: {name}: {both[0]} is expected and ignored: remove one of them;"
                " nothing was checked"
            )
    for unit in settings.services.active:
        if not re.fullmatch(r"[\w@.:\\-]+", unit) or unit.startswith("-"):
            raise ConfigError(f"{where}: services.active: {unit!r} is not a service name")
    return settings


def _numbers(found: dict[str, Any], where: str, above: str) -> None:
    """Refuse negative, infinite and NaN numbers, and percentages above 100.

    A comparison with NaN is always false, so the check would always pass. Raises ConfigError.
    """
    for key, value in found.items():
        if isinstance(value, dict):
            _numbers(value, where, f"{above}{key}.")
        elif isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {above}{key} must be a number of at least 0, not {value}")
        elif isinstance(value, int | float) and key.endswith("percent") and value > 100:
            raise ConfigError(f"{where}: {above}{key} must be from 0 to 100, not {value}")


def _refuse_unknown_checks(
    found: dict[str, Any], kind: type[SettingsTable], where: str, above: str
) -> None:
    """Refuse unknown keys. Raises ConfigError."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in found.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {above}{close[0]}?" if close else f"known are {', '.join(fields)}"
            raise ConfigError(f"{where}: {above}{key} is unknown: {hint}; nothing was checked")
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, SettingsTable):
            _refuse_unknown_checks(value, inner, where, f"{above}{key}.")
        elif key == "expected" and isinstance(value, dict):
            part = PortSettings if kind is LinkSettings else MountPointSettings
            for name, each in value.items():
                if isinstance(each, dict):
                    _refuse_unknown_checks(each, part, where, f'{above}expected."{name}".')
