"""Training steps of a Lightning trainer: all batches of one optimizer step are one phase.

Lightning's `advance` trains on one batch. It is written anew here, line by line, for the batches of
a step:

| place | contents |
|---|---|
| before the phase | the draw of all batches of the step, hooks at the start of the first |
| in the phase | `training_step` and backward of each, hooks between them, `optimizer.step` |
| behind it | schedulers, hooks at the end of the last batch, logged numbers |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch.utils._pytree import tree_flatten, tree_unflatten

from outlast import random_state
from outlast.errors import UsageError
from outlast.integrations.framework_loop import FrameworkLoop, import_framework

_pytorch = import_framework("lightning", (2, 6)).pytorch
_call, _loggers = _pytorch.trainer.call, _pytorch.loggers


class StartedBatch(NamedTuple):
    """Batch on its device, its number in the epoch, and whether a hook ends the epoch at it."""

    batch: Any
    number: int
    ends_epoch: bool


class LightningSteps:
    """Steps of one trainer, of `size` batches each."""

    def __init__(self, loop: FrameworkLoop, trainer: Any, size: int) -> None:
        self._loop, self._trainer, self._size = loop, trainer, size
        self._accumulated = trainer.accumulate_grad_batches
        self._module = trainer.lightning_module
        self._epoch = trainer.fit_loop.epoch_loop
        self.place: Any = None  # of the trainer
        self.opened: dict[str, Any] = {}  # random states when the first epoch's loader was opened
        self._last: StartedBatch | None = None  # of the step under way, if this process ran it

    def advance(self, fetcher: Any) -> None:
        """Take one step."""
        if self._trainer.accumulate_grad_batches != self._accumulated:
            raise UsageError(
                f"accumulate_grad_batches has changed from {self._accumulated} to"
                f" {self._trainer.accumulate_grad_batches}: a step has the same number of batches"
                " throughout a run; no step was lost"
            )
        self._must_not_have_drawn()
        self._epoch.val_loop.restarting = False
        drawn, _, _ = next(fetcher)
        [group], form = tree_flatten(drawn)
        batches = [tree_unflatten([each], form) for each in group]
        remaining = self._trainer.num_training_batches - self._epoch.batch_progress.current.ready
        batches = batches[: min(len(batches), remaining)]
        first = self._last = self._start(batches[0], fetcher)
        if first.ends_epoch:
            self._processed()
            raise StopIteration
        if len(batches) > 1:
            self._last = None
        is_manual = not self._module.automatic_optimization
        call = partial(with_own_forward, self._module, self._run, first, batches[1:], fetcher)
        outputs = self._loop.run(self._module.training_step, call, undo=is_manual)
        self._finish(outputs, self._last or self._last_of(batches))

    def _must_not_have_drawn(self) -> None:
        """Refuse draws between the opening of the first epoch's loader and its first batch:
        Lightning's loader draws its seed before them."""
        opened, self.opened = self.opened, {}
        if not self._loop.continues and "torch" in random_state.moved(opened):
            raise UsageError(
                "on_train_start, or another hook before the first batch, draws from torch's"
                " generator of the process, and the loader's seed would come behind that draw: draw"
                " in the module's constructor or in configure_optimizers, or from a generator of"
                " your own"
            )

    def _last_of(self, batches: list[Any]) -> StartedBatch:
        """Return the last batch of a step in a worker that has its result from another one. Hooks
        of the transfer have changed the place already."""
        place = self.place.state_dict()
        batch = self._on_device(batches[-1])
        self.place.load_state_dict(place)
        return StartedBatch(batch, self._epoch.batch_idx, ends_epoch=False)

    def _run(self, first: StartedBatch, others: list[Any], fetcher: Any) -> Any:
        """Run the phase of a step; return what the training step of its last batch returned."""
        started, epoch = first, self._epoch
        with loggers_of_real_attempts(self._loop, self._trainer):
            for batch in others:
                self._finish(self._train(started), started)
                if epoch._should_check_val_fx(fetcher) or epoch.done:
                    raise UsageError(
                        f"a validation, or the end of training, comes between the {self._size}"
                        f" batches of a step (behind batch {started.number}): set should_stop and"
                        " max_steps, and validate, at the end of a step"
                    )
                epoch.on_advance_end(fetcher)
                fetcher.fetched += 1
                fetcher.done = fetcher.fetched >= fetcher.length
                started = self._start(batch, fetcher, is_inner=True)
            outputs = self._train(started)
        self._last = started
        return outputs

    def _start(self, batch: Any, fetcher: Any, *, is_inner: bool = False) -> StartedBatch:
        """Begin a batch, up to its training step. `is_inner`: another of its step came before."""
        epoch, trainer, index = self._epoch, self._trainer, self._epoch.batch_idx + 1
        epoch.batch_progress.is_last_batch = fetcher.done
        before = random_state.snapshot() if is_inner else {}
        batch = self._on_device(batch)
        if names := sorted(random_state.moved(before)):
            raise UsageError(
                f"a hook that transfers batches draws random numbers ({', '.join(names)}), and a"
                f" step has {self._size} batches: a replacement worker could not repeat that for"
                " the last one alone; draw in training_step"
            )
        epoch.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        if batch is None:
            raise UsageError(f"batch {index} of the training loader is None")
        _call._call_callback_hooks(trainer, "on_train_batch_start", batch, index)
        response = _call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, index)
        _call._call_strategy_hook(trainer, "on_train_batch_start", batch, index)
        if response != -1:
            epoch.batch_progress.increment_started()
            return StartedBatch(batch, index, ends_epoch=False)
        if is_inner:
            raise UsageError(
                f"on_train_batch_start has returned -1 for batch {index}, which is not the first of"
                f" its step's {self._size}: end an epoch between two steps"
            )
        epoch.batch_progress.increment_by(0, is_last_batch=True)
        return StartedBatch(batch, index, ends_epoch=True)

    def _on_device(self, batch: Any) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return _call._call_strategy_hook(self._trainer, "batch_to_device", batch, dataloader_idx=0)

    def _train(self, started: StartedBatch) -> Any:
        """Run the training step of a batch, and the optimizer's where it is due."""
        trainer, epoch = self._trainer, self._epoch
        kwargs = epoch._build_kwargs(OrderedDict(), started.batch, started.number)
        with trainer.profiler.profile("run_training_batch"):
            if self._module.automatic_optimization:
                optimizer = trainer.optimizers[0]
                return epoch.automatic_optimization.run(optimizer, started.number, kwargs)
            return epoch.manual_optimization.run(kwargs)

    def _processed(self) -> None:
        epoch = self._epoch
        epoch.batch_progress.increment_processed()
        epoch.update_lr_schedulers("step", update_plateau_schedulers=False)
        if epoch._num_ready_batches_reached():
            epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _finish(self, outputs: Any, started: StartedBatch) -> None:
        """End a batch, behind its training step."""
        trainer, name = self._trainer, "on_train_batch_end"
        batch, index, _ = started
        self._processed()
        _call._call_callback_hooks(trainer, name, outputs, batch, index)
        _call._call_lightning_module_hook(trainer, name, outputs, batch, index)
        trainer._logger_connector.on_batch_end()
        self._epoch.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()


@contextmanager
def loggers_of_real_attempts(loop: FrameworkLoop, trainer: Any) -> Iterator[None]:
    """Replace the loggers of a trainer in attempts that are always undone."""
    loggers = trainer.loggers
    if not loop.is_real:
        trainer.loggers = [_loggers.logger.DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def with_own_forward(module: Any, run: Callable[..., Any], *args: Any) -> Any:
    """Run a step, and take back the `forward` by which Lightning leads DDP to it: an attempt that
    is refused in between would leave it there."""
    own = vars(module).get("forward")
    try:
        return run(*args)
    finally:
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own
