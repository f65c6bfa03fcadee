"""Who hangs: a pure watch over the pages of one host's workers and the kernel's word on them.

`watch(memory, looks, now_ns, limits) -> (memory, verdict)` is called at every look. Times are
CLOCK_MONOTONIC nanoseconds, as in the pages; faults carry Unix times. A rank that waits for another
in a collective is no suspect; the one that it waits for is, once it has not moved for longer than
this run's own phases allow. When all stand at the same place, nobody is blamed and the generation
is to be tried again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from outlast.config import Limits
from outlast.events import Fault, FaultKind
from outlast.page import State

_S_NS = 1_000_000_000
_PHASES_KEPT = 20
_FIRST_PHASES = 3  # of a process: kernels, allocators and compilers warm up
_SLOW_STATES = ("starting", "waiting", "setup", "dry", "checkpoint", "healing")
# Who heals waits for others, and the controller has a deadline for each of its parts.
_NEVER = ("waiting", "finished", "healing")
_LEFT_NS = 1 * _S_NS  # pages are read one after the other: a contradiction must last this long
_STAGES: dict[str, int] = {"running": 1, "checkpoint": 1, "dry": 1, "voting": 2, "applying": 3}


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One worker at one moment: its page, and its state letter in /proc (R S D T t Z)."""

    worker: str
    seat: int  # -1: a spare
    n: int
    state: State
    collectives: int  # since the attempt (or the set-up) began: comparable between ranks
    t_ns: int  # the last change of anything
    t_state_ns: int
    completed: int  # phases that this process has completed
    letter: str


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the watch keeps between looks. Start with `Memory()`."""

    durations_ns: tuple[int, ...] = ()  # of the newest undisturbed phases of this host
    phases: dict[str, tuple[int, int, bool]] = {}  # worker -> (n, first seen, undisturbed)
    stopped: dict[str, int] = {}  # worker -> first seen stopped
    said: dict[str, int] = {}  # worker -> when it was blamed; said again after the floor
    retried: tuple[int, ...] = ()  # the last moves of those for whom a retry was asked for


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`suspects`: to be killed and replaced. `retry`: nobody is to blame, but nothing moves:
    say `Suspect(worker="", fault=retry)`, and the generation is closed and tried again."""

    suspects: tuple[Fault, ...] = ()
    retry: Fault | None = None


def timeout_ns(memory: Memory, look: Look, limits: Limits) -> int:
    """How long this worker may stand still where it is."""
    ceiling_ns = int(limits.hang_ceiling_s * _S_NS)
    known = memory.durations_ns
    if not known or look.completed < _FIRST_PHASES or look.state in _SLOW_STATES:
        return ceiling_ns
    floor_ns = int(limits.hang_floor_s * _S_NS)
    return min(ceiling_ns, max(floor_ns, int(limits.hang_factor * max(known))))


def watch(
    memory: Memory, looks: Iterable[Look], now_ns: int, limits: Limits, *, unix_ns: int = 0
) -> tuple[Memory, Verdict]:
    """One look at all workers of this host. `unix_ns`: the Unix time of `now_ns`."""
    looks = tuple(looks)
    memory = _remember(memory, looks, now_ns)
    found = _stopped(memory, looks, now_ns, limits)
    found = found or _left(looks, now_ns)
    if not found:
        seated = [look for look in looks if look.seat >= 0 and look.state not in _NEVER]
        found, retry = _stuck(memory, seated, now_ns, limits)
        if retry is not None:
            moves = tuple(look.t_ns for look in seated)
            if moves == memory.retried:
                return memory, Verdict()
            memory = msgspec.structs.replace(memory, retried=moves)
            return memory, Verdict(retry=_at(retry, now_ns, unix_ns))
    floor_ns = int(limits.hang_floor_s * _S_NS)
    again_ns = now_ns - floor_ns
    fresh = [fault for fault in found if memory.said.get(fault.worker, again_ns) <= again_ns]
    said = {**memory.said, **{fault.worker: now_ns for fault in fresh}}
    memory = msgspec.structs.replace(memory, said=said)
    return memory, Verdict(suspects=tuple(_at(fault, now_ns, unix_ns) for fault in fresh))


def _at(fault: Fault, now_ns: int, unix_ns: int) -> Fault:
    """The fault with its Unix time, where that is known."""
    t_ns = fault.t_ns + unix_ns - now_ns if unix_ns else 0
    return msgspec.structs.replace(fault, t_ns=t_ns)


def _remember(memory: Memory, looks: tuple[Look, ...], now_ns: int) -> Memory:
    """Measure phases by the change of n; those that were disturbed say nothing about speed."""
    durations_ns = memory.durations_ns
    phases: dict[str, tuple[int, int, bool]] = {}
    stopped: dict[str, int] = {}
    for look in looks:
        n, since_ns, clean = memory.phases.get(look.worker, (look.n, now_ns, False))
        clean = clean and look.state not in _SLOW_STATES and look.letter not in "Tt"
        if look.n == n:
            phases[look.worker] = (n, since_ns, clean)
        else:
            if clean and look.n == n + 1:
                durations_ns = (*durations_ns, now_ns - since_ns)[-_PHASES_KEPT:]
            phases[look.worker] = (look.n, now_ns, look.state not in _SLOW_STATES)
        if look.letter in ("T", "t"):
            stopped[look.worker] = memory.stopped.get(look.worker, now_ns)
    return Memory(
        durations_ns=durations_ns,
        phases=phases,
        stopped=stopped,
        said={name: t_ns for name, t_ns in memory.said.items() if name in phases},
        retried=memory.retried,
    )


def _stopped(memory: Memory, looks: tuple[Look, ...], now_ns: int, limits: Limits) -> list[Fault]:
    """The kernel says that the process is stopped: no page is needed to blame it."""
    found = []
    for look in looks:
        since_ns = memory.stopped.get(look.worker)
        if since_ns is None:
            continue
        patience_ns = min(timeout_ns(memory, look, limits), int(limits.hang_floor_s * _S_NS))
        if now_ns - since_ns > patience_ns:
            still_s = (now_ns - since_ns) / _S_NS
            detail = f"{_name(look)} has been stopped (state {look.letter}) for {still_s:.1f} s"
            found.append(_fault("stopped", detail, look, since_ns))
    return found


def _left(looks: tuple[Look, ...], now_ns: int) -> list[Fault]:
    """A rank whose script has ended, while others stand in a phase that it has not completed."""
    going = [
        look
        for look in looks
        if look.seat >= 0
        and (look.state in ("running", "voting") or (look.state == "dry" and look.n == 0))
        and now_ns - look.t_ns > _LEFT_NS
    ]
    found = []
    for look in looks:
        waiting = [other for other in going if other.n == look.n]
        if look.state == "finished" and waiting and now_ns - look.t_ns > _LEFT_NS:
            detail = (
                f"the script of {_name(look)} exited after phase {look.n}, while"
                f" {len(waiting)} other rank(s) went on to {_where(waiting[0])}: every rank must"
                " make the same calls of session.run"
            )
            found.append(_fault("contract", detail, look, look.t_ns))
    return found


def _stuck(
    memory: Memory, seated: list[Look], now_ns: int, limits: Limits
) -> tuple[list[Fault], Fault | None]:
    still = [look for look in seated if now_ns - look.t_ns > timeout_ns(memory, look, limits)]
    if not still:
        return [], None
    last = min(_place(look) for look in seated)
    behind = [look for look in seated if _place(look) == last]
    blamed = [look for look in behind if look in still]
    if len(behind) < len(seated) or len(seated) == 1:
        return [_hung(look, seated, now_ns) for look in blamed], None
    if len(blamed) < len(seated):
        return [], None  # one of them still moves: the others may wait for it
    first = min(blamed, key=lambda look: look.t_ns)
    still_s = (now_ns - max(look.t_ns for look in blamed)) / _S_NS
    detail = (
        f"all {len(seated)} ranks have stood at the same place for {still_s:.1f} s"
        f" ({_where(first)}): a message was lost or everybody waits for everybody"
    )
    return [], Fault(kind="transport", detail=detail, n=first.n, t_ns=first.t_ns)


def _place(look: Look) -> tuple[int, int, int]:
    """How far a rank is; what it did in its last phase does not count between phases."""
    stage = _STAGES.get(look.state, 0)
    collectives = 0 if look.state == "idle" else look.collectives
    return look.n, stage, collectives


def _hung(look: Look, seated: list[Look], now_ns: int) -> Fault:
    still_s = (now_ns - look.t_ns) / _S_NS
    ahead = [other for other in seated if _place(other) > _place(look)]
    others = ""
    if ahead:
        where = _where(min(ahead, key=_place))
        others = f"; {len(ahead)} other rank(s) wait for it ({where})"
    kernel = " (uninterruptible: a disk or a driver does not answer)" if look.letter == "D" else ""
    detail = f"{_name(look)} has not moved for {still_s:.1f} s in {_where(look)}{kernel}{others}"
    return _fault("hung", detail, look, look.t_ns)


def _name(look: Look) -> str:
    return f"rank {look.seat}" if look.seat >= 0 else f"spare {look.worker}"


def _where(look: Look) -> str:
    if look.state == "idle":
        return f"the script's own code before phase {look.n + 1}"
    if look.state == "voting":
        return f"the vote of phase {look.n + 1}"
    if look.state in ("starting", "setup"):
        return f"state {look.state} before phase {look.n + 1}"
    return f"phase {look.n + 1}, {look.state}, at collective {look.collectives}"


def _fault(kind: FaultKind, detail: str, look: Look, t_ns: int) -> Fault:
    return Fault(kind=kind, detail=detail, worker=look.worker, seat=look.seat, n=look.n, t_ns=t_ns)
