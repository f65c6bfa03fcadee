"""Injection of `--fault` specifications into this worker."""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from outlast import events
from outlast.config import WorkerSettings
from outlast.controller.fault_spec import FaultSpec, Where
from outlast.worker.groups.work_handles import opaque
from outlast.worker.sentinels.nonfinite_gradients import takes_hooks
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents

# Places of the last committed step, not of the step under way.
_BEHIND_THE_STEP: tuple[Where, ...] = ("committed", "between", "eval", "checkpoint")


class InjectedError(RuntimeError):
    """Error that `raise:...` injects."""


class FaultTarget(Protocol):
    """The worker that faults are injected into."""

    def progress(self) -> tuple[int, int]:
        """Return the complete phases and steps of this worker."""
        ...

    def is_real(self) -> bool:
        """Return whether this is neither a dry run nor a rehearsal."""
        ...

    def is_in_phase(self) -> bool:
        """Return whether a phase is under way."""
        ...

    def cut_connections(self) -> None:
        """Cut the connections to all other ranks."""

    def slow_down(self, factor: float) -> None:
        """Sleep as long as makes the own part of this step `factor` times as long."""

    def flip_bit(self, spec: FaultSpec) -> None:
        """Flip one bit of the first replicated tensor whose name matches, or of its gradient."""


def spare_number(settings: WorkerSettings) -> int:
    """Return the number of a spare worker among all of the run; a term starts its ranks first."""
    return int(settings.worker.rpartition("-")[2]) - settings.world


class InjectedFaults:
    """Faults of this run, with markers of those that have fired in any of its workers."""

    def __init__(
        self, specs: list[FaultSpec], markers: Path, timeline: WorkerEvents, target: FaultTarget
    ) -> None:
        self._specs, self._markers, self._timeline = specs, markers, timeline
        self._target = target
        self._wakers: list[threading.Thread] = []
        self._is_poisoned = False  # what the model computes at this place is NaN
        self._slow: dict[str, bool] = {}  # by specification with a factor: it is for this worker
        self._slowed = -1  # the newest step that was slowed down
        self.seat = -1

    def __bool__(self) -> bool:
        return bool(self._specs)

    def reach(self, where: Where) -> None:
        """Fire the faults that are due at `where`."""
        if not self._specs or not self._target.is_real():
            return
        n, step = self._target.progress()
        step += where not in _BEHIND_THE_STEP
        for spec in self._specs:
            if spec.factor:
                if spec.where == where and spec.rank in (-1, self.seat) and step >= spec.step:
                    self._slow_down(spec, n, step)
            elif (
                spec.where == where
                and spec.spare < 0
                and not spec.after_s  # the launcher's
                and spec.rank in (-1, self.seat)
                and (spec.step in (-1, step) or (_lasts(spec) and spec.step < step))
                and self._claim(spec)
            ):
                self._fire(spec, n, step)

    def _slow_down(self, spec: FaultSpec, n: int, step: int) -> None:
        """Slow this step down, if this is the worker that had the rank when that began."""
        if spec.text not in self._slow:
            self._slow[spec.text] = self._claim(spec)
            if self._slow[spec.text]:
                self._note_injected(spec, n, step)
        if self._slow[spec.text] and self._slowed != step:
            self._slowed = step
            self._target.slow_down(spec.factor)

    def warm(self, spare: int) -> None:
        """Fire the faults of the spare of this number, which has become warm."""
        for spec in self._specs:
            if spec.spare == spare >= 0 and self._claim(spec):
                self._fire(spec, -1, -1)

    def watch_state(self, protected: ProtectedState, is_step: Callable[[], bool]) -> None:
        """Call `reach` when models compute and when optimizers have stepped inside a phase."""
        if not self._specs:
            return
        for module in protected.modules.values():
            for part in _parts_with_forward(module):
                self.watch_model(part, is_step)

        def applied(*_: object) -> None:
            if self._target.is_in_phase():
                self.reach("apply")

        for optimizer in protected.optimizers.values():
            optimizer.register_step_post_hook(applied)

    def watch_model(self, model: nn.Module, is_step: Callable[[], bool]) -> None:
        """Call `reach` when this module reaches "forward" and "backward" (or "eval")."""

        def before(*_: object) -> None:
            if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - not under recomputation
                self.reach("forward" if is_step() else "eval")

        def after(_module: object, _inputs: object, output: object) -> None:
            is_poisoned, self._is_poisoned = self._is_poisoned, False
            values = list(output.values()) if isinstance(output, Mapping) else output
            for tensor in values if isinstance(values, (tuple, list)) else [values]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._backward)
                    if is_poisoned:
                        tensor.data.mul_(math.nan)  # in place: outputs may be of any structure
                    return

        model.register_forward_pre_hook(opaque(before))
        model.register_forward_hook(opaque(after))

    def _backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.reach("backward")
        is_poisoned, self._is_poisoned = self._is_poisoned, False
        return gradient * math.nan if is_poisoned else None

    def _claim(self, spec: FaultSpec) -> bool:
        """Return True for one worker per firing in the whole run; for a cause that stays, wherever
        it is."""
        if spec.cause == "data":
            (self._markers / spec.marker(0)).touch()  # it has struck
            return True
        if spec.cause == "device":
            return self._is_device(self._markers / spec.marker(0))
        for count in range(spec.times):
            path = self._markers / spec.marker(count)
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            return True
        return False

    def _is_device(self, marker: Path) -> bool:
        """Return whether this worker is the first one that has come to a fault of its device."""
        with suppress(FileExistsError), marker.open("x") as file:
            file.write(self._timeline.worker)
        return marker.read_text() == self._timeline.worker

    def _note_injected(self, spec: FaultSpec, n: int, step: int) -> None:
        self._timeline.emit(
            events.FaultInjected(
                t_ns=self._timeline.now_ns(),
                worker=self._timeline.worker,
                seat=self.seat,
                spec=spec.text,
                n=n,
                step=step,
            )
        )

    def _fire(self, spec: FaultSpec, n: int, step: int) -> None:
        self._note_injected(spec, n, step)
        match spec.kind:
            case "kill":
                self._kill(spec)
            case "stop":
                if spec.for_s:
                    self._wake_later(spec.for_s)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise InjectedError(f"injected by --fault {spec.text}")
            case "reset":
                self._target.cut_connections()
            case "hang":
                threading.Event().wait()  # no timeout: this is the injected hang
            case "slow":
                time.sleep(spec.for_s or 1.0)  # house rule: the injected delay
            case "nan":
                self._is_poisoned = True
            case "oom":
                raise torch.OutOfMemoryError(f"injected by --fault {spec.text}")
            case "flip":
                self._target.flip_bit(spec)
            case "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"--fault {spec.text}")

    def _kill(self, spec: FaultSpec) -> None:
        if spec.where != "vote":
            os.kill(os.getpid(), signal.SIGKILL)
        # The collective after this call sends the vote: die while it is in transit.
        late = threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGKILL))
        late.daemon = True
        late.start()

    def _wake_later(self, seconds: float) -> None:
        # A stopped process cannot wake itself; a child in its session can.
        pid = os.getpid()
        child = os.fork()
        if child == 0:
            time.sleep(seconds)  # house rule: in a child that does nothing else
            os.kill(pid, signal.SIGCONT)
            os._exit(0)


def _lasts(spec: FaultSpec) -> bool:
    """Return whether a fault is also due behind its step."""
    return spec.kind == "full" or spec.cause == "device"


def _parts_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or of a container without `forward` the outermost parts that have one. A
    fault cannot strike inside of TorchScript."""
    if not takes_hooks(module):
        return
    if type(module).forward is not nn.Module.forward:
        yield module
        return
    for part in module.children():
        yield from _parts_with_forward(part)
