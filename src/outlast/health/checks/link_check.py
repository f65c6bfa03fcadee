"""Check of InfiniBand ports and Ethernet interfaces: state, rate, errors, flaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from outlast.health.check_contract import (
    Check,
    CounterReading,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    list_names,
    read_number,
    read_text,
)
from outlast.health.check_settings import CheckSettings
from outlast.health.check_settings import LinkSettings as Wanted
from outlast.health.check_settings import PortSettings as Expected
from outlast.log_records import Severity, Symptom

HOUR_S = 3600.0
EVENTS = ("link_downed", "carrier_down_count")
DISCARDS = ("rx_dropped", "tx_dropped", "port_xmit_discards", "rx_missed_errors")
ENDS = {
    "link_downed": 255, "link_error_recovery": 255, "symbol_error": 65535,
    "port_rcv_errors": 65535, "port_rcv_remote_physical_errors": 65535,
    "port_xmit_discards": 65535,
}  # fmt: skip
"""Saturation values of InfiniBand counters, which stay there until a reset. Counters of four bits
are omitted: they are saturated on many healthy ports."""
UP = "up"  # remembered per InfiniBand port: 1 if it is up
LIKE_MIN = 2  # similar ports that are up, from which on a port is expected up without an entry
DOWN: dict[str, Severity] = {"ib": "now", "ethernet": "drain"}
SYMPTOMS: dict[str, Symptom] = {"ib": "ib-link", "ethernet": "ethlink"}


class LinkPort(Sample, frozen=True):
    """A port or interface.

    `state`: ACTIVE or up; `physical`: LinkUp, or the carrier. `counters`: errors, and times that
    the link went down.
    """

    name: str
    kind: Literal["ib", "ethernet"]
    state: str
    physical: str = ""
    rate_gbps: float | None = None
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class LinksSample(Sample, frozen=True):
    """InfiniBand ports and Ethernet interfaces of the node."""

    ports: tuple[LinkPort, ...]


def is_up(port: LinkPort) -> bool:
    """Return whether a link is up, logically and physically."""
    if port.kind == "ib":
        return port.state == "ACTIVE" and port.physical in {"LinkUp", ""}
    return port.state in {"up", "unknown"} and port.physical != "0"


def key(port: LinkPort, counter: str) -> str:
    """Return the key of a port's counter in the memory."""
    return f"link|{port.name}|{counter}"


def counts(sample: LinksSample) -> Iterable[CounterReading]:
    """Yield the counters of all ports, and whether each InfiniBand port is up."""
    for port in sample.ports:
        if port.kind == "ib":
            yield CounterReading(key(port, UP), int(is_up(port)))
        for name, value in port.counters.items():
            yield CounterReading(key(port, name), value, name in EVENTS)


def judge(sample: LinksSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge each port's state, rate, errors and flaps, and the ports that are missing."""
    wanted = about.settings.links
    there = {port.name: port for port in sample.ports}
    for name, expected in wanted.expected.items():
        if expected.up and name not in there:
            yield Observation("now", "is missing", name)
    yield from _vanished_links(there, about)
    for port in sample.ports:
        if port.name in wanted.ignore:
            continue
        found = [
            *_state(port, wanted.expected.get(port.name)),
            *_counter_findings(port, about, wanted),
        ]
        if port.name not in wanted.expected and not is_up(port) and port.kind == "ib":
            found = [*_missing(port, sample, about), *found]
        for observed in found or [Observation("healthy", _describe_healthy(port, about))]:
            yield observed._replace(device=port.name, symptom=SYMPTOMS[port.kind])
    if not sample.ports and not wanted.expected:
        yield Observation("unknown", "no InfiniBand or Ethernet link exists")


def _state(port: LinkPort, expected: Expected | None) -> Iterator[Observation]:
    """Judge a port's state and rate; an unplugged port without an entry is not reported."""
    if is_up(port):
        least = expected.rate_gbps if expected else None
        if least is not None and port.rate_gbps is None:
            yield Observation("unknown", f"its rate is unknown; {least:g} Gb/s are expected")
        elif least is not None and (port.rate_gbps or 0) < least:
            yield Observation("drain", f"{port.rate_gbps:g} Gb/s; {least:g} are expected")
        return
    detail = f"is {port.state}" + (f" ({port.physical})" if port.physical else "")
    if expected is not None:
        if expected.up:
            yield Observation(DOWN[port.kind], detail)
    elif port.kind == "ib" and port.physical not in {"Disabled", "Polling", "Sleep"}:
        yield Observation("warn", f"{detail}; the settings have no entry for it")


def _missing(port: LinkPort, sample: LinksSample, about: JudgeContext) -> Iterator[Observation]:
    """Report a port without an entry if it was up before, or if most similar ports are."""
    detail = f"is {port.state} ({port.physical})"
    if was_up(key(port, UP), about):
        yield Observation("drain", f"{detail}; it was up at an earlier check")
        return
    ignored = about.settings.links.ignore
    like = [
        one
        for one in sample.ports
        if one.kind == "ib" and one.name not in ignored and _number(one) == _number(port)
    ]
    up = sum(is_up(one) for one in like)
    if up >= LIKE_MIN and 2 * up > len(like):
        yield Observation("warn", f"{detail}; {up} of {len(like)} similar ports are up")


def _number(port: LinkPort) -> str:
    """Return the number of a port on its adapter."""
    return port.name.rpartition("/")[2]


def was_up(of: str, about: JudgeContext) -> bool:
    """Return whether a port is remembered as up, within the retention of counters."""
    return any(value for _, value in about.memory.counters.get(of, ()))


def _vanished_links(there: dict[str, LinkPort], about: JudgeContext) -> Iterator[Observation]:
    """Report InfiniBand ports that were up at an earlier check and no longer exist."""
    wanted = about.settings.links
    for of, points in about.memory.counters.items():
        first, _, rest = of.partition("|")
        name, _, what = rest.rpartition("|")
        if first != "link" or what != UP or not points[-1][1]:
            continue
        if name not in there and name not in wanted.ignore and name not in wanted.expected:
            vanished = Observation("drain", "no longer exists; it was up at an earlier check", name)
            yield vanished._replace(symptom=SYMPTOMS["ib"])


def _counter_findings(port: LinkPort, about: JudgeContext, wanted: Wanted) -> Iterator[Observation]:
    rule = about.settings.flaps
    for name, value in port.counters.items():
        count = CounterReading(key(port, name), value, name in EVENTS)
        new = about.since(count, HOUR_S)
        if port.kind == "ib" and value == ENDS.get(name):
            yield Observation(
                "warn", f"{name} is saturated at {value} and no longer counts: reset it"
            )
        if count.flaps:
            if about.flapping(count):
                text = f"went down {rule.times} times or more within {rule.window_s:g} s"
                yield Observation("drain", f"{text}; held until quiet for {rule.recovery_s:g} s")
            elif new:
                yield Observation("warn", f"went down {new} times in the last hour")
        elif new is not None:
            most = wanted.discards_per_hour if name in DISCARDS else wanted.errors_per_hour
            if new > most:
                yield Observation("warn", f"{name} rose by {new} in the last hour; limit {most:g}")


def _describe_healthy(port: LinkPort, about: JudgeContext) -> str:
    state = "up" if is_up(port) else f"{port.state}, and not expected up"
    rate = f", {port.rate_gbps:g} Gb/s" if port.rate_gbps is not None else ""
    known = any(key(port, name) in about.memory.counters for name in port.counters)
    return f"{state}{rate}" + ("" if known or not port.counters else ", counters not judged yet")


def _probes(_: CheckSettings) -> Iterable[Probe[LinksSample]]:

    yield Probe("", take)


CHECK = Check("link", "ethlink", LinksSample, _probes, judge, counts)


IB_COUNTERS = (
    "link_downed", "link_error_recovery", "symbol_error", "local_link_integrity_errors",
    "port_rcv_errors", "port_rcv_remote_physical_errors", "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)  # fmt: skip
NET_COUNTERS = (
    "rx_errors",
    "tx_errors",
    "rx_crc_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_missed_errors",
)
PORTS_MAX = 512


def take(root: Path = Path("/")) -> LinksSample:
    """Read the ports and interfaces from sysfs."""
    ib = list(_ib(root / "sys/class/infiniband"))
    return LinksSample(ports=tuple([*ib, *_net(root / "sys/class/net")][:PORTS_MAX]))


def _ib(place: Path) -> Iterator[LinkPort]:
    """Yield the RDMA ports; one with an Ethernet link layer (RoCE) is judged as InfiniBand."""
    for device in list_names(place):
        for port in list_names(place / device / "ports"):
            at = place / device / "ports" / port
            counters = {name: read_number(at / "counters" / name) for name in IB_COUNTERS}
            yield LinkPort(
                name=f"{device}/{port}",
                kind="ib",
                state=_word(read_text(at / "state")),
                physical=_word(read_text(at / "phys_state")),
                rate_gbps=_rate(read_text(at / "rate")),
                counters={name: value for name, value in counters.items() if value is not None},
            )


def _word(text: str | None) -> str:
    """Return the last word of a state such as `4: ACTIVE`."""
    return (text or "unreadable").rpartition(": ")[2]


def _rate(text: str | None) -> float | None:
    """Return the rate of `400 Gb/sec (4X NDR)` in Gb/s; None if it is malformed."""
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None


def _net(place: Path) -> Iterator[LinkPort]:
    """Yield hardware interfaces; virtual ones (bridges, loopback, veth) have no device."""
    for name in list_names(place):
        at = place / name
        if not (at / "device").exists() or read_text(at / "type") != "1":
            continue
        counters = {each: read_number(at / "statistics" / each) for each in NET_COUNTERS}
        counters["carrier_down_count"] = read_number(at / "carrier_down_count")
        speed = read_number(at / "speed")
        yield LinkPort(
            name=name,
            kind="ethernet",
            state=read_text(at / "operstate") or "unreadable",
            physical=read_text(at / "carrier") or "",
            rate_gbps=speed / 1000 if speed is not None and speed > 0 else None,
            counters={each: value for each, value in counters.items() if value is not None},
        )
