"""Hang detection from the status pages of a job's workers and their kernel process states.

`watch(memory, looks, now_ns, limits) -> (memory, verdict)` is pure and called per observation.
Times are CLOCK_MONOTONIC nanoseconds, as in the pages; faults carry Unix times.

The timeout of a rank without progress depends on its place and on the other ranks:

| the rank                               | the others                  | timeout                  |
|----------------------------------------|-----------------------------|--------------------------|
| is stopped (SIGSTOP, kernel state T)   | in any state                | `stopped_s`              |
| waits in a collective or the vote      | all wait at the same place  | phase timeout: all retry |
|                                        | wait elsewhere, none is out | phase timeout            |
|                                        | a rank is out of collectives| none: that rank is judged|
| is out of a collective, in an attempt  | at least half of all wait   | phase timeout, once      |
|                                        | more than half are out      | the ceiling              |
| is between phases, applies, sets up,.. | in any state                | the ceiling              |

The *phase timeout* ("patience" below) is `hang_factor` times the slowest recent phase of the same
kind in this run, at least the floor. A process that uses CPU time, or whose main thread is woken
repeatedly (upload, poll), makes progress. A rank outside a collective may hang or may wait for
something else, which cannot be distinguished. A wrong verdict is cheap once but not repeatedly. So
after one such verdict the rest of this phase, and this place in later phases, have the ceiling.

When all ranks wait at the same place, no rank is blamed and the generation is retried with a
doubled timeout. A retry also follows if a minority is in the vote but skipped a collective in which
the other ranks wait, and if ranks of a pipeline are not known to be behind their own replicas: they
may wait for another stage. If that recurs, the minority, or the ranks behind, are blamed.

When a rank that others waited for is no longer judged, their floor starts again: they wake now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.config import Limits
from outlast.controller.rank_places import (
    are_known_behind,
    is_before,
    name_of,
    place_of,
    ranks_behind,
    where_of,
)
from outlast.events import Fault, FaultKind
from outlast.transport import worker_page
from outlast.transport.worker_page import WorkerObservation, is_judged, is_out

_S_NS = 1_000_000_000
Parts = Literal["all", "stopped", "progress"]
_PACED = ("running", *worker_page.VOTE)
_LEFT_NS = 1 * _S_NS  # pages are not read atomically: a contradiction must last this long
_NEW_PATIENCE = 3  # factor on the timeout of a process that has not run this kind of phase itself
_NEW_FLOORS = 6  # its limit in floors, unless the other ranks' timeout is longer
_PLACES_MAX = 256  # bound of `excused`; the oldest places are dropped


class WorkerHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the hang detector between observations. Start with `WorkerHistory()`."""

    stopped: dict[str, int] = {}  # worker -> first seen stopped
    blamed_ns: dict[str, int] = {}  # worker -> time of its newest fault; repeated after the floor
    retried: tuple[int, ...] = ()  # last moves of the ranks at the newest retry
    retries: int = 0  # consecutive ones before the same phase
    retried_n: int = -1
    excused: tuple[tuple[int, int], ...] = ()  # (key, collectives) of ranks given up outside
    excused_n: int = -1  # phase of the newest `excused` place
    out: dict[str, tuple[int, int]] = {}  # worker -> (n, last move), of ranks outside
    stood: tuple[int, int] = (-1, 0)  # n, and the longest wait outside that ended
    judged: tuple[str, ...] = ()  # at the last observation
    left_ns: int | None = None  # when a worker last left `judged` (dead or healing)


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one observation. `suspects`: faults of workers to kill and replace. `retry`: no
    worker is to blame; send `Suspect(worker="", fault=retry)` to retry the generation."""

    suspects: tuple[Fault, ...] = ()
    retry: Fault | None = None


def timeout_ns(
    worker: WorkerObservation, looks: Iterable[WorkerObservation], limits: Limits
) -> int:
    """Return the timeout of a rank in its kind of phase while others wait; `looks`: all workers. A
    process that has not run this kind of phase before has a multiple of it."""
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
    """Return the timeout of this rank at its present place."""
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
    parts: Parts = "all",
) -> tuple[WorkerHistory, HangVerdict]:
    """Judge one observation of all workers. `unix_ns`: the Unix time of `now_ns`. `parts`: of a run
    of several nodes, each agent judges "stopped" processes, and the controller, which has the
    observations of all hosts, judges "progress"."""
    looks = tuple(looks)
    seated = [worker for worker in looks if is_judged(worker)]
    memory = _remember(memory, looks, seated, now_ns)
    faults = _stopped(memory, looks, now_ns, limits) if parts != "progress" else []
    if not faults and parts != "stopped":
        faults = _left_collectives(looks, now_ns)
    if not faults and parts != "stopped":
        faults, retry = _stuck(memory, looks, seated, now_ns, limits)
        if retry is not None:
            if (moves := _moves(seated)) == memory.retried:
                return memory, HangVerdict()
            memory = replace(memory, retried=moves, retries=memory.retries + 1, retried_n=retry.n)
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
    """Return the fault with its Unix time; 0 if unknown."""
    t_ns = fault.t_ns + unix_ns - now_ns if unix_ns else 0
    return replace(fault, t_ns=t_ns)


def _remember(
    memory: WorkerHistory,
    looks: tuple[WorkerObservation, ...],
    seated: list[WorkerObservation],
    now_ns: int,
) -> WorkerHistory:
    """Return the history after these observations, without ended workers or finished phases."""
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
        blamed_ns={name: memory.blamed_ns[name] for name in memory.blamed_ns.keys() & names},
        retries=0 if over else memory.retries,
        out=out,
        stood=(n, stood_ns),
        judged=judged,
        left_ns=memory.left_ns if set(memory.judged) <= set(judged) else now_ns,
    )


def _excuse(
    memory: WorkerHistory, seated: list[WorkerObservation], fresh: list[Fault]
) -> WorkerHistory:
    """Record the places of ranks given up outside a collective, which then have the ceiling."""
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
    """Return faults of processes that the kernel reports as stopped for too long."""
    faults = []
    for worker in looks:
        since_ns = memory.stopped.get(worker.worker)
        if since_ns is None:
            continue
        if now_ns - since_ns > int(limits.stopped_s * _S_NS):
            still_s = (now_ns - since_ns) / _S_NS
            name = name_of(worker)
            detail = f"{name} has been stopped (state {worker.letter}) for {still_s:.1f} s"
            faults.append(_fault("stopped", detail, worker, since_ns))
    return faults


def _left_collectives(looks: tuple[WorkerObservation, ...], now_ns: int) -> list[Fault]:
    """Return faults of ranks whose script ended while others are in a phase it did not complete."""
    going = [
        worker
        for worker in looks
        if worker.seat >= 0
        and (worker.state in _PACED or (worker.state == "dry" and worker.n == 0))
        and now_ns - worker.t_ns > _LEFT_NS
    ]
    faults = []
    for worker in looks:
        waiting = [other for other in going if other.n >= worker.n]
        if worker.state == "finished" and waiting and now_ns - worker.t_ns > _LEFT_NS:
            detail = (
                f"the script of {name_of(worker)} exited after phase {worker.n}, while"
                f" {len(waiting)} other rank(s) went on to {where_of(waiting[0])}: every rank must"
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
        if worker.worker not in memory.stopped  # reported by `_stopped`
        and (
            now_ns - _alive_ns(worker) > patience_ns[worker.worker]
            or now_ns - worker.t_ns > ceiling_ns
        )
    ]
    if not still:
        return [], None
    if out := [worker for worker in seated if is_out(worker)]:
        # Waiting ranks may wait for these ranks, whatever their counts of collectives.
        return [_hung(look, seated, now_ns, limits) for look in out if look in still], None
    behind = ranks_behind(seated)
    blamed = [worker for worker in behind if worker in still]
    is_first_time = not memory.retries or _moves(seated) == memory.retried
    progressed = _progressed(seated)
    if progressed:
        if len(blamed) < len(behind):
            return [], None  # a rank behind that still computes may be the cause
        if is_first_time:
            return [], _skipped("transport", progressed, behind)
        return [_skipped("hung", [look], behind) for look in progressed], None
    if len(behind) < len(seated):
        if is_first_time and not are_known_behind(behind, seated):
            return [], _stalled_pipeline(behind, now_ns) if len(blamed) == len(behind) else None
        return [_hung(look, seated, now_ns, limits) for look in blamed], None
    if any(worker.seat >= 0 and worker.state == "healing" for worker in looks):
        return [], None  # the generation has ended: ranks wait for the decision
    first = min(seated, key=lambda look: look.t_ns)
    still_ns = now_ns - max(worker.t_ns for worker in seated)
    doubled_ns = max(patience_ns.values()) << memory.retries
    if len(blamed) < len(seated) or still_ns <= min(ceiling_ns, doubled_ns):
        return [], None  # a rank still moves: the others may wait for it
    still_s = still_ns / _S_NS
    detail = (
        f"all {len(seated)} ranks have been at the same place for {still_s:.1f} s"
        f" ({where_of(first)}): a message was lost, or the ranks are deadlocked"
    )
    return [], Fault(kind="transport", detail=detail, n=first.n, t_ns=first.t_ns)


def _alive_ns(worker: WorkerObservation) -> int:
    """Return the time of the newest progress. Wake-ups count only outside a collective, since
    timers wake a waiting rank."""
    return max(worker.t_ns, worker.t_work_ns, worker.t_woken_ns if is_out(worker) else 0)


def _progressed(seated: list[WorkerObservation]) -> list[WorkerObservation]:
    """Return ranks in the vote, at most half, that skipped the collective in which all others wait.

    A rank that hangs behind a collective of a subgroup looks alike: this is no proof of a hang."""
    progressed = [worker for worker in seated if worker.state in worker_page.VOTE]
    comparable = {worker.stages for worker in progressed}
    running = [worker for worker in seated if worker.state == "running"]
    places = {place_of(worker) for worker in running if worker.stages in comparable}
    others = [worker for worker in seated if worker.state not in _PACED]
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
    first = progressed[0]
    detail = (
        f"{ranks} reached {where_of(first)} after {first.collectives} collective(s), but skipped"
        f" one that {len(waiting)} other rank(s) wait in ({where_of(waiting[0])})"
    )
    fault = _fault(kind, detail, first, first.t_ns)
    return fault if kind == "hung" else replace(fault, worker="", seat=-1)


def _stalled_pipeline(behind: list[WorkerObservation], now_ns: int) -> Fault:
    """Return the fault of a message between stages of a pipeline that has not arrived."""
    first = min(behind, key=lambda look: look.t_ns)
    names = ", ".join(name_of(look) for look in behind)
    detail = (
        f"the pipeline has stood for {(now_ns - first.t_ns) / _S_NS:.1f} s: {names} waited at"
        f" {where_of(first)}; a message between stages was lost, or a stage did not send it"
    )
    return Fault(kind="transport", detail=detail, n=first.n, t_ns=first.t_ns)


def _hung(
    worker: WorkerObservation, seated: list[WorkerObservation], now_ns: int, limits: Limits
) -> Fault:
    still_s = (now_ns - worker.t_ns) / _S_NS
    others = _others(worker, seated)
    kernel = (
        " (uninterruptible: a disk or a driver does not answer)" if worker.letter == "D" else ""
    )
    where = where_of(worker)
    detail = f"{name_of(worker)} made no progress for {still_s:.1f} s in {where}{kernel}{others}"
    if is_out(worker) and worker.state == "running" and still_s < limits.hang_ceiling_s:
        detail += (
            "; it was outside any collective: if it waited for something else (an upload, a"
            f" rollout), it now has {limits.hang_ceiling_s:g} s at this place; to allow all such"
            f" waits more time, set --limit hang_floor_s above {limits.hang_floor_s:g}"
        )
    return _fault("hung", detail, worker, worker.t_ns)


def _others(worker: WorkerObservation, seated: list[WorkerObservation]) -> str:
    """Return text: how many ranks wait for `worker`, and the place of the least advanced."""
    waiting = [other for other in seated if other is not worker and not is_out(other)]
    if not is_out(worker):
        waiting = [other for other in waiting if is_before(worker, other)]
    if not waiting:
        return ""
    where = where_of(min(waiting, key=place_of))
    return f"; {len(waiting)} other rank(s) wait for it ({where})"


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
