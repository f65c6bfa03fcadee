"""Runner of probes: child processes, all at once, each with a deadline.

A system call may wait for a dead file server without end, and even SIGKILL does not end it. So
blocking calls run only in child processes, and a child that cannot be killed is abandoned.
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
KILL_S = 0.3  # from SIGKILL to the exit; later it counts as stuck
GRACE_S = 2.0  # after its deadline a child ends itself, even if its parent is dead
FDS_MAX = 1 << 16

SAMPLE = b"s"
ABSENT = b"a"
FAILED = b"f"


NOTHING = msgspec.Raw(b"null")


class TakenSample(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one probe: one of `sample` (JSON), `absent`, `failed` and `late` is set."""

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
    """A probe to run, and its check."""

    check: AnyCheck
    probe: Probe

    @property
    def key(self) -> str:
        """Identity of the probe: check and device."""
        return f"{self.check.name}|{self.probe.device}"


class _Child:
    """Child process of a probe.

    `out`: pipe of its answer. `life`: the child ends when this pipe closes, also if the
    parent dies.
    """

    def __init__(
        self, request: ProbeRequest, pid: int, out: int, life: int, began: float, deadline: float
    ) -> None:
        self.request = request
        self.pid = pid
        self.out = out
        self.life = life
        self.began = began
        self.deadline = deadline
        self.data = bytearray()


def run_probes(
    requests: Iterable[ProbeRequest],
    *,
    within_s: float,
    stuck: Mapping[str, StuckProcess] | None = None,
) -> list[TakenSample]:
    """Run all probes at once and return their outcomes in the order of the requests.

    `within_s`: time limit of all together. `stuck`: stuck processes of earlier checks, by key.
    """
    until = time.monotonic() + within_s
    order: list[str] = []
    done: dict[str, TakenSample] = {}
    waiting: list[_Child] = []
    for one in requests:
        order.append(one.key)
        old = (stuck or {}).get(one.key)
        if old and is_alive(old):
            since_s = (time.time_ns() - old.since_ns) / 1e9
            late = f"the probe of {since_s:.0f} s ago (process {old.pid}) is still stuck"
            done[one.key] = _sample_of(one, 0.0, late=late, stuck=old)
            continue
        try:
            waiting.append(_start_child(one, until))
        except OSError as error:
            done[one.key] = _sample_of(
                one, 0.0, failed=f"the probe could not be started: {error.strerror}"
            )
    try:
        while waiting := [child for child in waiting if not _has_ended(child, done)]:
            _wait(waiting)
    except BaseException:
        for child in waiting:
            if child.request.key not in done:
                _kill(child)
        raise
    return [done[key] for key in order]


def _wait(children: list[_Child]) -> None:
    """Wait until a child answers or misses its deadline."""
    pause_s = max(0.0, min(child.deadline for child in children) - time.monotonic())
    poll = select.poll()
    for child in children:
        poll.register(child.out, select.POLLIN)
    poll.poll(min(pause_s, 1.0) * 1000 + 1)


def _start_child(one: ProbeRequest, until: float) -> _Child:
    """Fork a child. Raises OSError if no process or file descriptor is available."""
    began = time.monotonic()
    deadline = min(began + one.probe.deadline_s, until)
    answer, childs_answer = os.pipe()
    try:
        # A separate pipe: each read of the answer's pipe would raise SIGIO.
        life, childs_end = os.pipe()
    except OSError:
        os.close(answer)
        os.close(childs_answer)
        raise
    os.set_blocking(answer, False)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns if the caller has threads. A lock that one of them holds may block
            # the child, which the deadline ends.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError:
        for end in (answer, childs_answer, life, childs_end):
            os.close(end)
        raise
    if pid == 0:
        _answer(one.probe, childs_answer, childs_end, deadline - began + GRACE_S)
    os.close(childs_answer)
    os.close(childs_end)
    return _Child(one, pid, answer, life, began, deadline)


def _answer(probe: Probe, out: int, life: int, alarm_s: float) -> NoReturn:
    """Run the probe in the child, answer, and exit.

    The child closes all inherited files: a lock or a pipe of its parent would outlive the check.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(alarm_s, 0.1))
        _end_with_parent(life)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        low, high = sorted((out, life))
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, FDS_MAX)
        _write(out, _run_probe(probe))
    finally:
        os._exit(0)


def _end_with_parent(life: int) -> None:
    """Arrange that SIGIO ends the process group when the other end of the pipe is closed.

    That happens when the parent is killed. (prctl would need ctypes, whose import takes longer than
    most probes.)
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)


def _run_probe(probe: Probe) -> bytes:
    try:
        return SAMPLE + msgspec.json.encode(probe.take())
    except AbsentError as error:
        return ABSENT + str(error).encode("utf-8", "replace")
    except Exception as error:  # noqa: BLE001 - any error of a probe is its outcome
        reason = f"{type(error).__name__}: {error}"
        return FAILED + reason.encode("utf-8", "replace")[:2000]


def _write(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def _has_ended(child: _Child, done: dict[str, TakenSample]) -> bool:
    took_s = time.monotonic() - child.began
    try:
        while chunk := os.read(child.out, 1 << 20):
            child.data += chunk
            if len(child.data) > ANSWER_BYTES_MAX:
                break
    except BlockingIOError:
        if time.monotonic() < child.deadline:
            return False
        stuck = _kill(child)
        abandoned = f"; process {stuck.pid} cannot be killed, and was abandoned" if stuck else ""
        late = f"no answer within {child.deadline - child.began:.1f} s{abandoned}"
        done[child.request.key] = _sample_of(child.request, took_s, late=late, stuck=stuck)
        return True
    _kill(child)
    done[child.request.key] = _decode_answer(child.request, bytes(child.data), took_s)
    return True


def _decode_answer(request: ProbeRequest, data: bytes, took_s: float) -> TakenSample:
    kind = data[:1]
    body = data[1:]
    if len(data) > ANSWER_BYTES_MAX:
        return _sample_of(
            request, took_s, failed=f"a sample larger than {ANSWER_BYTES_MAX:,} bytes"
        )
    if kind == SAMPLE:
        return _sample_of(request, took_s, sample=msgspec.Raw(body))
    text = body.decode("utf-8", "replace")
    if kind == ABSENT:
        return _sample_of(request, took_s, absent=text)
    return _sample_of(request, took_s, failed=text or "the process of the probe died")


def _sample_of(request: ProbeRequest, took_s: float, **what: Any) -> TakenSample:
    return TakenSample(
        check=request.check.name,
        device=request.probe.device,
        t_ns=time.time_ns(),
        took_s=round(took_s, 4),
        **what,
    )


def _kill(child: _Child) -> StuckProcess | None:
    """Kill the child and its group; return it as stuck if it does not die."""
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
            exited, _, _ = select.select([pidfd], [], [], KILL_S)
        finally:
            os.close(pidfd)
        if exited:
            os.waitpid(child.pid, 0)
            return None
    except ChildProcessError:
        return None
    return StuckProcess(child.pid, start, time.time_ns())


def _start_of(pid: int) -> int:
    """Return the ticks from boot to the start of a process; 0 if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(stuck: StuckProcess) -> bool:
    """Return whether the same process, not one with a reused id, still exists."""
    return stuck.start != 0 and _start_of(stuck.pid) == stuck.start


def stuck_processes(taken: Sequence[TakenSample]) -> dict[str, StuckProcess]:
    """Return the stuck processes to remember, by the key of their probe."""
    return {f"{one.check}|{one.device}": one.stuck for one in taken if one.stuck}
