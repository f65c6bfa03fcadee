"""Catch-up of a successor: the walk through its script, and its dry steps.

The walk answers the phases that lie behind the seat from what the seat's last worker wrote down.
Inside the loop the state is taken over before the script goes on, so that code between two
phases (a save of the model, say) sees the weights of the job and never those of the set-up; and
once more at the end, because such code (a scheduler's step) has then run twice.

Results of a phase that died with their worker, as the successor sees them:

| result | value |
|---|---|
| floating-point number, tensor, array | NaN: it stays visible in sums and logs |
| None | None |
| container | the same container of these |
| anything else | `LostResult`: its use rolls the job back to a copy |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

import numpy as np
import torch

from outlast.checkpoint.format import codec
from outlast.errors import GroupError, UsageError
from outlast.events import FaultKind
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.phase_attempt import deep_copy
from outlast.worker.phases.script_progress import LOST, ReplayWalk, ScriptProgress
from outlast.worker.phases.worker_recovery import WorkerRecovery
from outlast.worker.state import protected_state
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

# To test, compare, count, index, iterate, convert or call it needs the value itself.
_USES = (
    "bool",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "hash",
    "len",
    "iter",
    "next",
    "contains",
    "getitem",
    "call",
    "int",
    "float",
    "complex",
    "index",
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "mod",
    "and",
    "rand",
    "or",
    "ror",
    "xor",
    "invert",
    "neg",
    "fspath",
    "enter",
)


class LostResult:
    """A value that nobody knows and that no number can stand for: a flag, a name, an object.

    It may be kept, passed on and printed. `use` is called by everything else, and does not return.
    """

    def __init__(self, use: Callable[[], NoReturn]) -> None:
        self._use = use

    def __repr__(self) -> str:
        return "<lost with its worker>"

    def __format__(self, _: str) -> str:
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol of Python's that it does not take part in
            raise AttributeError(name)
        self._use()


def _used(self: LostResult, *_: Any) -> NoReturn:
    self._use()


for _name in _USES:
    setattr(LostResult, f"__{_name}__", _used)


def unknown(value: Any, use: Callable[[], NoReturn]) -> Any:
    """Return what stands for a result that nobody knows. `value` is a dry run's, which only looks
    like it; `use` is called when the script uses what NaN cannot stand for."""
    if value is None:
        return None
    if isinstance(value, (float, np.floating)):
        return math.nan
    if isinstance(value, (complex, np.complexfloating)):
        return complex(math.nan, math.nan)
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return torch.full_like(value, math.nan)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        return np.full_like(value, math.nan)
    if isinstance(value, dict):
        return {key: unknown(item, use) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named: Any = type(value)
        return named(*(unknown(item, use) for item in value))
    if type(value) is list:
        return [unknown(item, use) for item in value]
    if type(value) is tuple:
        return tuple(unknown(item, use) for item in value)
    return LostResult(use)


def is_evidence(value: Any) -> bool:
    """Return whether the same value on several ranks means that it is equal on all: it has a
    floating-point number in it. Flags and counts of one rank alone often agree by chance."""
    if isinstance(value, dict):
        return any(map(is_evidence, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_evidence, value))
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and (value.is_floating_point() or value.is_complex())
    if isinstance(value, np.ndarray):
        return value.size > 0 and value.dtype.kind in "fc"
    return isinstance(value, (float, complex, np.inexact))


REHEARSALS = 2
AT_DRAW_BYTES_MAX = 256 << 10  # of a rank's own state, beside the position of a batch


class CatchUp:
    """One worker's. One that starts with the job has no walk, and rehearses with all others."""

    def __init__(
        self,
        *,
        status: WorkerStatus,
        groups: GroupRegistry,
        recovery: WorkerRecovery,
        timeline: WorkerEvents,
        place: ScriptProgress,
        protected: Callable[[], ProtectedState],
        dry_attempt: Callable[[str], AbstractContextManager[None]],
        trouble: Callable[[str, FaultKind], None],
        retire: Callable[..., NoReturn],
    ) -> None:
        """`retire` reports this process as broken and does not return: another one replaces it.
        With `kind="unknown"` no other could know more, and the job goes back to a copy."""
        self._status, self._groups, self._recovery = status, groups, recovery
        self._timeline, self._place, self._protected = timeline, place, protected
        self._dry_attempt, self._trouble, self._retire = dry_attempt, trouble, retire
        self.walk: ReplayWalk | None = None
        self.result_lost = False  # the script holds a dry run's result until the walk is over
        self.settled: set[str] = set()  # functions whose gate this process has rehearsed
        self.gated_elsewhere: set[str] = set()  # ... and which any rank has
        self._told_large = False
        self.reduced = False  # DDP's reducers were used since this generation was opened

    # --- the walk ---

    def stand(self) -> None:
        """Return inside an open generation, with the job's state."""
        while not self._status.is_open:
            self._recovery.recover()
            self.reduced = False
            self._timeline.generation = self._status.opened

    def arrive(self, call: Callable[[], Any], key: str) -> None:
        """Stand before the next phase, with its dry steps taken."""
        self.stand()
        if not self._status.requested:
            self._settle(call, key, joins=True)
            if key in self.settled and not self._protected().reducers.is_ready:
                self._retire(
                    GroupError(
                        f"the dry step of {key} did not count the gradients of a static graph, as"
                        " the other ranks' first step has done"
                    )
                )
        self.join()

    def join(self) -> None:
        """Stand among the others; a walk ends here."""
        self.stand()
        walk = self.walk
        if walk is None:
            return
        self._recovery.adopt_staged_state()
        self._recovery.staged = None
        if not walk.after and not walk.slot.at_draw:
            self.restore_walked()
        self.walk, self.result_lost = None, False
        self._protected().local.kept = frozenset()

    def leave_loop(self) -> None:
        """The loop has ended: stand among the others, unless phases behind it are behind us."""
        if self.walk is not None and not self.walk.remaining:
            self.join()

    def restore_walked(self) -> None:
        """Put the seat's own state back, at the point of the walk where it was taken."""
        assert self.walk is not None
        # Without the last result the script's code behind that phase goes wrong here.
        keep = not (self.walk.after and self.walk.last_result == LOST)
        self._protected().restore_own(self.walk.slot.own, keep=keep)

    def at_draw(self) -> bytes:
        """Return what the script's code around a draw may read of the rank's own; b"" where that is
        large, and is not written down a second time."""
        own = self._protected().own_choices()
        if len(own) <= AT_DRAW_BYTES_MAX:
            return own
        if not self._told_large:
            self._told_large = True
            self._timeline.note(
                f"the rank's own state takes {len(own) >> 10} KiB, more than the"
                f" {AT_DRAW_BYTES_MAX >> 10} that are kept at each draw and behind each phase: code"
                " of the loop in front of a phase that changes what it reads itself would see that"
                " changed twice in a worker that takes this seat; change it inside the phase"
            )
        return b""

    def completed(self, result: bytes) -> None:
        """Write down what a phase has returned, for a worker that walks by it."""
        own = b""
        if self._place.batch:
            with suppress(UsageError):  # what cannot be kept is refused before the next phase
                own = self.at_draw()
        self._place.add(result, own)

    def restore_drawn(self, own: bytes) -> None:
        """Put back what `at_draw` said: the script computes once more what it computed between
        the draw and the phases that lie behind this worker. Without it, take what comes nearest:
        the state before the next phase."""
        assert self.walk is not None
        choices = own or codec.decode(self.walk.slot.own)["choices"]
        self._protected().restore_choices(codec.decode(choices))

    def replay(self, call: Callable[[], Any], key: str, *, kind: str) -> tuple[Any] | None:
        """Return the result of the next phase from before this worker joined; None at the end of
        the walk."""
        walk = self.walk
        found = walk.next() if walk is not None else None
        if walk is None or found is None:
            return None
        kept, own, last = found
        value = self._settle(call, key)
        if kept != LOST:
            value = codec.decode(kept)
        elif kind in ("step", "eval"):
            value = unknown(self._dry(call, key) if value is None else value, self._use_of(key))
            self.result_lost = True
            self._timeline.note(
                f"what {key} returned before this worker took the seat was lost with the worker"
                " that knew it; the script here sees NaN in place of its numbers"
            )
        if own:
            self.restore_drawn(own)
            protected_state.restore(codec.decode(own)["random"], self._protected().generators)
        self._place.add(kept, own)
        self._status.step += kind == "step"
        if last and walk.after:
            self.restore_walked()
            self._timeline.metrics(self._status.step, walk.slot.reports)
        return (value,)

    def _use_of(self, key: str) -> Callable[[], NoReturn]:
        """Return what happens when the script uses a result of `key` that nobody knows."""

        def use() -> NoReturn:
            text = (
                f"the script uses what {key} returned, which was lost with the worker of this rank"
                " between the vote and the return; a flag that is put into session.state before"
                " optimizer.step() is kept"
            )
            self._retire(GroupError(text), kind="unknown")

        return use

    # --- dry steps ---

    def _settle(self, call: Callable[[], Any], key: str, *, joins: bool = False) -> Any:
        """Take a dry step of a function that the others have rehearsed: kernels, allocators,
        compilers. Where a static graph's first backward lies behind the others in this generation
        (another function steps too), a new one brings all ranks to one place."""
        if key not in self.gated_elsewhere or key in self.settled:
            return None
        result = self._dry(call, key, joins=joins)
        self.settled.add(key)
        if self._status.opened and self.reduced and self._protected().reducers.is_static:
            detail = f"{key} steps too: with its dry steps taken, all ranks begin it alike"
            self._trouble(detail, "unsettled")
        return result

    def _dry(self, call: Callable[[], Any], key: str, *, joins: bool = False) -> Any:
        """Run a phase's function without the others; of what it changed nothing stays, and the
        reducers stand where the opening of the generation has put everybody's. `joins`: the staged
        state, where there is one, is taken over next, and not here."""
        begin_ns, result = self._timeline.now_ns(), None
        kept, local = None, self._protected().local
        came_with_the_slot = local.kept
        if self._status.opened and (self._recovery.staged is None or came_with_the_slot):
            kept = deep_copy(self._protected().replicated(), "cpu")
        self._status.enter("dry")
        try:
            with self._dry_attempt(key), self._groups.phase(), self._groups.dry():
                result = call()
        except Exception as error:  # noqa: BLE001 - of answers that no rank gave: nobody's fault
            self._cut_short(key, error)
        finally:
            if kept is not None:
                local.kept = frozenset()
                self._protected().adopt(kept)
                local.kept = came_with_the_slot
            elif not joins:
                self._recovery.adopt_staged_state()
        reducers = self._protected().reducers
        if self._status.opened and not (self.reduced and reducers.is_static):
            reducers.restore()
        self._timeline.dry_steps(key, begin_ns)
        return result

    def _cut_short(self, key: str, error: Exception) -> None:
        """A dry step has raised: go on without it, where all that it left can be put back."""
        text = f"a dry step of {key} raised {type(error).__name__}: {error}"[:500]
        if self._protected().tree.is_sharded:
            self._retire(GroupError(f"{text}; FSDP cannot be put back after it"))
        self._timeline.note(f"{text}; this worker goes on without it")
