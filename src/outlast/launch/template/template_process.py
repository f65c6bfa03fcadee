"""Template process: loads modules once, then forks a worker for each request.

A worker must be a child of the launcher, which reaps it and reads its exit code. The template
therefore forks a middle process, which forks the worker and exits. The launcher, as subreaper of
its descendants, becomes the worker's parent.

    launcher ──ForkRequest──► template ──fork──► middle ──fork──► worker
        ◄────────Forked(pid)──── │ ◄───────end──────┘               │
                                 │ ◄──────────────pid───────────────┤ setsid, waits
        ──────────────────────Identity(mark)────────────────────────► prepares, runs
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import locale
import multiprocessing.process
import os
import random  # noqa: F401 - registers the reseeding of its generator after a fork
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import NoReturn

import outlast
from outlast import config
from outlast.errors import ConfigError
from outlast.launch.template import frozen_objects, hidden_modules
from outlast.launch.template import template_frames as frames
from outlast.launch.template.hidden_modules import (
    HiddenModules,
    ModuleGroup,
    is_third_party,
    set_warnings_filters,
    top_level,
)

_PR_SET_PDEATHSIG = 1
_FAMILY = b"OUTLAST_FAMILY="
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband")
_SIZE_BYTES_MAX = 16 << 30


def serve(early: frozenset[str]) -> None:
    """Load modules, then fork a worker for each request; return in forked workers only.

    `early`: names of the modules that every interpreter has loaded at this point.
    """
    settings = config.take_template_settings()
    sys.path.remove(settings.entry)
    sys.path_importer_cache.pop(settings.entry, None)
    template = TemplateProcess(settings, early)
    template.serve()


class TemplateProcess:
    """Template process; after a fork, the new worker."""

    def __init__(self, settings: config.TemplateSettings, early: frozenset[str]) -> None:
        self._settings = settings
        self._early = early
        self._machinery = {
            name
            for name in sys.modules
            if name not in early and top_level(name) in ("outlast", "msgspec")
        }
        self._socket = socket.socket(fileno=settings.socket_fd)
        self._socket.set_inheritable(False)
        self._control_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._page_fd = os.dup(self._control_fd)
        self._groups: list[ModuleGroup] = []
        self._first: list[ModuleGroup] = []  # groups of the first import
        self._files: dict[str, tuple[int, ...]] = {}
        self._middle = 0
        outlast.is_template = True
        self._handlers = {number: signal.getsignal(number) for number in config.JOB_SIGNALS}

    def serve(self) -> None:
        """Load and serve until the launcher closes the socket; return in forked workers only."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)
        if reason := self._load():
            frames.send(self._socket, frames.TemplateRefused(reason=reason))
            os._exit(0)
        frames.send(
            self._socket,
            frames.TemplateReady(
                control_fd=self._control_fd,
                page_fd=self._page_fd,
                home=str(Path(config.__file__).parent),
                modules=len(sys.modules),
                size_bytes=_size_bytes(),
            ),
        )
        while True:
            packet = frames.receive(self._socket)
            if not packet.data:
                os._exit(0)
            frames.parse(packet.data, frames.ForkRequest)
            if self._fork(*packet.fds):
                return

    # --- loading ---

    def _load(self) -> str:
        """Import the modules; return why workers cannot be forked with them, or ""."""
        before = _process_state()
        environment = config.process_environment()
        filters = list(warnings.filters)
        collects = gc.isenabled()
        gc.disable()  # imports create no garbage
        for name in self._settings.modules:
            self._groups += self._import(name).split(name)
            self._first = self._first or list(self._groups)
        if rest := self._machinery.difference(*(group.modules for group in self._groups)):
            self._groups.append(
                ModuleGroup({name: sys.modules[name] for name in rest}, {}, set(), [], {})
            )
        frozen_objects.freeze()
        if collects:
            gc.enable()
        set_warnings_filters(filters)
        config.set_environment(environment)
        self._files = _files()
        return self._objection(before)

    def _import(self, name: str) -> ModuleGroup:
        environment = config.process_environment()
        filters = list(warnings.filters)
        loggers = set(hidden_modules.loggers())
        with config.recorded_environment() as read:
            importlib.import_module(name)
        after = config.process_environment()
        known = self._early.union(*(group.modules for group in self._groups))
        if top_level(name) != "outlast":
            known |= self._machinery  # belongs to the group of outlast
        return ModuleGroup(
            {
                each: module
                for each, module in sys.modules.items()
                if each not in known and is_third_party(each)
            },
            {each: value for each, value in after.items() if environment.get(each) != value},
            read,
            [each for each in warnings.filters if each not in filters],
            {
                each: logger
                for each, logger in hidden_modules.loggers().items()
                if each not in loggers and is_third_party(each)
            },
        )

    def _objection(self, before: dict[str, object]) -> str:
        sys.stdout.flush()
        sys.stderr.flush()
        if any(os.fstat(stream).st_size for stream in (1, 2)):
            return "an import wrote to stdout or stderr"
        names = (*frames.PER_WORKER, config.WHOLE_ENVIRONMENT)
        if reads := next(filter(None, (group.reads(names) for group in self._groups)), ""):
            return reads
        after = _process_state()
        if changed := sorted(name for name in before if before[name] != after[name]):
            return f"an import changed {', '.join(changed)}"
        if devices := _open_devices():
            return f"an import opened {devices[0]}"
        if threads := self._threads():
            return f"an import started threads: {', '.join(threads)}"
        if (size_bytes := _size_bytes()) > _SIZE_BYTES_MAX:
            return f"it takes {size_bytes} bytes of memory, above {_SIZE_BYTES_MAX}"
        return self._shadow()

    @staticmethod
    def _threads() -> list[str]:
        """Return the names of this process's other threads after one fork.

        OpenBLAS ends its threads before a fork and restarts them on demand.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn about forks with threads
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        tasks = Path("/proc/self/task")
        others = [entry for entry in tasks.iterdir() if entry.name != str(os.getpid())]
        return [(entry / "comm").read_text().strip() for entry in others]

    def _shadow(self) -> str:
        """Return which loaded module a module in the script's folder would shadow, or ""."""
        if self._settings.script_dir is None:
            return ""
        try:
            files = Path(self._settings.script_dir).iterdir()
            entries = {file.name.partition(".")[0] for file in files}
        except OSError:
            return ""
        loaded = {top_level(name) for name in sys.modules if name not in self._early}
        for name in sorted(entries & loaded):
            spec = importlib.machinery.PathFinder.find_spec(name, [self._settings.script_dir])
            ours = getattr(sys.modules[name], "__file__", None)
            if spec and spec.loader and spec.origin != ours:
                return f"{name} is another module in {self._settings.script_dir}"
        return ""

    # --- forking ---

    def _fork(self, gate_fd: int) -> bool:
        """Fork one worker; return True in the worker, False in the template."""
        reason = self._shadow() or self._stale()
        if not reason:
            reading, writing = os.pipe()
            self._middle = os.fork()
            if self._middle == 0:
                self._fork_from_middle(writing)
                os.close(reading)
                os.close(writing)
                self._become_worker(gate_fd)
                return True
            os.close(writing)
            pid = int(os.read(reading, 32) or 0)  # 0 if a process failed
            os.close(reading)
            os.waitpid(self._middle, 0)  # the worker is the launcher's child from here on
            if pid:
                frames.send(self._socket, frames.Forked(pid=pid))
            else:
                reason = "it could not fork"
        os.close(gate_fd)
        if reason:
            frames.send(self._socket, frames.ForkRefused(reason=reason))
        return False

    @staticmethod
    def _fork_from_middle(writing: int) -> None:
        """Fork the worker and exit; return in the worker only.

        Once it is reported it has a session of its own: the end of the template's spares it.
        """
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(writing, str(os.getpid()).encode())

    def _stale(self) -> str:
        """Return which loaded file has changed on disk, or ""."""
        for path, signature in self._files.items():
            if _signature(path) != signature:
                return f"{path} has changed since it was loaded"
        return ""

    # --- in the worker ---

    def _become_worker(self, gate_fd: int) -> None:
        self._socket.close()
        gate = socket.socket(fileno=gate_fd)
        gate.settimeout(frames.GATE_S)
        packet = frames.receive(gate)
        if not packet.data:
            os._exit(1)  # the launcher has dropped this worker
        identity = frames.parse(packet.data, frames.Identity)
        fds = dict(zip(frames.IDENTITY_DESCRIPTORS, packet.fds, strict=True))
        gate.settimeout(None)
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != self._settings.launcher:
            os._exit(1)  # the launcher died before prctl
        os.dup2(fds["stdout"], 1)
        os.dup2(fds["stderr"], 2)
        os.dup2(fds["control"], self._control_fd)
        os.dup2(fds["page"], self._page_fd)
        environment = frames.read_environment(fds["environment"])
        for fd in fds.values():
            os.close(fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        config.set_environment(environment)
        outlast.is_template = False
        frozen_objects.unfreeze_at_exit()
        _mark_memory(identity.mark)
        _draw_anew()
        if "outlast.worker.session" in sys.modules:  # else the script does not import outlast
            outlast.begin_worker()
        if "torch" in sys.modules:
            outlast.meet_torch()
        restart = WorkerRestart(gate, self._settings.command, environment)
        HiddenModules(self._groups, restart, self._first).hide()


class WorkerRestart:
    """Restart of a forked worker: exec of its command, with the same descriptors."""

    def __init__(
        self, gate: socket.socket, command: tuple[str, ...], environment: dict[str, str]
    ) -> None:
        self._gate, self._command, self._environment = gate, command, environment
        self._pid = os.getpid()
        self._cwd = Path.cwd()

    def close(self) -> None:
        """Close the gate: no restart can follow."""
        self._gate.close()

    def execute(self, reason: str) -> NoReturn:
        """Report the reason to the launcher, then exec the worker's command.

        Raises ConfigError in a child process of the script, and in a member of a process group,
        whose other members would lose it.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                f"a child process of the script cannot have modules of the template: {reason};"
                " start the run with --no-template"
            )
        distributed = sys.modules.get("torch.distributed")
        if distributed and distributed.is_available() and distributed.is_initialized():
            raise ConfigError(
                f"a worker with a process group cannot start anew: {reason}; nothing was imported;"
                " start the run with --no-template, or set the variable in the shell"
            )
        with contextlib.suppress(OSError):  # the report is informational
            frames.send(self._gate, frames.Restarted(reason=reason))
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(self._cwd)
        os.execvpe(self._command[0], self._command, self._environment)  # noqa: S606


def _mark_memory(mark: str) -> None:
    """Overwrite the template's family mark in the initial environment, as in /proc/PID/environ."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    memory = ctypes.string_at(start, end - start)
    at = memory.index(_FAMILY) + len(_FAMILY)
    space = memory.index(b"\0", at) - at
    if len(mark) > space:
        raise ConfigError(f"a family mark of {len(mark)} characters has no space in {space}")
    ctypes.memmove(start + at, mark.encode().ljust(space), space)


def _draw_anew() -> None:
    """Reseed the generators that a spawned worker would seed from the system at import."""
    multiprocessing.process.current_process().authkey = os.urandom(32)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _process_state() -> dict[str, object]:
    """Return the process state that imports must not change, by name."""
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return {
        "the recursion limit": sys.getrecursionlimit(),
        "the switch interval": sys.getswitchinterval(),
        "the garbage collector": (gc.get_threshold(), gc.isenabled()),
        "sys.excepthook": sys.excepthook,
        "sys.displayhook": sys.displayhook,
        "sys.meta_path": tuple(sys.meta_path),
        "sys.path": tuple(sys.path),
        "sys.path_hooks": tuple(sys.path_hooks),
        "the working directory": Path.cwd(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "signal handlers": {number: signal.getsignal(number) for number in numbers},
        "processor affinity": os.sched_getaffinity(0),
    }


def _open_devices() -> list[str]:
    """Return the accelerator device files that this process has open or mapped."""
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    found = {line.split(maxsplit=5)[5] for line in maps if "/dev/" in line}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing
            found.add(str(entry.readlink()))
    return sorted(path for path in found if path.startswith(_DEVICES))


def _size_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _files() -> dict[str, tuple[int, ...]]:
    """Return the signatures of the files of all loaded modules."""
    paths = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {path: _signature(path) for path in paths if isinstance(path, str)}


def _signature(path: str) -> tuple[int, ...]:
    try:
        stat = os.stat(path)  # noqa: PTH116 - thousands of Path objects take four times as long
    except OSError:
        return ()
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
