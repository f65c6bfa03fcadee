"""Strategy of Lightning's Trainer: DDP whose ranks can be replaced.

    trainer = Trainer(strategy=OutlastStrategy(), accelerator="cpu", devices=2, max_epochs=3)

Lightning's loops, hooks and checkpoints stay its own. A training step (`training_step` and backward
of its batches, `optimizer.step`) is a phase, and so are all batches of a validation together, and
each collective of Lightning between them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from outlast import random_state
from outlast.errors import UsageError
from outlast.integrations.framework_loop import (
    FrameworkLoop,
    LoopLoader,
    import_framework,
    refuse,
)
from outlast.integrations.lightning_place import LightningPlace
from outlast.integrations.lightning_steps import (
    LightningSteps,
    loggers_of_real_attempts,
    with_own_forward,
)
from outlast.worker.batch_loop import ENDLESS

_lightning = import_framework("lightning", (2, 6))
_ddp = import_framework("lightning", (2, 6)).pytorch.strategies.ddp
_callbacks = _lightning.pytorch.callbacks
_KNOWN_CALLBACKS = (
    "Checkpoint",
    "EarlyStopping",
    "LearningRateMonitor",
    "LambdaCallback",
    "ModelSummary",
    "ProgressBar",
)


class OutlastStrategy(_ddp.DDPStrategy):
    """DDP in a job that outlasts the loss of ranks. Its constructor takes a seat, so that it stands
    below slow imports, which spares execute in advance. Options are those of DDPStrategy.

    `batches_per_step`: with manual optimization, the number of batches whose gradients
    `training_step` adds up for one step (default 1). Otherwise it is the trainer's
    `accumulate_grad_batches`.
    """

    def __init__(self, *, batches_per_step: int = 1, **options: Any) -> None:
        if batches_per_step < 1:
            raise UsageError(f"batches_per_step={batches_per_step}: a step has a batch or more")
        refuse("Lightning", [f"{n} is another backend" for n in options if "backend" in n])
        self.loop = FrameworkLoop("lightning")
        self.batches_per_step = batches_per_step
        self._is_training_loader = False
        super().__init__(process_group_backend="outlast", **options)

    # --- set-up ---

    @property
    def root_device(self) -> torch.device:
        """Return the device of this process: a spare's index may be above Lightning's `devices`."""
        first = self.parallel_devices[0]
        return first if first.type == "cpu" else self.loop.session.device

    def setup_environment(self) -> None:
        """Take the job's group, and replace Lightning's meeting of ranks behind `prepare_data`."""
        super().setup_environment()
        trainer = self.lightning_module.trainer
        trainer._data_connector.prepare_data = partial(self._prepare_data, trainer)
        for logger in trainer.loggers if self.loop.continues and trainer.is_global_zero else ():
            if isinstance(logger, _lightning.pytorch.loggers.CSVLogger):
                _keep_rows(logger)

    def _prepare_data(self, trainer: Any) -> None:
        """Call `prepare_data` on the ranks that Lightning calls it on. All ranks meet behind it, in
        the job's group: Lightning makes a gloo group of its own for that, which no lost rank can
        leave."""
        hooks = _lightning.pytorch.trainer.call
        is_overridden = _lightning.pytorch.utilities.model_helpers.is_overridden
        for owner, call in (
            (trainer.datamodule, hooks._call_lightning_datamodule_hook),
            (trainer.lightning_module, hooks._call_lightning_module_hook),
        ):
            if owner is not None and is_overridden("prepare_data", owner):
                if trainer.local_rank == 0 and (owner.prepare_data_per_node or not self.node_rank):
                    call(trainer, "prepare_data")
                self.barrier("prepare_data")

    def setup(self, trainer: Any) -> None:
        """Wrap the model, make the optimizers, and join the trainer's loops."""
        self.loop.must_be_first(f"trainer.{trainer.state.fn.value}")
        super().setup(trainer)
        if trainer.state.fn == _lightning.pytorch.trainer.states.TrainerFn.FITTING:
            self._size = trainer.accumulate_grad_batches * self.batches_per_step
            refuse("Lightning", _unsupported(trainer, self._size))
            self._join(trainer)

    def _join(self, trainer: Any) -> None:
        """Let the session take part in the loops of this trainer."""
        fit = trainer.fit_loop
        epoch, val = fit.epoch_loop, fit.epoch_loop.val_loop
        self._steps = LightningSteps(self.loop, trainer, self._size)
        fit.setup_data = partial(self._set_up_data, fit.setup_data)
        fit.on_advance_start = partial(self._start_epoch, trainer, fit.on_advance_start)
        fit.on_run_end = partial(self._end, fit.on_run_end)
        epoch.advance = self._steps.advance
        val.run = partial(self._validate, trainer, val.run)
        for module in trainer.lightning_module.modules():
            if "dist_sync_fn" in vars(module) and module.dist_sync_fn is None:
                module.dist_sync_fn = self._gather_metric

    def process_dataloader(self, dataloader: Any) -> Any:
        """Give the batches of the training loader a place in the run."""
        if not self._is_training_loader:
            return dataloader
        return LoopLoader(self.loop, dataloader, self._size, draws=False)

    def _set_up_data(self, set_up: Callable[[], None]) -> None:
        self._is_training_loader = True
        try:
            set_up()
        finally:
            self._is_training_loader = False
        if not self.loop.has_begun:
            self._steps.opened = random_state.snapshot()

    # --- the loops ---

    def _start_epoch(self, trainer: Any, start: Callable[[], None]) -> None:
        fit = trainer.fit_loop
        if not self.loop.has_begun:
            refuse("Lightning", _unsupported_data(trainer, self._size))
            _set_up_validation(trainer)
            epochs = fit.max_epochs if fit.max_epochs and fit.max_epochs > 0 else ENDLESS
            self._steps.place = LightningPlace(trainer)
            self.loop.begin(epochs, self._steps.place, **self._protected())
        self.loop.next_epoch()
        start()

    def _protected(self) -> dict[str, Any]:
        named = {"model": self.model}
        for number, optimizer in enumerate(self.optimizers):
            named[f"optimizer{number}"] = optimizer
        for number, config in enumerate(self.lr_scheduler_configs):
            named[f"scheduler{number}"] = config.scheduler
        scaler = getattr(self.precision_plugin, "scaler", None)
        return named if scaler is None else named | {"scaler": scaler}

    def _end(self, end: Callable[[], None]) -> None:
        self.loop.end()
        end()

    def _validate(self, trainer: Any, run: Callable[[], Any]) -> Any:
        """Run a validation. All its batches are one phase; the hooks behind them run once."""
        if not self.loop.has_begun:
            return run()  # Lightning's sanity check
        val, module = trainer.fit_loop.epoch_loop.val_loop, trainer.lightning_module
        with torch.no_grad():
            val.setup_data()
            if val.skip:
                return []
            call = partial(with_own_forward, module, self._batches, trainer, val)
            self.loop.run(module.validation_step, call)
            val._store_dataloader_outputs()
            return val.on_run_end()

    def _batches(self, trainer: Any, val: Any) -> None:
        """Run all batches of a validation, from the first one."""
        with loggers_of_real_attempts(self.loop, trainer):
            val.reset()
            val.on_run_start()
            fetcher, before = val._data_fetcher, 0
            while item := next(fetcher, None):  # `for` would begin again, and draw a seed
                batch, batch_index, loader_index = item
                if before != loader_index:
                    val._store_dataloader_outputs()
                before = loader_index
                val.batch_progress.is_last_batch = fetcher.done
                val._evaluation_step(batch, batch_index, loader_index, None)
                val.on_iteration_done()

    # --- collectives ---

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self.loop.collective("barrier", partial(super().barrier, *args, **kwargs))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        return self.loop.collective("broadcast", partial(super().broadcast, obj, src))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over ranks. The tensor itself stays as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        is_mean = str(reduce_op).lower() in ("mean", "avg") and tensor.device.type == "cpu"
        call = super().reduce

        def reduce() -> torch.Tensor:
            if not is_mean:
                return call(tensor.clone(), group, reduce_op)
            total = call(tensor.clone(), group, "sum")  # and divided, as Lightning does on gloo
            return total.copy_(total / dist.get_world_size(group))

        return self.loop.collective("reduce", reduce)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks."""
        return self.loop.collective(
            "all_gather", partial(super().all_gather, tensor, group, sync_grads)
        )

    def _gather_metric(self, tensor: Any, group: Any = None) -> Any:
        """Return a metric's state of all ranks."""
        gather = import_framework("torchmetrics", (1, 0)).utilities.distributed.gather_all_tensors
        return self.loop.collective("gather_metric", partial(gather, tensor, group))


def _keep_rows(logger: Any) -> None:
    """Let a new worker's CSVLogger append to the file of the lost one, which it would delete where
    both have the same version."""
    file = Path(logger.log_dir) / "metrics.csv"
    if file.is_file():
        text = file.read_bytes()
        writer = logger.experiment  # made here, which deletes the file
        file.write_bytes(text)
        writer.metrics_keys = next(csv.reader(text.decode().splitlines()), [])


def _unsupported(trainer: Any, size: int) -> list[str]:
    """Return the features of a trainer that cannot be made equal in steps of `size` batches."""
    module, found = trainer.lightning_module, []
    if module.automatic_optimization and trainer.strategy.batches_per_step != 1:
        found.append(
            "batches_per_step without manual optimization: Trainer(accumulate_grad_batches=...)"
        )
    if not module.automatic_optimization and len(trainer.strategy.optimizers) == 0:
        found.append("manual optimization without an optimizer")
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        found.append("val_check_interval as a time: ranks would validate by their clocks")
    if trainer.reload_dataloaders_every_n_epochs:
        found.append("reload_dataloaders_every_n_epochs: Lightning opens such a loader twice")
    if trainer.strategy._model_averager is not None:
        found.append("model_averaging_period: replicas differ between averages")
    known = tuple(getattr(_callbacks, name) for name in _KNOWN_CALLBACKS)
    for callback in trainer.callbacks:
        if size > 1 and getattr(callback, "_train_time_interval", None) is not None:
            found.append("train_time_interval, by which a step's batches would be interrupted")
        is_library = type(callback).__module__.partition(".")[0] in (
            "lightning",
            "pytorch_lightning",
        )
        if is_library and not isinstance(callback, known):
            found.append(f"{type(callback).__name__}, which changes or times the loop itself")
    return found


def _unsupported_data(trainer: Any, size: int) -> list[str]:
    """Return what of a trainer's data, and its place in them, cannot be made equal in steps of
    `size` batches."""
    found, fit = [], trainer.fit_loop
    if len(fit._combined_loader.flattened) != 1:
        found.append("several training loaders in one loop: combine their data sets in one loader")
    if fit._data_fetcher.length is None:
        found.append("a training loader without a length: Lightning draws its batches in advance")
    if fit.restarting or fit.epoch_loop.restarting:
        found.append(
            "ckpt_path of a place inside an epoch, whose batches Lightning does not go to: resume"
            " the run itself (outlast run --resume), or a checkpoint of an epoch's end"
        )
    if size > 1 and not _validates_between_steps(trainer, size):
        found.append(
            f"val_check_interval={trainer.val_check_interval} with {size} batches a step: a"
            f" validation would come between them; choose a multiple of {size}"
        )
    return found


def _set_up_validation(trainer: Any) -> None:
    """Make the validation's loaders now, as the sanity check does: ranks meet then, and the ranks
    that a replacement worker would meet at its first validation have theirs."""
    before = random_state.snapshot()
    if trainer.enable_validation:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
    if names := sorted(random_state.moved(before)):
        raise UsageError(
            f"val_dataloader draws from generators of the process ({', '.join(names)}), which it"
            " does before training here, since there is no sanity check: draw in a constructor,"
            " or from a generator of your own"
        )


def _validates_between_steps(trainer: Any, size: int) -> bool:
    """Return whether each validation follows the last batch of a step."""
    every, length = trainer.val_check_batch, trainer.num_training_batches
    if not trainer.enable_validation or every in (None, length, float("inf")):
        return True
    counts_on = trainer.check_val_every_n_epoch is None  # over the ends of epochs
    return every % size == 0 and not (counts_on and length % size)
