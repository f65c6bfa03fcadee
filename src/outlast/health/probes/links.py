"""Links from sysfs: /sys/class/infiniband and /sys/class/net."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outlast.health.checks.links import Links, Port
from outlast.health.probes.asking import names, number, text

IB_COUNTERS = (
    "link_downed", "link_error_recovery", "symbol_error", "local_link_integrity_errors",
    "port_rcv_errors", "port_rcv_remote_physical_errors", "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)  # fmt: skip
NET_COUNTERS = (
    "rx_errors", "tx_errors", "rx_crc_errors", "rx_dropped", "tx_dropped", "rx_missed_errors",
)  # fmt: skip
PORTS_MAX = 512


def take(root: Path = Path("/")) -> Links:
    ib = list(_ib(root / "sys/class/infiniband"))
    return Links(ports=tuple([*ib, *_net(root / "sys/class/net")][:PORTS_MAX]))


def _ib(place: Path) -> Iterator[Port]:
    """A port of an Ethernet link layer (RoCE) is judged as an InfiniBand one: jobs use it so."""
    for device in names(place):
        for port in names(place / device / "ports"):
            at = place / device / "ports" / port
            counters = {name: number(at / "counters" / name) for name in IB_COUNTERS}
            yield Port(
                name=f"{device}/{port}", kind="ib", state=_word(text(at / "state")),
                physical=_word(text(at / "phys_state")), rate_gbps=_rate(text(at / "rate")),
                counters={name: value for name, value in counters.items() if value is not None},
            )  # fmt: skip


def _word(said: str | None) -> str:
    """Of `4: ACTIVE`."""
    return (said or "unreadable").rpartition(": ")[2]


def _rate(said: str | None) -> float | None:
    """Of `400 Gb/sec (4X NDR)`."""
    try:
        return float((said or "").split()[0])
    except (IndexError, ValueError):
        return None


def _net(place: Path) -> Iterator[Port]:
    """Interfaces of hardware: others (bridges, loopback, containers' ends) lead to no device."""
    for name in names(place):
        at = place / name
        if not (at / "device").exists() or text(at / "type") != "1":
            continue
        counters = {each: number(at / "statistics" / each) for each in NET_COUNTERS}
        counters["carrier_down_count"] = number(at / "carrier_down_count")
        speed = number(at / "speed")
        yield Port(
            name=name, kind="ethernet", state=text(at / "operstate") or "unreadable",
            physical=text(at / "carrier") or "",
            rate_gbps=speed / 1000 if speed is not None and speed > 0 else None,
            counters={each: value for each, value in counters.items() if value is not None},
        )  # fmt: skip
