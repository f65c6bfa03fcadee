"""Root fault of an incident: the one that explains the others, and what its recurrence means."""

from __future__ import annotations

import re

from outlast.controller.inputs import FailedWorker
from outlast.events import REQUESTS, Fault
from outlast.faults import HOST_MEMORY

_CRASHES = (4, 6, 7, 8, 11)  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: by the process itself
_TRACED = ("raised", "exited", "oom")
# By a worker itself or its device, unlike lost hosts and connections.
_OWN = ("killed", "exited", "hung", "raised", "torn", "diverged", "nonfinite", "oom", "storage")
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?([A-Za-z_][\w.]*)(?::|$)")

_TELLING = (
    "contract", "mismatch", "diverged", "nonfinite", "oom", "unknown", "torn", "storage", "hung",
    "stopped", "killed", "exited", "raised", "agent_lost", "regrow", "transfer",
    "controller_lost", "transport", "unsettled", "requested", "save",
)  # fmt: skip


def root_fault(faults: tuple[Fault, ...]) -> Fault | None:
    """Return the fault that explains the others: traceback first, broken connection last."""
    order = [fault for fault in faults if fault.repeats or fault.kind == "contract"]
    order += [fault for fault in faults if fault.kind == "diverged" and fault.seat < 0]
    order += [fault for fault in reversed(faults) if fault.kind == "nonfinite"]  # the newest first
    order += [fault for fault in faults if fault.traceback and fault.kind in _TRACED]
    if order:
        return order[0]
    return min(faults, key=_causal_order, default=None)


def _causal_order(fault: Fault) -> float:
    """Return the sort key: a planned move comes before the broken connections that it causes."""
    moved = fault.kind == "requested" and fault.seat >= 0
    return _TELLING.index("transfer") - 0.5 if moved else _TELLING.index(fault.kind)


def failure_identity(faults: tuple[Fault, ...]) -> str:
    """Return the identity of a generation's failure, equal when it recurs.

    "" for an accident, which does not predict the next attempt; respawns bound their number.
    """
    roots = tuple(fault for fault in faults if fault.kind != "torn")  # cut by another rank's end
    fault = root_fault(roots or faults)
    if fault is None or fault.kind in REQUESTS or is_accident(fault):
        return ""
    if fault.kind == "oom":  # whose message has numbers that vary, behind the number of parts
        return f"oom at rank {fault.seat} {fault.detail.partition(':')[0]}"
    lines = fault.traceback.strip().splitlines()
    if lines:
        return f"{fault.kind}: {lines[-1]}"
    if fault.kind in ("transport", "transfer", "unsettled"):
        return fault.kind  # the rank that reports it is random
    return f"{fault.kind} at rank {fault.seat}"


def failed_worker(fault: Fault | None, now_ns: int) -> FailedWorker | None:
    """Return the worker that a fault ends, if it may repeat in the next one; None for accidents,
    and for failures between workers."""
    if fault is None or fault.kind not in _OWN or fault.seat < 0 or not fault.worker:
        return None
    if is_accident(fault) and HOST_MEMORY not in fault.detail:
        return None
    failure: str = fault.kind
    if fault.signal:
        failure = f"signal {fault.signal}"
    elif fault.exit_code:
        failure = f"exit code {fault.exit_code}"
    lines = fault.traceback.strip().splitlines()
    if lines and (found := _EXCEPTION.match(lines[-1].strip())):
        failure = found[1]
    return FailedWorker(failure, fault.seat, fault.worker, now_ns)


def is_accident(fault: Fault) -> bool:
    """Return whether the fault came from outside the process: kill, stop signal, lost host."""
    if fault.kind == "killed":
        return fault.signal not in _CRASHES
    return fault.kind in ("agent_lost", "controller_lost", "stopped")


def is_user_error(cause: Fault | None) -> bool:
    """Return whether the cause lies in the user's own code."""
    own, traced = ("contract", "raised", "oom"), ("exited", "nonfinite")
    return cause is not None and (
        cause.repeats or cause.kind in own or (cause.kind in traced and bool(cause.traceback))
    )
