"""The interface of a training script: `init()` and `Session`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from outlast.data.batch_groups import BatchGroups
from outlast.errors import UsageError
from outlast.worker.above_init.script_children import children_end, must_be_own
from outlast.worker.above_init.worker_start import exit_code, start
from outlast.worker.phases.lost_results import LostResult, is_lost
from outlast.worker.phases.step_calls import step_key
from outlast.worker.state.protected_state import Replicated as Replicated
from outlast.worker.worker_process import WorkerProcess

T = TypeVar("T")


class _LoopBatches:
    """Batches of a loop, whose number a progress bar or a logger can ask for as that of a loader.

    `len` is the number of all its epochs' batches, and an error where steps end the loop.
    """

    def __init__(
        self, batches: Iterator[Any], loader: Any, until: int | None, epochs: int | None
    ) -> None:
        self._batches, self._loader = batches, loader
        self._epochs = None if until is not None else 1 if epochs is None else epochs

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        if self._epochs is None:
            raise TypeError("session.batches(..., until=STEPS) has no number of batches")
        return len(self._loader) * self._epochs

    def __length_hint__(self) -> Any:
        return NotImplemented  # without it, an iterator counts as one that keeps a hidden place


class Session:
    """Seat in the job, made by `init`; one per process. Children that the script forks may read
    rank, world size, local rank and device, and nothing else."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._process = worker
        self._groups: BatchGroups | None = None  # of the newest loop's batches

    @property
    def _worker(self) -> WorkerProcess:
        must_be_own(self._process, "the session was used")
        return self._process

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a session cannot be copied or sent to another process: it is of the process that"
            " called outlast.init(); give the other one plain values, such as session.rank"
        )

    @property
    def state(self) -> dict[str, Any]:
        """Dict of plain data that survives with this rank. A list or dict inside it stays the same
        object when it is restored. Assigning to `state` raises UsageError; change its items
        instead."""
        return self._worker.state

    @state.setter
    def state(self, value: Any) -> None:
        raise UsageError(
            f"session.state = {type(value).__name__}(...) would replace the dict that survives;"
            " nothing was changed: use session.state.update(...), or session.state[name] = value"
        )

    @property
    def rank(self) -> int:
        """Return this worker's seat, from 0 to world_size - 1; it never changes."""
        return self._process.seat

    @property
    def world_size(self) -> int:
        """Return the number of seats; it never changes."""
        return self._process.world

    @property
    def is_idle(self) -> bool:
        """Return whether another rank trains the newest batch, and this one adds zeros to sums: it
        has come back inside the step, or the epoch has fewer batches left than ranks."""
        return self._worker.loop.ranks.is_idle

    @property
    def present(self) -> tuple[int, ...]:
        """Return the ranks that take part at present: all but those that the policy let go."""
        return self._worker.groups.presence.of(range(self._worker.world))

    @property
    def local_rank(self) -> int:
        """Return the index of this process's device on its host."""
        return self._process.local_rank

    @property
    def device(self) -> torch.device:
        """Return the device of this rank: its GPU, else the CPU."""
        return self._process.device

    @property
    def step_index(self) -> int:
        """Number of committed steps; inside a step's phase, of the steps before it. A step is the
        first phase behind a batch of `batches`."""
        return self._worker.status.step

    def protect(self, **named: Any) -> None:
        """Protect all state that must survive: modules, optimizers, schedulers, GradScaler,
        generators, loaders, objects with `state_dict` and `load_state_dict` or with plain
        attributes (meters, dataclasses), dicts, lists, arrays, and lists or dicts of loaders.

        Call it once, after everything is built. Raises ProtectError for unsupported objects.
        """
        self._worker.protect(named)

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`'s value, made once in the job's life and equal for every rank and every
        later worker. Raises CodecError when the value cannot be written without pickle."""
        return self._worker.shared(name, make)

    def batches(
        self,
        loader: Any,
        *,
        until: int | None = None,
        epochs: int | None = None,
        batches_per_step: int | None = None,
    ) -> Iterator[Any]:
        """Yield the batches of `loader`, epoch after epoch, until `until` steps or `epochs` epochs.

        `loader`: a DataLoader, torchdata's StatefulDataLoader, anything with `state_dict`, any
        iterable (replayed from its start for a replacement worker), or None (yields indices).
        Each batch belongs to one step: the first `run` that follows it. Inside a loop over
        `epochs` these are the batches of one epoch, and the script calls `set_epoch` itself.

        `batches_per_step`: yield lists of so many batches, whose gradients one step adds up. The
        last list of an epoch may be shorter.
        """
        loop, given = self._worker.enter_loop(loader), self._in_groups(loader, batches_per_step)
        return _LoopBatches(loop.run(given, until, epochs), given, until, epochs)

    def enumerate(
        self,
        loader: Any,
        start: int = 0,
        *,
        until: int | None = None,
        epochs: int | None = None,
        batches_per_step: int | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield (number, batch) of `batches`, as the builtin `enumerate` numbers a loader's from
        `start` in each epoch; in another process the builtin would begin at `start` again."""
        loop, given = self._worker.enter_loop(loader), self._in_groups(loader, batches_per_step)
        numbered = ((start + loop.index, batch) for batch in loop.run(given, until, epochs))
        return _LoopBatches(numbered, given, until, epochs)

    def _in_groups(self, loader: Any, size: int | None) -> Any:
        """Return a loader of lists of `size` batches, the same for the same loader; with None the
        loader itself."""
        if size is None:
            return loader
        if loader is None or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(
                f"session.batches({'None' if loader is None else '...'}, batches_per_step={size!r})"
                " has no lists of batches: give it a loader, and a number from 1 on"
            )
        known = self._groups
        if known is None or known.loader is not loader or known.size != size:
            self._groups = BatchGroups(loader, size, draws=False)
        return self._groups

    def epochs(self, epochs: int | range) -> Iterator[int]:
        """Yield the numbers of epochs, from 0 or of a range, around a loop over `batches` in each.

        A replacement worker begins in the current epoch: it repeats code between the beginning of
        the epoch and the loop over its batches, with the variables that the lost worker had there.
        Raises UsageError for anything but a number or a range.
        """
        numbers = range(epochs) if isinstance(epochs, int) else epochs
        if not isinstance(numbers, range):
            raise UsageError(
                f"session.epochs takes a number or a range, not {epochs!r}: another iterator has no"
                " place at which a replacement worker could continue"
            )
        return self._worker.enter_loop(None).epochs(numbers)

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` as one phase, again until the whole job has completed it;
        return its value. Raises PhaseError when `fn` breaks the contract of a phase."""
        return self._run(fn, _PhaseCall(fn, *args, **kwargs), undo=False)

    def run_with_undo(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` as one phase that may step more than once or change weights by
        hand. Protected state is copied first, on its devices, and ranks vote when `fn` returns.
        Each phase costs the memory of a second copy of that state, and the time to copy it. Raises
        PhaseError as `run` does."""
        return self._run(fn, _PhaseCall(fn, *args, **kwargs), undo=True)

    def _run(self, fn: Callable[..., T], call: Callable[[], T], *, undo: bool) -> T:
        status = self._worker.status
        status.exit_code = 0  # of an exit that the script has caught
        try:
            return self._worker.run(step_key(fn), fn, call, undo=undo)
        except SystemExit as leaving:
            status.exit_code = exit_code(leaving.code)
            raise

    def split(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """Yield (part, share) of a batch inside a phase that can accumulate gradients.

        Yields the batch itself, with share 1.0, unless this phase has run out of memory twice: then
        2, 4, ... parts by rows, on all ranks, whose shares sum to 1. Multiply a mean loss by the
        share, and call its backward; DDP reduces in the last one. The result is that of gradient
        accumulation over these parts.
        """
        return self._worker.phases.memory.split(batch)

    def report(self, **values: float) -> None:
        """Report metrics of the last committed step (inside a phase: of the step under way).

        Tensors of one element are taken as numbers.
        """
        numbers = {name: number_of(name, value) for name, value in values.items()}
        self._worker.report(numbers)


class _PhaseCall(partial[T]):
    """Call of a phase's function. A child that the function forks ends with it."""

    def __call__(self) -> T:
        with children_end("a child that a phase has forked"):
            return super().__call__()


def init(*, hot_spares: bool = False) -> Session:
    """Join the job and its process group. `hot_spares`: the code below keeps no rank of its own, so
    that spares may run it before they have one (docs/hot-spares.md).

    A spare has already run the code above this call. Under `outlast run` this blocks until the job
    needs this worker; under plain `python` it creates a job of one rank. Raises UsageError under
    torchrun, ConfigError when the launcher's environment variables are damaged.
    """
    return Session(start(hot_spares=hot_spares))


def number_of(name: str, value: Any) -> float:
    """Return a metric as a number: NaN for one that was lost with its worker, which decides
    nothing here."""
    if is_lost(value) or isinstance(value, LostResult):
        return math.nan
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"session.report({name}=...) takes a number, not {value!r}") from error
