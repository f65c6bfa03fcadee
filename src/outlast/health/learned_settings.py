"""Settings generated from the current state of this node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.atomic_files import refuse_existing, replace_file
from outlast.errors import StorageError
from outlast.health.check_contract import AnyCheck, Sample
from outlast.health.check_settings import CheckSettings
from outlast.health.checks.clock_check import ClockSample
from outlast.health.checks.disk_check import DrivesSample
from outlast.health.checks.gpu_probe import GpusSample
from outlast.health.checks.link_check import LinksSample, is_up
from outlast.health.checks.memory_check import GIB, MemorySample
from outlast.health.checks.mount_check import MountSample, is_network_type
from outlast.health.probe_runner import NOTHING, ProbeRequest, TakenSample, run_probes

CHECKS = ("gpu", "link", "mount", "memory", "disk", "clock")
WITHIN_S = 60.0
Table = dict[str, Any]


def learn(path: Path, checks: Sequence[AnyCheck]) -> str:
    """Write this node's state as a new settings file and return its text.

    Raises UsageError if the file exists, StorageError if it cannot be written.
    """
    refuse_existing(path)
    wanted = [check for check in checks if check.name in CHECKS]
    requests = [
        ProbeRequest(check, probe) for check in wanted for probe in check.probes(CheckSettings())
    ]
    text = format_settings(
        run_probes(requests, within_s=WITHIN_S), {check.name: check for check in wanted}
    )
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}") from error
    return text


def format_settings(taken: Iterable[TakenSample], checks: dict[str, AnyCheck]) -> str:
    """Return the file's text. Failed probes become comments."""
    samples: list[Sample] = []
    notes: list[str] = []
    for one in taken:
        if bytes(one.sample) == bytes(NOTHING):
            why = one.absent or one.late or one.failed
            notes.append(f"{one.check} {one.device}".strip() + f": {why}")
        else:
            samples.append(msgspec.json.decode(one.sample, type=checks[one.check].sample))
    found, more = settings_of_samples(samples)
    head = ["# Generated from the state of this node: review it before use.", "version = 1"]
    head += [f"# not learnt: {_line(note)}" for note in [*notes, *more]]
    return "\n".join([*head, *_toml(found)]) + "\n"


def settings_of_samples(samples: Iterable[Sample]) -> tuple[Table, list[str]]:
    """Return the file's tables and the notes on what was left out. Pure."""
    found: Table = {}
    notes: list[str] = []
    mounts: Table = {}
    for one in samples:
        if isinstance(one, GpusSample):
            found["gpus"] = _gpus(one, notes)
        elif isinstance(one, LinksSample):
            found["links"] = {"expected": dict(_links(one, notes))}
        elif isinstance(one, MountSample):
            if one.trouble:
                notes.append(f"mount {one.path}: {one.trouble}")
            elif is_network_type(one.type):
                mounts[one.path] = {"type": one.type, "writable": "ro" not in one.options}
        elif isinstance(one, MemorySample):
            if not one.total_bytes:
                notes.append("memory: the kernel does not report its size")
                continue
            found["memory"] = {"total_gib": round(one.total_bytes / GIB, 1)}
            if one.hugepages:
                found["memory"]["hugepages"] = one.hugepages
        elif isinstance(one, DrivesSample):
            found["disks"] = {"count": len(one.drives)}
        elif isinstance(one, ClockSample):
            if one.source:
                found["clock"] = {"source": one.source}
            else:
                notes.append("clock: the kernel reports no clock source")
    if mounts:
        found["mounts"] = {"expected": mounts}
    return found, notes


def _gpus(sample: GpusSample, notes: list[str]) -> Table:
    if sample.trouble:
        notes.append(f"gpu: {sample.trouble}")
        return {"count": sample.on_bus}
    there = [gpu for gpu in sample.gpus if not gpu.lost]
    many = max(sample.on_bus, len(sample.gpus))
    if len(there) < many:
        notes.append(f"gpu: {many - len(there)} of {many} are lost; the count includes them")
    found: Table = {"count": many, "driver": sample.driver}
    names = {gpu.name for gpu in there}
    if len(names) == 1:
        found["name"] = names.pop()
    elif names:
        notes.append(f"gpu: their names differ: {', '.join(sorted(names))}")
    links = {sum(link.active for link in gpu.nvlinks) for gpu in there}
    if len(links) == 1:
        found["nvlinks"] = links.pop()
    elif links:
        notes.append(f"gpu: NVLinks that are up differ between GPUs: {sorted(links)}")
    return found


def _links(sample: LinksSample, notes: list[str]) -> Iterator[tuple[str, Table]]:
    for port in sample.ports:
        if not is_up(port):
            notes.append(f"link {port.name}: {port.state} {port.physical}".rstrip())
        elif port.rate_gbps is None:
            yield port.name, {"up": True}
        else:
            yield port.name, {"rate_gbps": port.rate_gbps}


def _toml(tables: Table, above: str = "") -> Iterator[str]:
    """Yield the lines of nested tables of plain values."""
    for key, value in tables.items():
        if isinstance(value, dict):
            name = f"{above}{_key(key)}"
            plain = {k: v for k, v in value.items() if not isinstance(v, dict)}
            if plain:
                yield f"\n[{name}]"
                yield from (f"{_key(k)} = {_value(v)}" for k, v in plain.items())
            yield from _toml({k: v for k, v in value.items() if isinstance(v, dict)}, f"{name}.")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: object) -> str:
    """Return a value as TOML: as its JSON, with DEL escaped."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
