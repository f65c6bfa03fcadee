"""Hang detection: a pure watch over the pages of a job's workers and the kernel's word on them.

`watch(memory, looks, now_ns, limits) -> (memory, verdict)` is called at every look. Times are
CLOCK_MONOTONIC nanoseconds, as in the pages; faults carry Unix times.

What standing still means depends on where a rank stands, and on who waits for it:

| the rank                               | the others                  | is given up after        |
|----------------------------------------|-----------------------------|--------------------------|
| is stopped (SIGSTOP), says the kernel  | in any state                | the floor                |
| waits in a collective or the vote      | all wait at the same place  | its patience: all retry  |
|                                        | wait elsewhere, none is out | its patience             |
|                                        | one is out of a collective  | never: that one is judged|
| is out of a collective, in an attempt  | at least half of all wait   | its patience, once       |
|                                        | more than half are out      | the ceiling              |
| is between phases, applies, sets up,.. | in any state                | the ceiling              |

*Patience* is what this run's own phases of that kind allow: `hang_factor` times the slowest recent
one, at least the floor. A process that computes, or whose main thread keeps being woken (an upload
under way, a poll), does not stand still. Who is out of a collective may hang or may wait for
something else: nobody can tell. Giving it up costs little once, and everything where it repeats. So
after one such verdict the rest of this phase, and this place in every later one, have the ceiling.

When all wait at the same place nobody is blamed and the generation is to be tried again, each time
with twice the patience. So it is when a few went on to the vote without a collective that all the
others wait in: when the same comes again, they are blamed, and not those who wait.

Whoever waited for a rank that has died, heals or is given up has been standing for long, and needs
a moment to be woken: when one is judged no longer, the floor begins anew for the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from outlast.config import Limits
from outlast.events import Fault, FaultKind
from outlast.transport import worker_page
from outlast.transport.worker_page import WorkerObservation, is_judged, is_out

_S_NS = 1_000_000_000
_PACED = ("running", "voting")
_LEFT_NS = 1 * _S_NS  # pages are read one after the other: a contradiction must last this long
_STAGES: dict[str, int] = {"running": 1, "checkpoint": 1, "dry": 1, "voting": 2, "applying": 3}
_NEW_PATIENCE = 3  # times what others are given, for a process that has not run this kind itself
_NEW_FLOORS = 6  # and at most so many floors, unless the others' own patience is longer
_PLACES_MAX = 256  # where a rank was given up out of a collective; the oldest gives way


class WorkerHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the hang detector between observations. Start with `WorkerHistory()`."""

    stopped: dict[str, int] = {}  # worker -> first seen stopped
    blamed_ns: dict[str, int] = {}  # worker -> when it was blamed; said again after the floor
    retried: tuple[int, ...] = ()  # the last moves of those for whom a retry was asked for
    retries: int = 0  # in a row, before the same phase
    retried_n: int = -1
    excused: tuple[tuple[int, int], ...] = ()  # (key, collectives) of who was given up outside
    excused_n: int = -1  # the phase in which the newest of them was
    out: dict[str, tuple[int, int]] = {}  # worker -> (n, last move), of those outside
    stood: tuple[int, int] = (-1, 0)  # n, and the longest that a rank stood outside and went on
    judged: tuple[str, ...] = ()  # at the last look
    left_ns: int | None = None  # when one of them last was judged no longer: dead, or it heals


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """`suspects`: to be killed and replaced. `retry`: nobody is to blame, but nothing moves:
    say `Suspect(worker="", fault=retry)`, and the generation is closed and tried again."""

    suspects: tuple[Fault, ...] = ()
    retry: Fault | None = None


def timeout_ns(
    worker: WorkerObservation, looks: Iterable[WorkerObservation], limits: Limits
) -> int:
    """Return how long a rank may stand in a phase of its kind while others wait for it; `looks`: at
    all.

    A process that is new to this kind of phase is given several times what the others are."""
    ceiling_ns = int(limits.hang_ceiling_s * _S_NS)
    slowest_ns = [other.paces.get(worker.key, worker_page.UNSEEN).slowest_ns for other in looks]
    if worker.state not in _PACED or not any(slowest_ns):
        return ceiling_ns
    floor_ns = int(limits.hang_floor_s * _S_NS)
    known_ns = max(floor_ns, int(limits.hang_factor * max(slowest_ns)))
    if not worker.paces.get(worker.key, worker_page.UNSEEN).slowest_ns:
        known_ns = max(known_ns, min(_NEW_PATIENCE * known_ns, _NEW_FLOORS * floor_ns))
    return min(ceiling_ns, known_ns)


def _patience_ns(
    memory: WorkerHistory,
    worker: WorkerObservation,
    looks: tuple[WorkerObservation, ...],
    seated: list[WorkerObservation],
    limits: Limits,
) -> int:
    """Return what this rank is given where it stands now."""
    patience_ns = timeout_ns(worker, seated, limits)
    if not is_out(worker):
        return patience_ns
    ceiling_ns = int(limits.hang_ceiling_s * _S_NS)
    out = sum(map(is_out, seated))
    heals = any(other.seat >= 0 and other.state == "healing" for other in looks)
    excused = worker.n == memory.excused_n or (worker.key, worker.collectives) in memory.excused
    if excused or heals or 2 * out > len(seated):
        return ceiling_ns
    n, stood_ns = memory.stood
    peers_ns = int(limits.hang_factor * stood_ns) if n == worker.n else 0
    return min(ceiling_ns, max(patience_ns, peers_ns))


def watch(
    memory: WorkerHistory,
    looks: Iterable[WorkerObservation],
    now_ns: int,
    limits: Limits,
    *,
    unix_ns: int = 0,
) -> tuple[WorkerHistory, HangVerdict]:
    """One look at all workers of this host. `unix_ns`: the Unix time of `now_ns`."""
    looks = tuple(looks)
    seated = [worker for worker in looks if is_judged(worker)]
    memory = _remember(memory, looks, seated, now_ns)
    faults = _stopped(memory, looks, now_ns, limits)
    faults = faults or _left_collectives(looks, now_ns)
    if not faults:
        faults, retry = _stuck(memory, looks, seated, now_ns, limits)
        if retry is not None:
            if _moves(seated) == memory.retried:
                return memory, HangVerdict()
            memory = replace(
                memory, retried=_moves(seated), retries=memory.retries + 1, retried_n=retry.n
            )
            return memory, HangVerdict(retry=_at(retry, now_ns, unix_ns))
    floor_ns = int(limits.hang_floor_s * _S_NS)
    again_ns = now_ns - floor_ns
    fresh = [fault for fault in faults if memory.blamed_ns.get(fault.worker, again_ns) <= again_ns]
    blamed_ns = {**memory.blamed_ns, **{fault.worker: now_ns for fault in fresh}}
    memory = _excuse(replace(memory, blamed_ns=blamed_ns), seated, fresh)
    return memory, HangVerdict(suspects=tuple(_at(fault, now_ns, unix_ns) for fault in fresh))


def _moves(seated: list[WorkerObservation]) -> tuple[int, ...]:
    return tuple(worker.t_ns for worker in seated)


def _at(fault: Fault, now_ns: int, unix_ns: int) -> Fault:
    """The fault with its Unix time, where that is known."""
    t_ns = fault.t_ns + unix_ns - now_ns if unix_ns else 0
    return replace(fault, t_ns=t_ns)


def _remember(
    memory: WorkerHistory,
    looks: tuple[WorkerObservation, ...],
    seated: list[WorkerObservation],
    now_ns: int,
) -> WorkerHistory:
    """Return the history after these observations: times of stops and departures; workers that
    ended and retries of a finished phase are dropped."""
    stopped = {
        worker.worker: memory.stopped.get(worker.worker, now_ns)
        for worker in looks
        if worker.letter in "Tt"
    }
    names = {worker.worker for worker in looks}
    judged = tuple(worker.worker for worker in seated)
    over = bool(seated) and min(worker.n for worker in seated) != memory.retried_n
    n, stood_ns = memory.stood
    out: dict[str, tuple[int, int]] = {}
    for worker in seated:
        before_n, moved_ns = memory.out.get(worker.worker, (-1, 0))
        if worker.t_ns != moved_ns and before_n >= n:
            n, stood_ns = before_n, max(worker.t_ns - moved_ns, stood_ns if before_n == n else 0)
        if worker.state == "running" and is_out(worker):
            out[worker.worker] = worker.n, worker.t_ns
    return replace(
        memory,
        stopped=stopped,
        blamed_ns={name: t_ns for name, t_ns in memory.blamed_ns.items() if name in names},
        retries=0 if over else memory.retries,
        out=out,
        stood=(n, stood_ns),
        judged=judged,
        left_ns=memory.left_ns if set(memory.judged) <= set(judged) else now_ns,
    )


def _excuse(
    memory: WorkerHistory, seated: list[WorkerObservation], fresh: list[Fault]
) -> WorkerHistory:
    """Give nobody up once more where a rank was given up outside a collective."""
    blamed = {fault.worker for fault in fresh if fault.kind == "hung"}
    places = {
        (worker.key, worker.collectives): worker.n
        for worker in seated
        if worker.worker in blamed and is_out(worker) and worker.state == "running"
    }
    if not places:
        return memory
    excused = tuple(dict.fromkeys((*memory.excused, *places)))[-_PLACES_MAX:]
    return replace(memory, excused=excused, excused_n=max(places.values()))


def _stopped(
    memory: WorkerHistory, looks: tuple[WorkerObservation, ...], now_ns: int, limits: Limits
) -> list[Fault]:
    """The kernel says that the process is stopped: no page is needed to blame it."""
    faults = []
    for worker in looks:
        since_ns = memory.stopped.get(worker.worker)
        if since_ns is None:
            continue
        if now_ns - since_ns > int(limits.hang_floor_s * _S_NS):
            still_s = (now_ns - since_ns) / _S_NS
            detail = f"{_name(worker)} has been stopped (state {worker.letter}) for {still_s:.1f} s"
            faults.append(_fault("stopped", detail, worker, since_ns))
    return faults


def _left_collectives(looks: tuple[WorkerObservation, ...], now_ns: int) -> list[Fault]:
    """A rank whose script has ended, while others stand in a phase that it has not completed."""
    going = [
        worker
        for worker in looks
        if worker.seat >= 0
        and (worker.state in ("running", "voting") or (worker.state == "dry" and worker.n == 0))
        and now_ns - worker.t_ns > _LEFT_NS
    ]
    faults = []
    for worker in looks:
        waiting = [other for other in going if other.n == worker.n]
        if worker.state == "finished" and waiting and now_ns - worker.t_ns > _LEFT_NS:
            detail = (
                f"the script of {_name(worker)} exited after phase {worker.n}, while"
                f" {len(waiting)} other rank(s) went on to {_where(waiting[0])}: every rank must"
                " make the same calls of session.run"
            )
            faults.append(_fault("contract", detail, worker, worker.t_ns))
    return faults


def _stuck(
    memory: WorkerHistory,
    looks: tuple[WorkerObservation, ...],
    seated: list[WorkerObservation],
    now_ns: int,
    limits: Limits,
) -> tuple[list[Fault], Fault | None]:
    ceiling_ns = int(limits.hang_ceiling_s * _S_NS)
    if memory.left_ns is not None and now_ns - memory.left_ns <= int(limits.hang_floor_s * _S_NS):
        return [], None
    patience_ns = {
        worker.worker: _patience_ns(memory, worker, looks, seated, limits) for worker in seated
    }
    still = [
        worker
        for worker in seated
        if worker.worker not in memory.stopped  # which `_stopped` has a truer word for
        and (
            now_ns - _alive_ns(worker) > patience_ns[worker.worker]
            or now_ns - worker.t_ns > ceiling_ns
        )
    ]
    if not still:
        return [], None
    if out := [worker for worker in seated if is_out(worker)]:
        # Whoever waits may wait for one of these, however many collectives each has behind it.
        return [_hung(look, seated, now_ns, limits) for look in out if look in still], None
    last = min(_place(worker) for worker in seated)
    behind = [worker for worker in seated if _place(worker) == last]
    blamed = [worker for worker in behind if worker in still]
    progressed = _progressed(seated)
    if progressed:
        if len(blamed) < len(behind):
            return [], None  # whoever of them still computes may be waited for
        if not memory.retries or _moves(seated) == memory.retried:
            return [], _skipped("transport", progressed, behind)
        return [_skipped("hung", [look], behind) for look in progressed], None
    if len(behind) < len(seated):
        return [_hung(look, seated, now_ns, limits) for look in blamed], None
    if any(worker.seat >= 0 and worker.state == "healing" for worker in looks):
        return [], None  # the generation is over: they wait for the decision
    first = min(seated, key=lambda look: look.t_ns)
    still_ns = now_ns - max(worker.t_ns for worker in seated)
    doubled_ns = max(patience_ns.values()) << memory.retries
    if len(blamed) < len(seated) or still_ns <= min(ceiling_ns, doubled_ns):
        return [], None  # one of them still moves: the others may wait for it
    still_s = still_ns / _S_NS
    detail = (
        f"all {len(seated)} ranks have stood at the same place for {still_s:.1f} s"
        f" ({_where(first)}): a message was lost or everybody waits for everybody"
    )
    return [], Fault(kind="transport", detail=detail, n=first.n, t_ns=first.t_ns)


def _alive_ns(worker: WorkerObservation) -> int:
    """Return when it last showed that it goes on. Who waits for others is woken by its own
    timers."""
    return max(worker.t_ns, worker.t_work_ns, worker.t_woken_ns if is_out(worker) else 0)


def _progressed(seated: list[WorkerObservation]) -> list[WorkerObservation]:
    """Ranks in the vote, each with fewer collectives than the one that all others, who are no
    fewer, stand in. A rank that hangs behind a collective of a group of its own looks alike: this
    alone is no reason to kill anybody."""
    progressed = [worker for worker in seated if worker.state == "voting"]
    places = {_place(worker) for worker in seated if worker.state == "running"}
    others = [worker for worker in seated if worker.state not in ("voting", "running")]
    if not progressed or others or len(places) != 1 or 2 * len(progressed) > len(seated):
        return []
    n, _, collectives = places.pop()
    skipped = all(look.n == n and look.collectives < collectives for look in progressed)
    return progressed if skipped else []


def _skipped(
    kind: FaultKind, progressed: list[WorkerObservation], waiting: list[WorkerObservation]
) -> Fault:
    seats = ", ".join(str(look.seat) for look in progressed)
    ranks = f"rank {seats}" if len(progressed) == 1 else f"ranks {seats}"
    detail = (
        f"{ranks} went on to {_where(progressed[0])} after {progressed[0].collectives}"
        " collective(s), without"
        f" one that {len(waiting)} other rank(s) wait in ({_where(waiting[0])})"
    )
    fault = _fault(kind, detail, progressed[0], progressed[0].t_ns)
    return fault if kind == "hung" else replace(fault, worker="", seat=-1)


def _place(worker: WorkerObservation) -> tuple[int, int, int]:
    """Return the progress of a rank, comparable between ranks. Between phases its work of the last
    phase does not count."""
    stage = _STAGES.get(worker.state, 0)
    collectives = 0 if worker.state == "idle" else worker.collectives
    return worker.n, stage, collectives


def _hung(
    worker: WorkerObservation, seated: list[WorkerObservation], now_ns: int, limits: Limits
) -> Fault:
    still_s = (now_ns - worker.t_ns) / _S_NS
    others = _others(worker, seated)
    kernel = (
        " (uninterruptible: a disk or a driver does not answer)" if worker.letter == "D" else ""
    )
    detail = (
        f"{_name(worker)} has not moved for {still_s:.1f} s in {_where(worker)}{kernel}{others}"
    )
    if is_out(worker) and worker.state == "running" and still_s < limits.hang_ceiling_s:
        detail += (
            "; it stood outside any collective: where it waited for something else (an upload, a"
            f" rollout), it now has {limits.hang_ceiling_s:g} s at this place; to give all such"
            f" waits more from the start, set --limit hang_floor_s above {limits.hang_floor_s:g}"
        )
    return _fault("hung", detail, worker, worker.t_ns)


def _others(worker: WorkerObservation, seated: list[WorkerObservation]) -> str:
    """Return who waits for it, and where the nearest of them does."""
    waiting = [other for other in seated if other is not worker and not is_out(other)]
    if not is_out(worker):
        waiting = [other for other in waiting if _place(other) > _place(worker)]
    if not waiting:
        return ""
    where = _where(min(waiting, key=_place))
    return f"; {len(waiting)} other rank(s) wait for it ({where})"


def _name(worker: WorkerObservation) -> str:
    return f"rank {worker.seat}" if worker.seat >= 0 else f"spare {worker.worker}"


def _where(worker: WorkerObservation) -> str:
    if worker.state == "idle":
        return f"the script's own code before phase {worker.n + 1}"
    if worker.state == "voting":
        return f"the vote of phase {worker.n + 1}"
    if worker.state in ("starting", "setup"):
        return f"state {worker.state} before phase {worker.n + 1}"
    return f"phase {worker.n + 1}, {worker.state}, at collective {worker.collectives}"


def _fault(kind: FaultKind, detail: str, worker: WorkerObservation, t_ns: int) -> Fault:
    return Fault(
        kind=kind,
        detail=detail,
        worker=worker.worker,
        seat=worker.seat,
        n=worker.n,
        state=worker.state,
        t_ns=t_ns,
    )
