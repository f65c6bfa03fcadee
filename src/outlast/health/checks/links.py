"""InfiniBand ports and Ethernet interfaces: up, fast enough, without errors, not flapping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from outlast.health.contract import About, Check, Count, Probe, Said, Sample
from outlast.health.settings import Link as Expected
from outlast.health.settings import Links as Wanted
from outlast.health.settings import Settings
from outlast.records import Severity, Symptom

HOUR_S = 3600.0
EVENTS = ("link_downed", "carrier_down_count")
DISCARDS = ("rx_dropped", "tx_dropped", "port_xmit_discards", "rx_missed_errors")
ENDS = {
    "link_downed": 255, "link_error_recovery": 255, "symbol_error": 65535,
    "port_rcv_errors": 65535, "port_rcv_remote_physical_errors": 65535,
    "port_xmit_discards": 65535,
}  # fmt: skip
"""Where InfiniBand's counters stand still until they are reset. Those of four bits are left out:
they are full on many sound ports."""
DOWN: dict[str, Severity] = {"ib": "now", "ethernet": "drain"}
SYMPTOMS: dict[str, Symptom] = {"ib": "ib-link", "ethernet": "ethlink"}


class Port(Sample, frozen=True):
    """`state`: ACTIVE or up; `physical`: LinkUp, or the carrier. `counters`: of errors, and of
    times that the link went down."""

    name: str
    kind: Literal["ib", "ethernet"]
    state: str
    physical: str = ""
    rate_gbps: float | None = None
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class Links(Sample, frozen=True):
    ports: tuple[Port, ...]


def is_up(port: Port) -> bool:
    if port.kind == "ib":
        return port.state == "ACTIVE" and port.physical in {"LinkUp", ""}
    return port.state in {"up", "unknown"} and port.physical != "0"


def key(port: Port, counter: str) -> str:
    return f"link|{port.name}|{counter}"


def counts(sample: Links) -> Iterable[Count]:
    for port in sample.ports:
        for name, value in port.counters.items():
            yield Count(key(port, name), value, name in EVENTS)


def judge(sample: Links, about: About) -> Iterator[Said]:
    wanted = about.settings.links
    there = {port.name: port for port in sample.ports}
    for name, expected in wanted.expected.items():
        if expected.up and name not in there:
            yield Said("now", "is not there", name)
    for port in sample.ports:
        if port.name in wanted.ignore:
            continue
        found = [*_state(port, wanted.expected.get(port.name)), *_counted(port, about, wanted)]
        for said in found or [Said("healthy", _well(port, about))]:
            yield said._replace(device=port.name, symptom=SYMPTOMS[port.kind])
    if not sample.ports and not wanted.expected:
        yield Said("unknown", "no link is there, not even one of an Ethernet")


def _state(port: Port, expected: Expected | None) -> Iterator[Said]:
    """A port that nobody named is not missed where nothing is plugged in."""
    if is_up(port):
        least = expected.rate_gbps if expected else None
        if least is not None and port.rate_gbps is None:
            yield Said("unknown", f"its rate is not known, and {least:g} Gb/s are expected")
        elif least is not None and (port.rate_gbps or 0) < least:
            yield Said("drain", f"{port.rate_gbps:g} Gb/s, and {least:g} are expected")
        return
    said = f"is {port.state}" + (f" ({port.physical})" if port.physical else "")
    if expected is not None:
        if expected.up:
            yield Said(DOWN[port.kind], said)
    elif port.kind == "ib" and port.physical not in {"Disabled", "Polling", "Sleep"}:
        yield Said("warn", f"{said}; the settings do not say whether it should be up")


def _counted(port: Port, about: About, wanted: Wanted) -> Iterator[Said]:
    rule = about.settings.flaps
    for name, value in port.counters.items():
        count = Count(key(port, name), value, name in EVENTS)
        new = about.since(count, HOUR_S)
        if port.kind == "ib" and value == ENDS.get(name):
            yield Said("warn", f"{name} stands at {value}, its end, and counts no more: reset it")
        if count.flaps:
            if about.flapping(count):
                text = f"went down {rule.times} times or more within {rule.window_s:g} s"
                yield Said("drain", f"{text}; said until quiet for {rule.recovery_s:g} s")
            elif new:
                yield Said("warn", f"went down {new} times within the hour")
        elif new is not None:
            most = wanted.discards_per_hour if name in DISCARDS else wanted.errors_per_hour
            if new > most:
                yield Said("warn", f"{name} rose by {new} within the hour, at most {most:g}")


def _well(port: Port, about: About) -> str:
    state = "up" if is_up(port) else f"{port.state}, and not expected up"
    rate = f", {port.rate_gbps:g} Gb/s" if port.rate_gbps is not None else ""
    seen = any(key(port, name) in about.memory.counters for name in port.counters)
    return f"{state}{rate}" + ("" if seen or not port.counters else ", counters not judged yet")


def _probes(_: Settings) -> Iterable[Probe[Links]]:
    from outlast.health.probes.links import take

    yield Probe("", take)


CHECK = Check("link", "ethlink", Links, _probes, judge, counts)
