"""Launcher-side handles of a host's template process and of its forked workers.

| state   | worker starts                 | next state                                           |
|---------|-------------------------------|------------------------------------------------------|
| unused  | wait; `awaits` starts loading | loading; off if no template can be used              |
| loading | wait for the first template   | ready; loading or off on exit or timeout             |
| ready   | wait for their forks          | loading on exit, timeout or outdated modules         |
| off     | are spawned                   | none                                                 |

In the states loading (but for the first template) and off, starts do not wait: workers are spawned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from outlast import config
from outlast.errors import WireError
from outlast.launch.host import worker_family
from outlast.launch.host.reaper import MARK_VARIABLE
from outlast.launch.host.worker_environment import common_environment
from outlast.launch.host.worker_family import ForkedWorker, ProcessIdentity, ReaperHandle
from outlast.launch.run_directory import RunDir
from outlast.launch.template import script_imports
from outlast.launch.template import template_frames as frames
from outlast.launch.torchrun.worker_commands import can_be_forked
from outlast.launch.torchrun_arguments import RunPlan

LOAD_S = 60.0
FORK_S = 5.0  # for each fork, then workers are spawned
TEMPLATES_MAX = 8  # per launcher
_ENTRY = Path(frames.__file__).with_name("entry")
_END_S = 0.5  # timeout for process exit after its socket has closed
_MARK_LENGTH = 200  # maximum length of a worker's family mark
Started = TypeVar("Started")


class _UnnamedFork(NamedTuple):
    """Forked worker that waits for its identity."""

    worker: ForkedWorker
    gate: socket.socket


class WorkerTemplate:
    """Template process of one run.

    A worker start calls `awaits`, which requests one fork. When all requested forks have been
    answered, the starts go on and `claim` their forks, in one turn of the event loop.
    """

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        mark: str,
        leaders: set[int],
        reaper: ReaperHandle,
        note: Callable[[str], None],
    ) -> None:
        self._plan, self._run_dir, self._mark = plan, run_dir, mark
        self._leaders, self._reaper, self._note = leaders, reaper, note
        self._loop = asyncio.get_running_loop()
        self._state: Literal["unused", "loading", "ready", "off"] = "unused"
        self._templates = 0
        self._on_settled: list[Callable[[], None]] = []
        self._wanted = 0  # forks that have been requested and not been answered
        self._asked: socket.socket | None = None  # gate of the request at the template
        self._forks: list[_UnnamedFork] = []
        self._settling = False  # the starts go on
        self._popen: subprocess.Popen[bytes]
        self._socket: socket.socket
        self._timer: asyncio.TimerHandle
        self._ready: frames.TemplateReady
        self._conditions: object = None
        self._gates: set[socket.socket] = set()

    def awaits(self, on_settled: Callable[[], None]) -> bool:
        """Return whether one worker's start must wait, for the first template or for its fork.

        `on_settled` is called once for all waiting starts, when they need no longer wait; they
        must all go on in that call.
        """
        if self._settling:
            return False
        if self._state == "unused":
            self._modules = self._modules_wanted()
            self._state = "off"
            if self._modules:
                self._load()
        if self._state == "ready":
            self._wanted += 1
            if self._asked is None:
                self._ask()
        must_wait = self._state == "ready" or (self._state == "loading" and self._templates == 1)
        if must_wait and on_settled not in self._on_settled:
            self._on_settled.append(on_settled)
        return must_wait

    async def when_settled(self, start: Callable[[], Started], workers: int = 1) -> Started:
        """Call `start`, which starts a number of workers, once their forks can be claimed."""
        started: asyncio.Future[Started] = self._loop.create_future()

        def go_on() -> None:
            if started.done():  # cancelled
                return
            try:
                started.set_result(start())
            except Exception as error:  # noqa: BLE001 - raised again by the caller's await
                started.set_exception(error)

        waits = [self.awaits(go_on) for _ in range(workers)]
        return await started if any(waits) else start()

    def _modules_wanted(self) -> tuple[str, ...]:
        """Return the modules for the template to import; empty if all workers are spawned."""
        plan = self._plan
        if not plan.template or not can_be_forked(plan.command):
            return ()
        if plan.command[2] == "-m":
            directory = Path.cwd()
            file = script_imports.module_file(plan.command[3], [str(directory), *sys.path])
        else:
            file = Path(plan.command[2]).resolve()
            directory = file.parent
        modules = script_imports.template_modules(file, directory) if file else ()
        if not modules:
            return ()
        if (environment := common_environment(plan))["PYTHONHASHSEED"] == "random":
            self._note("workers are spawned: with PYTHONHASHSEED=random each has a seed of its own")
            return ()
        if Path(plan.command[0]) != Path(sys.executable):
            self._note(
                "workers are spawned: PYTHON_EXEC is another interpreter than the launcher's"
            )
            return ()
        self._script_dir = None if environment.get("PYTHONSAFEPATH") else str(directory)
        return modules

    # --- process lifecycle ---

    def _load(self) -> None:
        """Start a template process; set state off after TEMPLATES_MAX."""
        if self._templates >= TEMPLATES_MAX:
            self._state = "off"
            self._note(f"workers are spawned: {TEMPLATES_MAX} template processes have ended")
            self._settle()
            return
        self._templates += 1
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._conditions = self._conditions_now()
        try:
            log_dir = self._log_dir() / str(self._templates)
            log_dir.mkdir(parents=True, exist_ok=True)
            with theirs, worker_family.open_logs(log_dir) as (out, err):
                self._popen = subprocess.Popen(
                    worker_family.shim_command(self._plan.command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=self._environment(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            self._socket.close()
            self._state = "off"
            self._note(f"workers are spawned: no template process can be started: {error}")
            self._settle()
            return
        self._state = "loading"
        self._leaders.add(self._popen.pid)
        self._reaper.add(self._popen.pid)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._readable)
        self._timer = self._loop.call_later(
            LOAD_S, self._lose, f"it has not loaded in {LOAD_S:g} s"
        )

    def _log_dir(self) -> Path:
        folder = self._run_dir.room("logs") / "template"
        return folder / socket.gethostname() if self._plan.node.total > 1 else folder

    def _environment(self, socket_fd: int) -> dict[str, str]:
        environment = common_environment(self._plan)
        python_path = environment.get("PYTHONPATH")
        settings = config.TemplateSettings(
            launcher=os.getpid(),
            run_dir=str(self._run_dir.path.absolute()),
            socket_fd=socket_fd,
            entry=str(_ENTRY),
            python_path=python_path,
            script_dir=self._script_dir,
            command=self._plan.command,
            modules=self._modules,
        )
        return {
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_ENTRY), python_path))),
            MARK_VARIABLE: f"{self._mark}:template;".ljust(_MARK_LENGTH),
            config.TEMPLATE_VARIABLE: msgspec.json.encode(settings).decode(),
        }

    def _conditions_now(self) -> object:
        """Return environment, directory and CPU affinity that a new process would inherit."""
        return (common_environment(self._plan), str(Path.cwd()), os.sched_getaffinity(0))

    def _readable(self) -> None:
        try:
            packet = frames.receive(self._socket)
            if not packet.data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(_END_S)
                self._lose("it closed its socket")
                return
            message = frames.parse_answer(packet.data)
        except (OSError, WireError) as error:
            self._lose(str(error))
            return
        match message:
            case frames.TemplateReady() if message.home != str(Path(config.__file__).parent):
                self._give_up(f"it imports outlast from {message.home}")
            case frames.TemplateReady():
                self._timer.cancel()
                self._ready, self._state = message, "ready"
                self._call_settled()
            case frames.TemplateRefused():
                self._give_up(message.reason)
            case frames.Forked() if self._asked:
                self._add_fork(ForkedWorker(message.pid), self._asked)
            case frames.ForkRefused():
                self._lose(message.reason)
            case _:  # a late answer cannot arrive: its timeout has already ended the template
                self._lose("it sent an unexpected answer")

    def _settle(self) -> None:
        """Let the waiting starts go on; drop the forks that none of them has claimed."""
        self._settling = True
        try:
            self._call_settled()
        finally:
            self._settling = False
            self._drop_forks()

    def _call_settled(self) -> None:
        waiting, self._on_settled = self._on_settled, []
        for on_settled in waiting:
            on_settled()

    def _lose(self, reason: str) -> None:
        """Kill the process and load another; set state off if the first was still loading."""
        was_first = self._state == "loading" and self._templates == 1
        how = self._end()
        self._note(
            f"the template process {how} ({reason}); "
            + "workers are spawned"
            + ("" if was_first else " while another one loads")
            + f"; its output is in {self._log_dir()}"
        )
        if not was_first:
            self._load()
        self._settle()

    def _give_up(self, reason: str) -> None:
        """Kill the process and set state off: all further workers are spawned."""
        self._end()
        self._note(f"workers are spawned, not forked from a template process: {reason}")
        self._settle()

    def _end(self) -> str:
        """Kill the process and its unreported forks; return how it ended, as text."""
        self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._state, self._wanted = "off", 0
        if self._asked:
            self._asked.close()  # an unreported fork exits
            self._asked = None
        self._drop_forks()
        pid = self._popen.pid
        code = self._popen.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._popen.wait(worker_family.KILL_S)
        deadline_s = time.monotonic() + FORK_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline_s:
                os.waitpid(-pid, os.WNOHANG)
                time.sleep(0.001)  # killed children take a moment to become zombies
        self._leaders.discard(pid)
        self._reaper.remove(pid)
        if code is None:
            return "was ended"
        return f"was killed by {worker_family.signal_name(-code)}" if code < 0 else "has ended"

    def close(self) -> None:
        """Kill the process and close all gates."""
        if self._state in ("loading", "ready"):
            self._end()
        self._state = "off"
        for gate in list(self._gates):
            self._drop(gate)

    # --- forks ---

    @property
    def pid(self) -> int:
        """Process id of the newest template process."""
        return self._popen.pid

    @property
    def fds(self) -> tuple[int, int] | None:
        """Descriptors of control socket and page in forked workers; None if not ready."""
        return (self._ready.control_fd, self._ready.page_fd) if self._state == "ready" else None

    def _ask(self) -> None:
        """Request one fork; the answer or the deadline follows."""
        if self._conditions != self._conditions_now():
            self._lose("the launcher's environment, directory or processors have changed")
            return
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                frames.send(self._socket, frames.ForkRequest(), (theirs.fileno(),))
        except OSError as error:
            self._lose(f"it cannot be asked for a worker: {error}")
            return
        self._timer = self._loop.call_later(FORK_S, self._lose, f"no worker within {FORK_S:g} s")

    def _add_fork(self, worker: ForkedWorker, gate: socket.socket) -> None:
        self._timer.cancel()
        self._leaders.add(worker.pid)
        self._forks.append(_UnnamedFork(worker, gate))
        self._asked = None
        self._wanted -= 1
        if self._wanted:
            self._ask()
        else:
            self._settle()

    def _drop_forks(self) -> None:
        """Kill and reap the forks that no worker start has claimed."""
        while self._forks:
            fork = self._forks.pop()
            fork.gate.close()
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                fork.worker.kill()
                fork.worker.wait(worker_family.KILL_S)
            self._leaders.discard(fork.worker.pid)

    def claim(self, born: ProcessIdentity) -> ForkedWorker | None:
        """Start a fork as this worker; return None if it must be spawned. Raises OSError."""
        if not self._forks:
            return None
        try:
            environment_fd = frames.environment_file(born.environment)
        except WireError as error:
            self._note(f"worker {born.name} is spawned: {error}")
            return None
        try:
            with worker_family.open_logs(born.log_dir) as (out, err):
                fork = self._forks.pop(0)
                fds = (out.fileno(), err.fileno(), born.control_fd, born.page_fd, environment_fd)
                with contextlib.suppress(OSError):  # its pidfd reports its death
                    frames.send(fork.gate, frames.Identity(mark=born.mark), fds)
        finally:
            os.close(environment_fd)
        fork.gate.setblocking(False)
        self._gates.add(fork.gate)
        self._loop.add_reader(fork.gate, self._hear, fork.gate)
        return fork.worker

    def _hear(self, gate: socket.socket) -> None:
        try:
            packet = frames.receive(gate)
            message = frames.parse(packet.data, frames.Restarted) if packet.data else None
        except (OSError, WireError):
            message = None
        if message is None:  # the worker closed the gate
            self._drop(gate)
        elif self._state != "off":
            self._give_up(f"the script must be started anew: {message.reason}")

    def _drop(self, gate: socket.socket) -> None:
        self._gates.discard(gate)
        self._loop.remove_reader(gate)
        gate.close()
