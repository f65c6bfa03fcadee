"""Runner of probes: child processes, all at once, each with a deadline.

A system call may wait for a dead file server for ever, and then not even SIGKILL ends it. So
nothing that may wait runs in this process, and a child that cannot be killed is left behind.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from outlast.health.check_contract import AbsentError, AnyCheck, Probe
from outlast.health.check_memory import StuckProcess

ANSWER_BYTES_MAX = 32 << 20
KILL_S = 0.3  # SIGKILL -> gone; then it is stuck
GRACE_S = 2.0  # after its deadline a child ends itself, whatever became of its parent
FDS_MAX = 1 << 16

SAMPLE, ABSENT, FAILED = b"s", b"a", b"f"


NOTHING = msgspec.Raw(b"null")


class TakenSample(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one probe. One of `sample` (JSON), `absent`, `failed` and `late` says it."""

    check: str
    device: str
    t_ns: int
    took_s: float
    sample: msgspec.Raw = NOTHING
    absent: str = ""
    failed: str = ""
    late: str = ""
    stuck: StuckProcess | None = None


class ProbeRequest(NamedTuple):
    check: AnyCheck
    probe: Probe

    @property
    def key(self) -> str:
        return f"{self.check.name}|{self.probe.device}"


class _Child:
    """`out`: where its answer is read. `life`: it dies when this is closed, also by our death."""

    def __init__(
        self, asked: ProbeRequest, pid: int, out: int, life: int, began: float, deadline: float
    ) -> None:
        self.asked, self.pid, self.out, self.life = asked, pid, out, life
        self.began, self.deadline = began, deadline
        self.data = bytearray()


def run_probes(
    asked: Iterable[ProbeRequest],
    *,
    within_s: float,
    stuck: Mapping[str, StuckProcess] | None = None,
) -> list[TakenSample]:
    """In the order of `asked`. `within_s`: all of them together. `stuck`: processes that earlier
    checks left behind."""
    until = time.monotonic() + within_s
    order: list[str] = []
    done: dict[str, TakenSample] = {}
    waiting: list[_Child] = []
    for one in asked:
        order.append(one.key)
        left = (stuck or {}).get(one.key)
        if left and is_alive(left):
            since_s = (time.time_ns() - left.since_ns) / 1e9
            late = f"the probe of {since_s:.0f} s ago (process {left.pid}) is still stuck"
            done[one.key] = _sample_of(one, 0.0, late=late, stuck=left)
            continue
        try:
            waiting.append(_start_child(one, until))
        except OSError as error:
            done[one.key] = _sample_of(
                one, 0.0, failed=f"no process for the probe: {error.strerror}"
            )
    try:
        while waiting := [child for child in waiting if not _settled(child, done)]:
            _wait(waiting)
    except BaseException:
        for child in waiting:
            if child.asked.key not in done:
                _ended(child)
        raise
    return [done[key] for key in order]


def _wait(children: list[_Child]) -> None:
    """Until one of them answers, or is late."""
    pause_s = max(0.0, min(child.deadline for child in children) - time.monotonic())
    poll = select.poll()
    for child in children:
        poll.register(child.out, select.POLLIN)
    poll.poll(min(pause_s, 1.0) * 1000 + 1)


def _start_child(one: ProbeRequest, until: float) -> _Child:
    """Raises OSError where there can be no more processes or files."""
    began = time.monotonic()
    deadline = min(began + one.probe.deadline_s, until)
    ours, theirs = os.pipe()
    try:
        # Another pipe than that of the answer: of one that is read, each reading is an event.
        life, held = os.pipe()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    os.set_blocking(ours, False)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns where the caller has threads: whatever one of them holds in the
            # child, the deadline ends it.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:
        for end in (ours, theirs, life, held):
            os.close(end)
        raise
    if pid == 0:
        _answer(one.probe, theirs, held, deadline - began + GRACE_S)
    os.close(theirs)
    os.close(held)
    return _Child(one, pid, ours, life, began, deadline)


def _answer(probe: Probe, out: int, held: int, alarm_s: float) -> NoReturn:
    """The child's life. It keeps nothing of its parent's open: a lock or a pipe that it held would
    outlive the check. Does not return."""
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(alarm_s, 0.1))
        _die_with_reader(held)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        low, high = sorted((out, held))
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, FDS_MAX)
        _write(out, _run_probe(probe))
    finally:
        os._exit(0)


def _die_with_reader(held: int) -> None:
    """SIGIO ends this process and what it started when the other end of the pipe is closed: its
    parent was killed. (prctl would need ctypes, which takes longer than most probes.)"""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(held, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(held, fcntl.F_SETFL, os.O_ASYNC)


def _run_probe(probe: Probe) -> bytes:
    try:
        return SAMPLE + msgspec.json.encode(probe.take())
    except AbsentError as error:
        return ABSENT + str(error).encode("utf-8", "replace")
    except Exception as error:  # noqa: BLE001 - whatever a probe raises, it could not tell
        said = f"{type(error).__name__}: {error}"
        return FAILED + said.encode("utf-8", "replace")[:2000]


def _write(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def _settled(child: _Child, done: dict[str, TakenSample]) -> bool:
    took_s = time.monotonic() - child.began
    try:
        while chunk := os.read(child.out, 1 << 20):
            child.data += chunk
            if len(child.data) > ANSWER_BYTES_MAX:
                break
    except BlockingIOError:
        if time.monotonic() < child.deadline:
            return False
        stuck = _ended(child)
        left = f"; process {stuck.pid} cannot be killed, and was left behind" if stuck else ""
        late = f"no answer within {child.deadline - child.began:.1f} s{left}"
        done[child.asked.key] = _sample_of(child.asked, took_s, late=late, stuck=stuck)
        return True
    _ended(child)
    done[child.asked.key] = _decoded(child.asked, bytes(child.data), took_s)
    return True


def _decoded(asked: ProbeRequest, data: bytes, took_s: float) -> TakenSample:
    kind, body = data[:1], data[1:]
    if len(data) > ANSWER_BYTES_MAX:
        return _sample_of(asked, took_s, failed=f"a sample of over {ANSWER_BYTES_MAX:,} bytes")
    if kind == SAMPLE:
        return _sample_of(asked, took_s, sample=msgspec.Raw(body))
    text = body.decode("utf-8", "replace")
    if kind == ABSENT:
        return _sample_of(asked, took_s, absent=text)
    return _sample_of(asked, took_s, failed=text or "the process of the probe died")


def _sample_of(asked: ProbeRequest, took_s: float, **what: Any) -> TakenSample:
    return TakenSample(
        check=asked.check.name, device=asked.probe.device, t_ns=time.time_ns(),
        took_s=round(took_s, 4), **what,
    )  # fmt: skip


def _ended(child: _Child) -> StuckProcess | None:
    """The child and all that it started are killed; None where they are gone."""
    os.close(child.out)
    os.close(child.life)
    start = _start_of(child.pid)
    for kill in (os.killpg, os.kill):  # before its setsid there is no such group yet
        try:
            kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    try:
        pidfd = os.pidfd_open(child.pid)
        try:
            gone, _, _ = select.select([pidfd], [], [], KILL_S)
        finally:
            os.close(pidfd)
        if gone:
            os.waitpid(child.pid, 0)
            return None
    except ChildProcessError:
        return None
    return StuckProcess(child.pid, start, time.time_ns())


def _start_of(pid: int) -> int:
    """Ticks from boot to the start of a process; 0 where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(stuck: StuckProcess) -> bool:
    """The same process, not one that has its number now."""
    return stuck.start != 0 and _start_of(stuck.pid) == stuck.start


def stuck_processes(taken: Sequence[TakenSample]) -> dict[str, StuckProcess]:
    """What to remember of processes that were left behind."""
    return {f"{one.check}|{one.device}": one.stuck for one in taken if one.stuck}
