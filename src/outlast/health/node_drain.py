"""Drain of this node, within the fleet's drain budget."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.config import slurm_script
from outlast.errors import StorageError
from outlast.health import slurm_nodes
from outlast.health.check_contract import Check, Probe, Sample
from outlast.health.check_settings import DrainSettings
from outlast.health.node_report import NodeReport
from outlast.health.probe_runner import ProbeRequest, run_probes
from outlast.health.slurm_nodes import DrainedNode as Past
from outlast.health.slurm_nodes import drain_allowance, drain_reason, recently_drained

COSTS = {"now", "drain"}
LEDGER = "drained.jsonl"
LEDGER_BYTES_MAX = 4 << 20
TRY_S = 0.02


class DrainOutcome(NamedTuple):
    """Outcome of a drain request.

    `why`: the reason, also of a refusal.
    """

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
        return DrainOutcome(False, "nothing that costs a job")
    if script := slurm_script():
        return DrainOutcome(
            False, f"Slurm forbids scontrol in a {script}: its exit code drains the node"
        )
    name, within_s = report.node, settings.deadline_s
    try:
        here = slurm_nodes.read_node(name, within_s)
        if not here.is_registered:
            states = "+".join(sorted(here.states))
            return DrainOutcome(False, f"{name} is {states}: Slurm does not have it yet")
        if here.is_away:
            return DrainOutcome(False, f"{name} is away already ({here.reason or 'no reason'})")
        fleet = slurm_nodes.read_fleet(within_s)
        most = drain_allowance(fleet.nodes, settings.percent)
        recent = recently_drained(fleet.drained, report.t_ns, settings.window_s)
        refused = _refused(name, settings, len(recent), most, report.t_ns)
        if refused:
            return DrainOutcome(False, refused)
        first = worst[0]
        detail = " ".join(filter(None, (first.check, first.device, first.code, first.detail)))
        slurm_nodes.request_drain(name, drain_reason(detail), within_s)
    except slurm_nodes.SlurmError as error:
        return DrainOutcome(False, str(error))
    return DrainOutcome(True, f"{name} was drained: {drain_reason(detail)}")


def _refused(name: str, settings: DrainSettings, drained: int, most: int, now_ns: int) -> str:
    """Return why the budget refuses a drain, or ""."""
    window = f"within {settings.window_s:g} s"
    if drained >= most:
        return f"{drained} nodes were drained {window}, at most {most} may be: look at them first"
    if not settings.shared:
        return ""
    slot = _slot(Path(settings.shared), name, settings, most, now_ns)
    if isinstance(slot, str):
        return f"the ledger in {settings.shared} could not be asked ({slot}): nothing was drained"
    if not slot.granted:
        return f"{slot.taken} nodes were drained {window} by the ledger, at most {most} may be"
    return ""


def _slot(
    shared: Path, name: str, settings: DrainSettings, most: int, now_ns: int
) -> DrainSlot | str:
    """Request a slot of the shared ledger; a text is an error.

    Runs in a process of its own: the file server of the shared directory may be dead.
    """

    def ask() -> DrainSlot:
        return take_slot(shared, name, most, now_ns, settings.window_s)

    check = Check("ledger", "other", DrainSlot, lambda _: (), lambda _sample, _about: ())
    (taken,) = run_probes(
        [ProbeRequest(check, Probe("", ask, settings.deadline_s))], within_s=settings.deadline_s
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
        raise StorageError(f"everybody can write to {shared}: chmod o-w")
    how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(shared / LEDGER, how, 0o600)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise StorageError(f"{shared / LEDGER} is no file of its own")
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(TRY_S)  # until the deadline of this process
        past = _entries(os.pread(file, LEDGER_BYTES_MAX + 1, 0), shared)
        drained = recently_drained(past, now_ns, window_s) - {name}
        if len(drained) >= most:
            return DrainSlot(granted=False, taken=len(drained))
        os.write(file, msgspec.json.encode(DrainLedgerEntry(now_ns, name)) + b"\n")
        os.fsync(file)
        return DrainSlot(granted=True, taken=len(drained))
    finally:
        os.close(file)


def _entries(data: bytes, shared: Path) -> list[Past]:
    """Parse the ledger.

    Raises StorageError if it is damaged: then no node is drained.
    """
    if len(data) > LEDGER_BYTES_MAX:
        raise StorageError(f"{shared / LEDGER} is over {LEDGER_BYTES_MAX:,} bytes: move it away")
    decoder = msgspec.json.Decoder(DrainLedgerEntry)
    try:
        found = [decoder.decode(line) for line in data.splitlines() if line]
    except msgspec.DecodeError as error:
        raise StorageError(f"{shared / LEDGER} is damaged: {error}") from error
    return [Past(one.node, one.t_ns) for one in found]
