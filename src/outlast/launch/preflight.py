"""What must be right on this host before anything is started."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from outlast import config
from outlast.errors import ConfigError
from outlast.launch.arguments import RunPlan

PAGE_RESERVED_BYTES = 2 << 20  # of shared memory a worker, before its own state grows
_SIOCGIFADDR = 0x8915


def check(plan: RunPlan) -> None:
    """Raises ConfigError naming what does not hold and what to change; nothing is started then."""
    check_interface(config.gloo_interface())
    _check_memory(plan.world + plan.spares)
    _check_address(plan.master_addr)


def check_interface(names: str) -> None:
    """GLOO_SOCKET_IFNAME (one name or several, by comma; "" is loopback) must have an address."""
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in known:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, which this host does not have"
                f" (it has {', '.join(known)}); nothing was started; correct or unset it"
            )
        if not _has_address(name):
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, which has no IPv4 address; nothing was"
                " started; bring it up, or name another"
            )


def _has_address(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return False
    return True


def _check_memory(workers: int) -> None:
    needed_bytes = workers * PAGE_RESERVED_BYTES
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            free_bytes = int(line.split()[1]) << 10
            if free_bytes < needed_bytes:
                raise ConfigError(
                    f"the pages of {workers} workers need {needed_bytes} bytes of memory,"
                    f" {free_bytes} are available; nothing was started; free memory"
                )


def _check_address(address: str) -> None:
    try:
        socket.getaddrinfo(address.strip("[]"), 0)
    except OSError as error:
        raise ConfigError(
            f"--master-addr {address} does not resolve ({error.strerror}); nothing was started;"
            " leave it out for this host"
        ) from error
