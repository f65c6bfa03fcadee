"""Start of a worker by `outlast.init()`, or by a line of the script above it.

| the script | in a worker of `outlast run` |
|---|---|
| reads RANK, LOCAL_RANK or a variable like them in a spare | the spare waits there for its seat |
| calls `init_process_group` above `init()` | the worker takes its seat, and `init()` returns it |
| calls it below `init()` | the job's group is the default group already |

A script that never imports outlast keeps torch's own function and its own group.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import distributed as dist
from torch.distributed import distributed_c10d

from outlast.config import (
    WHOLE_ENVIRONMENT,
    WorkerSettings,
    check_torch,
    started_by_torchrun,
    watch_environment,
    worker_settings,
)
from outlast.errors import ConfigError, UsageError
from outlast.worker.above_init.script_children import REFUSED, claim_worker, must_be_own
from outlast.worker.script.bytecode import is_call_of_script

if TYPE_CHECKING:
    from outlast.worker.worker_process import WorkerProcess

_SEAT_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK"} | {"REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"}
)
_BACKENDS = frozenset({"gloo", "nccl", "nccl2", "outlast", "undefined"})
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+outlast\b", re.MULTILINE)
_end_watch: list[Callable[[], None]] = []
_unclaimed: list[str] = []  # variables that a spare has read before its script was known to be ours
_followed_function: list[Callable[..., None]] = []
_given: list[bool] = []  # the script has got the job's group: torch refuses to make it twice
_running: list[WorkerProcess] = []  # one worker a process: torch's registry of backends forces it
_early: list[WorkerProcess] = []  # that one, until the script calls init()


def start(*, hot_spares: bool = False, is_early: bool = False) -> WorkerProcess:
    """Make this process a worker, or return one that `is_early`: it had to be one above `init()`.
    Raises UsageError when it is one already, ConfigError where torch is too old."""
    check_torch()
    if _early:
        return _early.pop()
    settings = worker_settings()
    if _running:
        must_be_own(_running[0], "outlast.init() was called")
        raise UsageError("outlast.init() was called twice in one process: keep what it returned")
    if settings is None and started_by_torchrun():
        raise UsageError(
            "this script was started by torchrun, which stops every worker when one fails: start"
            " it with `outlast run` and the same flags"
        )
    if settings is None:
        _must_not_be_rays_worker()
    if dist.is_initialized():
        raise UsageError(
            "a process group exists already: outlast.init() makes that of the job; call it above"
            " init_process_group()"
        )
    _end_watches()
    if settings:
        claim_worker(settings)
        # The first optimizer imports it. Ranks and spares do it here: with the same variables, and
        # where a forked worker can still start anew.
        importlib.import_module("torch._dynamo")
    is_spare = settings is not None and settings.seat < 0
    from outlast.worker.hot_worker import HotWorker  # they import most of torch, which may not be
    from outlast.worker.worker_process import WorkerProcess  # loaded when the watches begin

    worker = HotWorker(settings) if hot_spares and is_spare else WorkerProcess(settings)
    worker.pid = os.getpid()
    _running.append(worker)
    worker.take_seat()
    _hear_what_ends_the_script(worker)
    meet_torch()
    if is_early:
        _early.append(worker)
    return worker


def _must_not_be_rays_worker() -> None:
    """Raise UsageError in an actor of Ray, as workers of Ray Train are: each would be a job of one
    rank."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    if ray.get_runtime_context().get_actor_id() is not None:
        raise UsageError(
            "outlast.init() in an actor of Ray (workers of Ray Train are): where one dies, Ray"
            " starts those of all ranks again, and without a launcher of Outlast no one would be"
            " replaced; start `outlast run` itself as a task of Ray (docs/frameworks.md)"
        )


def _hear_what_ends_the_script(worker: WorkerProcess) -> None:
    show, pid = sys.excepthook, os.getpid()

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        show(kind, error, trace)
        if os.getpid() == pid:
            worker.failed(error)

    def finish() -> None:
        if os.getpid() != pid:  # a child that the script has forked ends, not the worker
            return
        # Set before any hook is read: a script may have replaced ours by its own.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            worker.failed(error)
        elif worker.page.has_refusal():
            worker.failed(UsageError(REFUSED))
        worker.finish()

    leave = sys.exit

    @functools.wraps(leave)
    def leaving(status: Any = None, /) -> NoReturn:
        worker.status.exit_code = exit_code(status)
        leave(status)

    sys.excepthook, sys.exit = uncaught, leaving
    atexit.register(finish)


def exit_code(status: Any) -> int:
    """Return the exit code of a process that ends by `SystemExit(status)`."""
    if status is None or isinstance(status, int):
        return (status or 0) & 0xFF
    return 1


def meet_torch() -> None:
    """Follow the script's calls of `init_process_group`, and in a spare its reads of RANK."""
    if not dist.is_available() or _followed_function:
        return
    _followed_function.append(dist.init_process_group)
    dist.init_process_group = _followed(dist.init_process_group)
    distributed_c10d.init_process_group = dist.init_process_group
    settings = _settings_of_leader()
    if settings is not None and settings.seat < 0 and not _end_watch:
        _end_watch.append(watch_environment(_SEAT_VARIABLES, _on_variable_read))


def _end_watches() -> None:
    """End the watch of variables: this worker takes its seat. Raises UsageError in a spare that
    has read one of them without its seat."""
    while _end_watch:
        _end_watch.pop()()
    if _unclaimed:
        raise UsageError(
            f"this spare has no rank yet, and code above outlast.init() has read {_unclaimed[0]},"
            " before the script's own file imported outlast: it would go on as another rank; move"
            " `import outlast` into that file, or the line below outlast.init()"
        )


def _on_variable_read(name: str) -> None:
    if name == WHOLE_ENVIRONMENT or not is_call_of_script():
        return
    if _imports_outlast():
        _start(f"code above outlast.init() reads {name}")
    else:
        _unclaimed.append(name)


def _start(cause: str) -> None:
    worker = start(is_early=True)
    if worker.status.joining:
        worker.timeline.note_once(
            f"{cause}: a spare waits there, and prepares nothing of the code below that line; move"
            " outlast.init() up, or the line below it",
            "early",
        )


def _followed(init_process_group: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init_process_group)
    def of_the_job(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *others: Any,
        **named: Any,
    ) -> None:
        if not _running and _settings_of_leader() is not None and _imports_outlast():
            _start("init_process_group() is above outlast.init()")
        is_worker = bool(_running) and _running[0].pid == os.getpid()
        if is_worker and dist.is_initialized() and not _given:
            _compare(backend, store, (rank, dist.get_rank()), (world_size, dist.get_world_size()))
            _given.append(True)
            if timeout is not None:
                text = "init_process_group(timeout=...) has no effect: --limit operation_s=SECONDS"
                _running[0].timeline.note_once(f"{text} limits collectives", "timeout")
            return
        words = (backend, init_method, timeout, world_size, rank, store)
        init_process_group(*words, *others, **named)

    return of_the_job


def _compare(backend: str | None, store: Any, *pairs: tuple[int, int]) -> None:
    """Raise UsageError for a group that the job's does not replace."""
    parts = (part.rpartition(":")[2] for part in (backend or "undefined").lower().split(","))
    if unknown := sorted(set(parts) - _BACKENDS):
        raise UsageError(
            f"init_process_group({backend!r}): the job's groups replace gloo and nccl, not"
            f" {unknown[0]}; nothing was connected; use one of these"
        )
    if store is not None:
        raise UsageError(
            "init_process_group(store=...): workers of a job meet through their launcher, and a"
            " replacement worker would not find that store; leave store, rank and world_size out"
        )
    for given, known in pairs:
        if given not in (-1, known):
            raise UsageError(
                f"init_process_group(): the script gives {given} as rank or world size, and the"
                f" job has {known}; use session.rank and session.world_size, or leave them out"
            )


def _settings_of_leader() -> WorkerSettings | None:
    """Return the settings of this worker, None in another process of the script."""
    try:
        settings = worker_settings()
    except ConfigError:  # `init` raises it
        return None
    return settings if os.getsid(0) == os.getpid() else None


def _imports_outlast() -> bool:
    """Return whether the script's own file imports outlast, perhaps later."""
    main = sys.modules["__main__"]
    kinds = (types.ModuleType, types.FunctionType, type)
    values = (value for value in list(vars(main).values()) if isinstance(value, kinds))
    names = (getattr(value, "__module__", None) or value.__name__ for value in values)
    if any(name.partition(".")[0] == "outlast" for name in names):
        return True
    try:
        source = Path(getattr(main, "__file__", None) or "").read_bytes()
    except OSError:  # no file
        return False
    return _IMPORT.search(source) is not None
