"""Worker process with its descendants: start by the shim, exit by pidfd, kill of the family."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from outlast.launch.host import reaper

_SHIM = Path(__file__).with_name("shim.py")
_PR_SET_CHILD_SUBREAPER = 36
KILL_S = 10.0  # from SIGKILL until all are zombies; only a broken kernel needs longer
REAPERS_MAX = 8  # replacements per launcher
TAIL_LINES = 40
_TAIL_BYTES = 64 << 10


def oom_kills(groups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Return how many processes the kernel has killed for want of memory: in the control group of
    this process, else on this host; -1 if that cannot be read."""
    places: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                places.append(groups / path.lstrip("/") / "memory.events")
            elif "memory" in kinds.split(","):
                places.append(groups / "memory" / path.lstrip("/") / "memory.oom_control")
    for place in (*places, proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split(maxsplit=1) for line in place.read_text().splitlines())
            if "oom_kill" in fields:
                return int(fields["oom_kill"])
    return -1


class ProcessIdentity(NamedTuple):
    """Environment and descriptors of a new worker."""

    name: str
    mark: str  # family mark, unique to this worker
    environment: dict[str, str]
    log_dir: Path
    control_fd: int  # the worker's end
    page_fd: int


class WorkerChild(Protocol):
    """Child of this process that has not been reaped."""

    @property
    def pid(self) -> int:
        """Process id, not reused before `wait` returns."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout: float) -> int:
        """Reap the child and return its exit code as subprocess does; raises TimeoutExpired."""
        ...


class ForkedWorker:
    """Worker forked by a template: a child of this process, like a spawned worker."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Reap the worker and return its exit code as subprocess does; raises TimeoutExpired."""
        deadline_s = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(0.001)  # a killed process becomes a zombie almost at once


def spawn(command: Sequence[str], born: ProcessIdentity) -> WorkerChild:
    """Start a worker's command as a new program; raises OSError."""
    with open_logs(born.log_dir) as (out, err):
        return subprocess.Popen(
            shim_command(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=born.environment,
            pass_fds=(born.control_fd, born.page_fd),
            start_new_session=True,
        )


def shim_command(command: Sequence[str]) -> list[str]:
    """Return a command that dies with this process and otherwise runs `command`."""
    return [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *command]


@contextlib.contextmanager
def open_logs(log_dir: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a worker's stdout.log and stderr.log for appending."""
    with (log_dir / "stdout.log").open("ab") as out, (log_dir / "stderr.log").open("ab") as err:
        yield out, err


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants, so that it can reap them.

    Raises OSError if the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class WorkerFamily:
    """Started worker process and its descendants.

    `on_exit` is called once in the event loop when the main process has died. The process stays a
    zombie, and its session id in use, until `reap` has killed and reaped the whole family.
    """

    def __init__(
        self,
        child: WorkerChild,
        born: ProcessIdentity,
        leaders: set[int],
        on_exit: Callable[[], None],
    ) -> None:
        self.name = born.name
        self.mark = born.mark
        self.log_dir = born.log_dir
        self._child = child
        self.pid = child.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # without a pidfd its exit would go unnoticed: kill it
            child.kill()
            child.wait(KILL_S)
            raise
        self._leaders = leaders  # pids of main processes and reaper, reaped by their owners
        leaders.add(self.pid)
        self._exit_code: int | None = None  # set once reaped
        # Known members: an exiting process loses its environment before it is a zombie.
        self._kin: set[tuple[int, int]] = set()
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._loop.add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._on_exit()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the main process; SIGKILL also ends a stopped process. `on_exit` follows."""
        if self._exit_code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    @property
    def killed_by(self) -> int:
        """Signal that killed the main process, before it is reaped; 0 if none did."""
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0
        ended = found is not None and found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return found.si_status if found is not None and ended else 0

    @property
    def state(self) -> str:
        """Kernel state letter (R S D T t Z), or "X" if the process does not exist."""
        stat = reaper.read_process_stat(self.pid)
        return stat.state if stat else "X"

    async def reap(self) -> int:
        """Kill and reap the whole family; return the main process's exit code. Idempotent.

        The exit code is as in subprocess: negative for a signal. Raises TimeoutError if a process
        survives SIGKILL for KILL_S seconds.
        """
        if self._exit_code is not None:
            return self._exit_code
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        pause_s = 0.001
        while alive := self._family():
            if time.monotonic() > deadline:
                remaining = ", ".join(f"{process.pid} ({process.state})" for process in alive)
                raise TimeoutError(
                    f"processes of worker {self.name} survive SIGKILL for {KILL_S:g} s: {remaining}"
                )
            for process in alive:
                reaper.kill(process)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        try:
            self._exit_code = self._child.wait(KILL_S)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"worker {self.name} cannot be reaped: {error}") from error
        self._leaders.discard(self.pid)
        # The loop may not have handled the exit yet, and the descriptor number will be reused.
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        return self._exit_code

    def _family(self) -> list[reaper.ProcessStat]:
        """Return the live processes of this family, without the main process's zombie; reap
        orphans that became zombies of this process."""
        processes = reaper.all_processes()
        us, our_session = os.getpid(), os.getsid(0)
        for process in list(processes.values()):
            # A zombie has no environment and so no mark. A child of this process in another
            # session that is not a leader can only be a worker's orphan.
            is_ours = process.parent == us and process.session != our_session
            if process.state in "ZX" and is_ours and process.pid not in self._leaders:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
                del processes[process.pid]
        roots = {
            pid
            for pid in reaper.descendants({us}, processes)
            if processes[pid].session == self.pid
            or (pid, processes[pid].started) in self._kin
            or reaper.is_marked(pid, self.mark)
        }
        family = [
            processes[pid]
            for pid in reaper.descendants(roots | {self.pid}, processes)
            if pid != self.pid or processes[pid].state not in "ZX"
        ]
        self._kin |= {(process.pid, process.started) for process in family}
        return family

    def stderr_tail(self) -> str:
        """Return the last TAIL_LINES lines of the worker's stderr."""
        return tail(self.log_dir / "stderr.log")


def tail(path: Path) -> str:
    """Return the last TAIL_LINES lines of a log, at most 64 KiB; "" if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])


def signal_name(number: int) -> str:
    """Return the name of a signal; most real-time signals have only a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        after = number - signal.SIGRTMIN
        return f"SIGRTMIN+{after}" if after > 0 else f"signal {number}"


class ReaperHandle:
    """Launcher-side handle of the reaper process, which outlives a killed launcher.

    Each worker's session is reported to the reaper. A dead reaper is replaced, with a note. Raises
    OSError if the first reaper cannot be started.
    """

    def __init__(
        self, mark: str, lock_fds: tuple[int, ...], leaders: set[int], note: Callable[[str], None]
    ) -> None:
        self._mark, self._lock_fds, self._leaders, self._note = mark, lock_fds, leaders, note
        self._sessions: set[int] = set()
        self._replacements = REAPERS_MAX
        self._loop = asyncio.get_running_loop()
        self._popen: subprocess.Popen[bytes] | None = None  # None: no reaper runs
        self._start()

    def add(self, session: int) -> None:
        """Report the session of a new worker to the reaper."""
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def remove(self, session: int) -> None:
        """Report that a worker's session has ended and was reaped."""
        self._sessions.discard(session)
        self._tell(f"-{session}\n")

    def dismiss(self) -> None:
        """End the reaper after it has killed the remaining workers; note surviving processes."""
        code = self._part(reaper.SWEEP_S + KILL_S)
        if code == 0:
            return
        if code != 1:  # killed, or no reaper: nothing was swept
            reaper.sweep(self._sessions, self._mark)
        if remaining := reaper.orphaned_processes(self._sessions, self._mark):
            pids = ", ".join(f"{process.pid} ({process.state})" for process in remaining)
            self._note(f"processes of this run survive SIGKILL and are left behind: {pids}")

    def _start(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(reaper.__file__)), self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=self._lock_fds,
            start_new_session=True,
            bufsize=0,
        )
        self._leaders.add(self._popen.pid)
        assert self._popen.stdin is not None
        self._stdin = self._popen.stdin
        # The pipe breaks when the reaper dies: no pidfd is needed.
        self._loop.add_reader(self._stdin, self._died)
        for session in self._sessions:
            self._tell(f"+{session}\n")

    def _tell(self, line: str) -> None:
        if self._popen:
            with contextlib.suppress(BrokenPipeError):  # `_died` follows
                self._stdin.write(line.encode())

    def _died(self) -> None:
        code = self._part(KILL_S)
        how = signal_name(-code) if code and code < 0 else f"exit code {code}"
        message = f"the reaper process, which cleans up after a killed launcher, has died ({how})"
        if not self._replacements:
            self._note(f"{message} too often to be replaced: only the workers themselves would die")
            return
        self._replacements -= 1
        try:
            self._start()
        except OSError as error:
            self._note(f"{message}, and another one cannot be started: {error}")
        else:
            self._note(f"{message}; another one was started")

    def _part(self, wait_s: float) -> int | None:
        """Close the pipe, kill the reaper after `wait_s`, and return its exit code."""
        popen, self._popen = self._popen, None
        if popen is None:
            return None
        self._loop.remove_reader(self._stdin)
        self._stdin.close()
        try:
            popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait(KILL_S)
        self._leaders.discard(popen.pid)
        return popen.returncode
