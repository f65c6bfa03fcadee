"""Launcher-side handles of a host's template process and of its forked workers.

| state   | worker starts                 | next state                                           |
|---------|-------------------------------|------------------------------------------------------|
| unused  | wait; `awaits` starts loading | loading; off if no template can be used              |
| loading | wait for the first template   | ready; loading or off on exit or timeout             |
| ready   | are forked                    | loading on exit, timeout or outdated modules         |
| off     | are spawned                   | none                                                 |
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
from typing import Literal

import msgspec

from outlast import config
from outlast.errors import WireError
from outlast.launch.host import worker_family
from outlast.launch.host.reaper import MARK_VARIABLE
from outlast.launch.host.worker_environment import common_environment
from outlast.launch.host.worker_family import ProcessIdentity, ReaperHandle
from outlast.launch.run_directory import RunDir
from outlast.launch.template import script_imports
from outlast.launch.template import template_frames as frames
from outlast.launch.torchrun_arguments import RunPlan

LOAD_S = 60.0
FORK_S = 5.0  # blocks the launcher: well below its lease
TEMPLATES_MAX = 8  # per launcher
_ENTRY = Path(frames.__file__).with_name("entry")
_END_S = 0.5  # timeout for process exit after its socket has closed
_MARK_LENGTH = 200  # maximum length of a worker's family mark


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


class WorkerTemplate:
    """Template process of one run."""

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
        self._on_settled: Callable[[], None] | None = None
        self._popen: subprocess.Popen[bytes]
        self._socket: socket.socket
        self._timer: asyncio.TimerHandle
        self._ready: frames.TemplateReady
        self._conditions: object = None
        self._gates: set[socket.socket] = set()

    def awaits(self, on_settled: Callable[[], None]) -> bool:
        """Return whether worker starts must wait for the first template; start it if unused.

        `on_settled` is called once, when starts need no longer wait.
        """
        if self._state == "unused":
            self._modules = self._modules_wanted()
            self._state = "off"
            if self._modules:
                self._load()
        if self._state == "loading" and self._templates == 1:
            self._on_settled = on_settled
            return True
        return False

    def _modules_wanted(self) -> tuple[str, ...]:
        """Return the modules for the template to import; empty if all workers are spawned."""
        plan = self._plan
        if not plan.template or plan.command[1:2] != ("-u",):
            return ()
        if plan.command[2] == "-m":
            directory = Path.cwd()
            file = script_imports.module_file(plan.command[3], [str(directory), *sys.path])
        else:
            file = Path(plan.command[2]).resolve()
            directory = file.parent
        modules = script_imports.template_modules(file, directory) if file else ()
        environment = common_environment(plan)
        if not modules:
            return ()
        if environment["PYTHONHASHSEED"] == "random":
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
            log_dir = self._run_dir.room("logs") / "template" / str(self._templates)
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
        self._socket.settimeout(FORK_S)
        self._loop.add_reader(self._socket, self._readable)
        self._timer = self._loop.call_later(
            LOAD_S, self._lose, f"it has not loaded in {LOAD_S:g} s"
        )

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
                self._settle()
            case frames.TemplateRefused():
                self._give_up(message.reason)
            case _:  # a late answer cannot arrive: its timeout has already ended the template
                self._lose("it sent an unexpected answer")

    def _settle(self) -> None:
        on_settled, self._on_settled = self._on_settled, None
        if on_settled:
            on_settled()

    def _lose(self, reason: str) -> None:
        """Kill the process and load another; set state off if the first was still loading."""
        was_first = self._state == "loading" and self._templates == 1
        how = self._end()
        self._note(
            f"the template process {how} ({reason}); "
            + "workers are spawned"
            + ("" if was_first else " while another one loads")
            + f"; its output is in {self._run_dir.room('logs') / 'template'}"
        )
        if was_first:
            self._state = "off"
            self._settle()
        else:
            self._load()

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
        self._state = "off"
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

    def fork(self, born: ProcessIdentity) -> ForkedWorker | None:
        """Fork a worker; return None if it must be spawned."""
        if self._conditions != self._conditions_now():
            self._lose("the launcher's environment, directory or processors have changed")
            return None
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                answer = self._ask(born, theirs)
        except (OSError, WireError) as error:
            gate.close()
            self._lose(f"no worker within {FORK_S:g} s: {error}")
            return None
        match answer:
            case frames.Forked():
                with contextlib.suppress(OSError):  # its pidfd reports its death
                    gate.send(frames.GO)
                gate.setblocking(False)
                self._gates.add(gate)
                self._loop.add_reader(gate, self._hear, gate)
                return ForkedWorker(answer.pid)
            case frames.ForkRefused():
                gate.close()
                self._lose(answer.reason)
            case _:
                gate.close()
                self._lose("it answered something else")
        return None

    def _ask(self, born: ProcessIdentity, gate: socket.socket) -> frames.FromTemplate:
        environment_fd = frames.environment_file(born.environment)
        try:
            with worker_family.open_logs(born.log_dir) as (out, err):
                fds = (
                    out.fileno(),
                    err.fileno(),
                    born.control_fd,
                    born.page_fd,
                    gate.fileno(),
                    environment_fd,
                )
                frames.send(self._socket, frames.ForkRequest(mark=born.mark), fds)
        finally:
            os.close(environment_fd)
        packet = frames.receive(self._socket)
        if not packet.data:
            raise WireError("it has ended")
        return frames.parse_answer(packet.data)

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
