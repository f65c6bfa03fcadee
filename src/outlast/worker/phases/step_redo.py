"""The last step of a rank, which can be taken back and redone in this process.

A lost rank's shard may exist only in a copy of before the last step, which other ranks have applied
already. These then take the step back, and all ranks do it once more:

| moment | here |
|---|---|
| a step begins, and the newest copy has its state | call, undo copy and place are kept |
| the step is complete | `Status.redoable`, until the next phase is complete |
| `Decide` before the step | copy, undo copy and place are put back; the present state is noted |
| the generation is open | the step is redone, in the `session.run` that the script has reached |
| the redone step is complete | what the script has changed since is put back |

The script does not go back. It has the step's result, and its code behind the step has run. So the
redone state must be the one that was taken back: all digests are compared, and a rank that finds a
difference is replaced. A step is taken back once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from outlast.checkpoint.state_content import flatten_state
from outlast.errors import MismatchError
from outlast.transport import messages
from outlast.worker.phases.phase_attempt import AttemptUndone, Kind, PhaseAttempt, UndoCopy
from outlast.worker.phases.script_progress import ScriptProgress
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import digests, local_shard
from outlast.worker.worker_status import WorkerStatus


class RedoOwner(Protocol):
    """The phase runner, as StepRedo uses it."""

    save_on_request: Callable[[], None]

    def protected_state(self) -> ProtectedState:
        """Return the protected state."""
        ...

    def run_attempt(self, call: Callable[[], Any], key: str, kind: Kind, undo: bool) -> Any:
        """Run one attempt at the next phase. Raises AttemptUndone."""
        ...

    def await_replacement(self, error: BaseException, state: str, kind: str = "") -> Any:
        """Report this process as broken and wait to be killed."""
        ...


class _KeptStep(NamedTuple):
    """A step and the state before it, apart from the shards, which are in a copy."""

    call: Callable[[], Any]
    attempt: PhaseAttempt
    place: ScriptProgress


class ScriptObjects:
    """The script's variables and containers by identity, with their contents.

    A restore puts equal copies into containers, and other variables that shared the objects would
    not see later changes. Here the objects themselves are put back.
    """

    def __init__(self, protected: ProtectedState) -> None:
        self._script = protected.script
        self._bound = protected.script.bound() if protected.script is not None else []
        self._contents: dict[int, tuple[Any, Any]] = {}
        todo = [value for _, value in self._bound]
        todo += [value for value in protected.own.values() if isinstance(value, (dict, list))]
        while todo:
            each = todo.pop()
            if id(each) in self._contents:
                continue
            if isinstance(each, dict):
                self._contents[id(each)] = each, dict(each)
                todo += each.values()
            elif isinstance(each, (list, deque, set)):
                self._contents[id(each)] = each, list(each)
                todo += each
            elif isinstance(each, (tuple, frozenset)):
                todo += each
            elif isinstance(each, torch.Tensor):
                self._contents[id(each)] = each, each.detach().clone()
            elif isinstance(each, np.ndarray) and each.flags.writeable:
                self._contents[id(each)] = each, each.copy()

    @torch.no_grad()
    def put_back(self) -> None:
        """Put the objects and their contents back."""
        for live, contents in self._contents.values():
            if isinstance(live, torch.Tensor):
                live.copy_(contents)
            elif isinstance(live, np.ndarray):
                live[...] = contents
            elif isinstance(live, list):
                live[:] = contents
            elif isinstance(live, deque):
                live.clear()
                live.extend(contents)
            else:  # a dict or a set
                live.clear()
                live.update(contents)
        if self._script is not None:
            self._script.bind(self._bound)


class _TakenBack(NamedTuple):
    """A step that was taken back, and the state that this rank had."""

    step: _KeptStep
    undo: UndoCopy
    objects: ScriptObjects
    place: ScriptProgress
    tensors: dict[str, bytes]
    others: bytes


class StepRedo:
    """The last step of one worker. `put_back`: restores the shards of a copy in memory."""

    def __init__(self, status: WorkerStatus, place: ScriptProgress, owner: RedoOwner) -> None:
        self._status, self._place, self._owner = status, place, owner
        self.put_back: Callable[[messages.Checkpointed], None] = lambda _copy: None
        self._next: _KeptStep | None = None
        self._last: _KeptStep | None = None
        self._taken: _TakenBack | None = None
        self._is_running = False
        self.can_call_again = True  # a step's function, behind the step

    def begin(self, attempt: PhaseAttempt, call: Callable[[], Any], copied: str) -> None:
        """Keep an attempt if the step can be taken back. `copied`: the copy of this rank's shards
        as they are now, "" for none."""
        copy, protected = self._status.copy, self._owner.protected_state()
        is_kept = (
            self.can_call_again
            and attempt.kind == "step"
            and copy is not None
            and copied == copy.path
            and self._taken is None
            and not attempt.has_copy
            and protected.knows(attempt.key)
            and not (protected.pipeline or protected.copies or protected.local.differing)
            and _has_tensors_only(protected)
        )
        self._next = _KeptStep(call, attempt, self._place.copy()) if is_kept else None
        self._status.is_pending_redoable = is_kept

    def completed(self) -> None:
        """Make the attempt of `begin` the last step: its phase is complete."""
        self._last, self._next = self._next, None

    def end_offer(self) -> bool:
        """Offer no step any more, at the script's end; return whether one may have been decided."""
        self._status.is_redoable = False
        return self._last is not None and not self._status.is_open

    def take_back(self, copy: messages.Checkpointed | None) -> None:
        """Put this rank back before its last step. After any error, the process must be replaced.

        Raises CorruptionError, StorageError or MismatchError.
        """
        step = self._last
        if step is None or copy is None:
            raise MismatchError(
                f"phase {self._status.n} of this rank cannot be taken back: no step is kept"
            )
        protected = self._owner.protected_state()
        objects, undo = ScriptObjects(protected), UndoCopy(protected)
        taken = _TakenBack(step, undo, objects, self._place.copy(), *self._digests())
        step.attempt.undo.put_back()  # large buffers, which it cannot restore, are in the copy
        self.put_back(copy)
        self._place.assign(step.place)
        self._last, self._taken = None, taken
        self._status.take_back()

    def run(self) -> None:
        """Redo the step that was taken back, in this generation. Called again in the next one."""
        if self._is_running:  # a requested save comes first, and recovers by itself
            return
        self._is_running = True
        try:
            while (taken := self._taken) is not None and self._status.is_open:
                if self._status.requested:
                    self._owner.save_on_request()
                    continue
                with suppress(AttemptUndone):
                    step = taken.step
                    self._owner.run_attempt(step.call, step.attempt.key, "step", undo=False)
                    try:
                        self._finish(taken)
                    except Exception as error:  # noqa: BLE001 - the state is half put back
                        self._owner.await_replacement(error, "broken", "unknown")
        finally:
            self._is_running = False

    def _finish(self, taken: _TakenBack) -> None:
        """Put back what the script has changed since, and compare the state."""
        self._taken = None
        tensors, _ = self._digests()
        taken.undo.put_back()
        taken.objects.put_back()
        self._place.assign(taken.place)
        _, others = self._digests()
        names = [name for name in taken.tensors if tensors.get(name) != taken.tensors[name]]
        names += [name for name in tensors if name not in taken.tensors]
        names += ["objects or hyperparameters"] * (others != taken.others)
        if names:
            raise MismatchError(
                f"step {self._status.step} was taken back and redone, and {', '.join(names[:3])} of"
                " this rank differ from before: the script changed them after the step, or the step"
                " does not repeat; this rank is replaced; change weights in a step"
            )

    def _digests(self) -> tuple[dict[str, bytes], bytes]:
        """Return digests of this rank's tensors, and of all other protected values."""
        content = flatten_state(self._owner.protected_state().content())
        shards = [local_shard(tensor.detach()) for tensor in content.tensors.values()]
        tensors = dict(zip(content.tensors, digests(shards), strict=True))
        return tensors, xxhash.xxh3_64_digest(content.shared)


def _has_tensors_only(protected: ProtectedState) -> bool:
    """Return whether optimizers keep no numbers beside tensors, which a copy does not restore."""
    return all(
        isinstance(value, torch.Tensor) or value is None
        for optimizer in protected.optimizers.values()
        for owner, values in optimizer.state.items()
        for value in (values.values() if isinstance(owner, torch.Tensor) else (values,))
    )
