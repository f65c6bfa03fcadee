"""Drain of this node through Slurm, within the fleet's drain budget."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import subprocess
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.config import child_environment, slurm_variable
from outlast.errors import OutlastError, StorageError
from outlast.health.check_contract import Check, Probe, Sample
from outlast.health.check_settings import DrainSettings
from outlast.health.node_report import NodeReport
from outlast.health.probe_runner import ProbeRequest, run_probes

PREFIX = "outlast: "
REASON_MAX = 200  # characters


class DrainedNode(NamedTuple):
    """Node with a drain reason that begins with our prefix.

    `since_ns`: None if Slurm does not report the time.
    """

    node: str
    since_ns: int | None


def drain_allowance(nodes: int, percent: float) -> int:
    """Return the number of nodes that may be drained within the window: the share, at least one.

    Rounded down; without the minimum a fleet of twenty nodes could never drain any.
    """
    return max(1, int(nodes * percent / 100))


def recently_drained(drained: Iterable[DrainedNode], now_ns: int, window_s: float) -> set[str]:
    """Return the nodes drained by us within the window, or at an unknown time."""
    begin_ns = now_ns - round(window_s * 1e9)
    return {one.node for one in drained if one.since_ns is None or one.since_ns > begin_ns}


def drain_reason(detail: str) -> str:
    """Return a drain reason for Slurm: one line without characters special to a shell or sinfo."""
    plain = "".join(c if c.isalnum() or c in " .,:;/()%+-_=" else " " for c in detail)
    return (PREFIX + " ".join(plain.split()))[:REASON_MAX]


def is_our_reason(text: str) -> bool:
    """Return whether a drain reason was written by this package."""
    return text.startswith(PREFIX)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
AWAY = {
    "DRAIN",
    "DRAINED",
    "DRAINING",
    "DOWN",
    "FAIL",
    "FAILING",
    "MAINT",
    "MAINTENANCE",
    "FUTURE",
    "ERROR",
}
UNREGISTERED = {"UNKNOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_UP", "FUTURE"}
TEXT_MAX = 64 << 20


class SlurmError(OutlastError):
    """Slurm did not answer in time, or not as expected. Nothing was drained."""


class SlurmNode(NamedTuple):
    """State of a node. `states`: base states and flags; flag characters appear by name."""

    states: frozenset[str]
    reason: str

    @property
    def is_away(self) -> bool:
        """True for a node out of service: drained, down, failing or in maintenance."""
        return bool(self.states & AWAY)

    @property
    def is_registered(self) -> bool:
        """True if slurmctld has contact with the node."""
        return bool(self.states) and not self.states & UNREGISTERED


class SlurmFleet(NamedTuple):
    """Number of nodes, and those that this package drained."""

    nodes: int
    drained: tuple[DrainedNode, ...]


def read_node(name: str, within_s: float) -> SlurmNode:
    """Return a node's state. Raises SlurmError, also if slurmctld does not know the node."""
    answer = _run_slurm(["scontrol", "show", "node", _checked_name(name), "-o"], within_s)
    found = re.search(r"\bState=(\S+)", answer)
    if not found:
        raise SlurmError(f"scontrol printed no state of {name}; nothing was drained")
    marks = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP"}
    states = {state for state in re.split(r"[+*~#!%$@^-]", found[1].upper()) if state}
    states |= {name for mark, name in marks.items() if mark in found[1]}
    reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\])?\s*$", answer)
    return SlurmNode(frozenset(states), reason[1] if reason else "")


def read_fleet(within_s: float) -> SlurmFleet:
    """Return the number of nodes and those that we drained. Raises SlurmError."""
    answer = _run_slurm(["sinfo", "-h", "-N", "-o", "%N|%H|%E"], within_s)
    names: set[str] = set()
    drained: dict[str, DrainedNode] = {}
    for line in answer.splitlines():
        parts = line.split("|", 2)
        if len(parts) != 3:
            continue
        name, when, reason = (part.strip() for part in parts)
        names.add(name)  # a node has a line for each of its partitions
        if is_our_reason(reason):
            drained[name] = DrainedNode(name, _time_ns(when))
    if not names:
        raise SlurmError("sinfo names no node; nothing was drained")
    return SlurmFleet(len(names), tuple(drained.values()))


def request_drain(name: str, reason: str, within_s: float) -> None:
    """Set a node to DRAIN. Raises SlurmError."""
    _run_slurm(
        [
            "scontrol",
            "update",
            f"NodeName={_checked_name(name)}",
            "State=DRAIN",
            f"Reason={reason}",
        ],
        within_s,
    )


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise SlurmError(f"{name!r} is not a node name; nothing was drained")
    return name


def _time_ns(text: str) -> int | None:
    """Parse seconds, as with SLURM_TIME_FORMAT=%s, or the local time of an older Slurm."""
    if text.isdecimal():
        return int(text) * 10**9
    try:
        return int(datetime.fromisoformat(text).astimezone().timestamp()) * 10**9
    except ValueError:
        return None


def _environment() -> dict[str, str]:
    """Return the environment without SLURM_CLUSTERS.

    With it scontrol would query another cluster's node of the same name.
    """
    found = child_environment({"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"})
    found.pop("SLURM_CLUSTERS", None)
    return found


def _run_slurm(command: list[str], within_s: float) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=within_s,
            check=False,
            env=_environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{command[0]} did not answer within {within_s:g} s; nothing was drained"
        ) from error
    except OSError as error:
        raise SlurmError(f"{command[0]}: {error.strerror}; nothing was drained") from error
    if done.returncode:
        why = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[:300]
        raise SlurmError(f"{command[0]} ended with {done.returncode}: {why}; nothing was drained")
    return done.stdout[:TEXT_MAX].decode("utf-8", "replace")


COSTS = {"now", "drain"}
LEDGER = "drained.jsonl"
LEDGER_BYTES_MAX = 4 << 20
TRY_S = 0.02


class DrainOutcome(NamedTuple):
    """Outcome of a drain request. `why`: the reason, also of a refusal."""

    drained: bool
    why: str


class DrainSlot(Sample, frozen=True):
    """Answer of the fleet's shared ledger.

    `taken`: number of other nodes drained within the window.
    """

    granted: bool
    taken: int


class DrainLedgerEntry(msgspec.Struct, frozen=True):
    """Line of the ledger: one node's drain."""

    t_ns: int
    node: str


def drain_node(report: NodeReport, settings: DrainSettings) -> DrainOutcome:
    """Drain this node if a finding costs a job and the budget allows it.

    Never resumes a node, and never changes one that is out of service already.
    """
    worst = [one for one in report.findings if one.severity in COSTS]
    if not worst:
        return DrainOutcome(False, "no finding that costs a job")
    if script := slurm_variable("SCRIPT_CONTEXT").partition("_")[0]:
        return DrainOutcome(
            False, f"Slurm forbids scontrol in a {script}: its exit code drains the node"
        )
    name = report.node
    within_s = settings.deadline_s
    try:
        here = read_node(name, within_s)
        if not here.is_registered:
            states = "+".join(sorted(here.states))
            return DrainOutcome(False, f"{name} is {states}: not registered with Slurm")
        if here.is_away:
            return DrainOutcome(False, f"{name} is out of service ({here.reason or 'no reason'})")
        fleet = read_fleet(within_s)
        most = drain_allowance(fleet.nodes, settings.percent)
        recent = recently_drained(fleet.drained, report.t_ns, settings.window_s)
        refused = _refusal(name, settings, len(recent), most, report.t_ns)
        if refused:
            return DrainOutcome(False, refused)
        first = worst[0]
        detail = " ".join(filter(None, (first.check, first.device, first.code, first.detail)))
        request_drain(name, drain_reason(detail), within_s)
    except SlurmError as error:
        return DrainOutcome(False, str(error))
    return DrainOutcome(True, f"{name} was drained: {drain_reason(detail)}")


def _refusal(name: str, settings: DrainSettings, drained: int, most: int, now_ns: int) -> str:
    """Return why the budget refuses a drain, or ""."""
    window = f"within {settings.window_s:g} s"
    if drained >= most:
        return f"{drained} nodes were drained {window}, the limit is {most}: inspect them first"
    if not settings.shared:
        return ""
    slot = _request_slot(Path(settings.shared), name, settings, most, now_ns)
    if isinstance(slot, str):
        return f"the ledger in {settings.shared} could not be queried ({slot}): nothing was drained"
    if not slot.granted:
        return f"{slot.taken} nodes were drained {window} by the ledger, the limit is {most}"
    return ""


def _request_slot(
    shared: Path, name: str, settings: DrainSettings, most: int, now_ns: int
) -> DrainSlot | str:
    """Request a slot of the shared ledger; a text is an error.

    Runs in a process of its own: the file server of the shared directory may be dead.
    """

    def request() -> DrainSlot:
        return take_slot(shared, name, most, now_ns, settings.window_s)

    check = Check("ledger", "other", DrainSlot, lambda _: (), lambda _sample, _about: ())
    (taken,) = run_probes(
        [ProbeRequest(check, Probe("", request, settings.deadline_s))], within_s=settings.deadline_s
    )
    if taken.failed or taken.late:
        return taken.failed or taken.late
    return msgspec.json.decode(taken.sample, type=DrainSlot)


def take_slot(shared: Path, name: str, most: int, now_ns: int, window_s: float) -> DrainSlot:
    """Append a line to the ledger if fewer than `most` other nodes were drained within the window.

    The lock (fcntl) also holds over NFS and Lustre, so that simultaneous requests cannot exceed the
    budget. Raises OSError; StorageError also for a directory in which anyone could replace the
    ledger.
    """
    if stat.S_IMODE(shared.stat().st_mode) & stat.S_IWOTH:
        raise StorageError(f"any user can write to {shared}: chmod o-w")
    how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(shared / LEDGER, how, 0o600)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise StorageError(f"{shared / LEDGER} is a link, or not a regular file")
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(TRY_S)  # until the deadline of this process
        past = _parse_ledger(os.pread(file, LEDGER_BYTES_MAX + 1, 0), shared)
        drained = recently_drained(past, now_ns, window_s) - {name}
        if len(drained) >= most:
            return DrainSlot(granted=False, taken=len(drained))
        os.write(file, msgspec.json.encode(DrainLedgerEntry(now_ns, name)) + b"\n")
        os.fsync(file)
        return DrainSlot(granted=True, taken=len(drained))
    finally:
        os.close(file)


def _parse_ledger(data: bytes, shared: Path) -> list[DrainedNode]:
    """Parse the ledger. Raises StorageError if it is damaged: then no node is drained."""
    if len(data) > LEDGER_BYTES_MAX:
        raise StorageError(f"{shared / LEDGER} is over {LEDGER_BYTES_MAX:,} bytes: move it away")
    decoder = msgspec.json.Decoder(DrainLedgerEntry)
    try:
        found = [decoder.decode(line) for line in data.splitlines() if line]
    except msgspec.DecodeError as error:
        raise StorageError(f"{shared / LEDGER} is damaged: {error}") from error
    return [DrainedNode(one.node, one.t_ns) for one in found]
