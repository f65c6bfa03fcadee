"""Faults: the failures that a run's observers report, by kind."""

from __future__ import annotations

from typing import Literal

import msgspec

FaultKind = Literal[
    "killed",  # the process died by a signal
    "exited",  # the process ended by itself, too early or with an exit code
    "hung",  # no progress for longer than the run's own step times allow
    "stopped",  # the kernel reports the process as stopped (SIGSTOP, a debugger)
    "contract",  # the script broke the contract of a phase: again would end the same way
    "raised",  # the user's code raised inside or between phases
    "transport",  # a connection to a peer broke; all workers are alive
    "unsettled",  # a joiner met a second stepping function: all begin it in a new generation
    "torn",  # failed while applying: neither the old state nor the new
    "diverged",  # replicas hold different bytes of what they must hold alike
    "nonfinite",  # a gradient that is not finite came again when the step was run again
    "oom",  # an allocation failed: of a device, or of the host
    "unknown",  # the script used a result that died with its worker: only a copy has it
    "mismatch",  # another fingerprint, another model, another job
    "transfer",  # a state copy was late or its digest wrong
    "storage",  # a disk is full or a file cannot be written
    "internal",  # the launcher or its controller failed itself
    "agent_lost",  # a host's agent stopped responding and its lease expired
    "controller_lost",  # the controller fell silent while a generation needed it
    "requested",  # by a signal, a drain, a planned move
    "save",  # an immediate checkpoint was requested; no fault
    "regrow",  # an absent rank can come back; no fault
]

SENTINELS = ("nonfinite", "corruption", "straggler", "oom")  # their names, as `check` of findings

REQUESTS: tuple[FaultKind, ...] = ("requested", "save", "regrow")  # requests, not faults
RECORDED = "flight recorders of"  # stands in a fault's detail where a hang's were written
HOST_MEMORY = "for want of memory"  # likewise where the kernel may have killed the worker for it


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One observed failure, as precisely as its observer can tell."""

    kind: FaultKind
    detail: str
    worker: str = ""
    seat: int = -1
    host: str = ""
    n: int = -1  # phases that its worker had completed
    step: int = -1  # the step that its worker was making: one above the committed ones
    state: str = ""  # in its worker's page (`page.State`); "": not read
    signal: int = 0
    exit_code: int = 0
    traceback: str = ""
    t_ns: int = 0
    repeats: bool = False  # another attempt would end the same way

    @property
    def is_wish(self) -> bool:
        """True for a request about the whole run; nothing failed. Not for a move of one seat."""
        return self.kind in REQUESTS and self.seat < 0
