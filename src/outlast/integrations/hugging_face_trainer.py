"""Trainer of Hugging Face whose ranks can be replaced: `OutlastTrainer` in place of `Trainer`.

An epoch of the Trainer is written anew here, line by line as in transformers, with the session's
batches; everything else stays the Trainer's own. A step (`training_step` of its batches, clipping,
`optimizer.step`) is a phase, and so are an evaluation, a checkpoint, and the mean of a logged loss.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from outlast.checkpoint.format import codec
from outlast.errors import UsageError
from outlast.integrations.framework_loop import (
    FrameworkLoop,
    LoopLoader,
    PlainAttributes,
    import_framework,
    own_modules,
    refuse,
)
from outlast.integrations.hugging_face_epochs import EpochBatches
from outlast.worker.script.value_paths import is_own_class

_transformers = import_framework("transformers", (5, 24))
_accelerate = import_framework("accelerate", (1, 15))
_trainer = _transformers.trainer
_NUMBERS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")
_PLATEAU = (torch.optim.lr_scheduler.ReduceLROnPlateau, _trainer.GreedyLR)


@dataclasses.dataclass
class EpochPlace:
    """Local variables of the Trainer's epoch."""

    step: int = -1
    grad_norm: float | None = None
    learning_rate: float | None = None


class TrainerPlace:
    """State of a Trainer between its steps, for `session.protect`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        stateful = _transformers.trainer_callback.ExportableState
        self._objects: dict[str, Any] = own_modules(trainer.model)
        for number, each in enumerate(trainer.callback_handler.callbacks):
            if is_own_class(type(each)) or isinstance(each, stateful):
                self._objects[f"{type(each).__name__}{number}"] = each
        without = frozenset({"log_history", "forward", *vars(torch.nn.Module())})
        self._attributes = PlainAttributes(self._objects, without)
        self._history: tuple[int, bytes] = (-1, b"")

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as plain values and tensors."""
        trainer = self._trainer
        self._objects |= {"state": trainer.state, "control": trainer.control}
        history = trainer.state.log_history
        if self._history[0] != len(history):
            self._history = len(history), codec.encode(history)
        return {
            "attributes": self._attributes.state_dict(),
            "epoch": dataclasses.asdict(trainer.epoch_place),
            "history": self._history[1],
            "numbers": {name: getattr(trainer, name) for name in _NUMBERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        trainer = self._trainer
        self._objects |= {"state": trainer.state, "control": trainer.control}
        self._attributes.load_state_dict(state["attributes"])
        vars(trainer.epoch_place).update(state["epoch"])  # an epoch under way holds the object
        trainer.state.log_history[:] = codec.decode(state["history"])
        self._history = -1, b""
        for name, value in state["numbers"].items():
            is_tensor = isinstance(value, torch.Tensor)
            setattr(trainer, name, value.to(trainer.args.device) if is_tensor else value)


class OutlastTrainer(_trainer.Trainer):
    """Trainer in a job that outlasts the loss of ranks."""

    _tr_loss: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.loop = FrameworkLoop("transformers")
        self.epoch_place = EpochPlace()
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as Trainer.train does."""
        self.loop.must_be_first("trainer.train")
        return super().train(*args, **kwargs)

    def _run_epoch(
        self, model: Any, epoch: int, train_dataloader: Any, steps_in_epoch: int, **more: Any
    ) -> None:
        """Run one epoch. A replacement worker skips those before its own."""
        if not self.loop.has_begun:
            refuse("transformers", _unsupported(self, train_dataloader, more))
            epochs = range(epoch, max(epoch + 1, self.state.num_train_epochs))
            self.loop.begin(epochs, TrainerPlace(self), **self._protected(model))
            self._epoch = self.loop.next_epoch()
            self._order = EpochBatches(train_dataloader.batch_sampler)
            ordered = copy.copy(train_dataloader.base_dataloader)
            vars(ordered)["batch_sampler"] = self._order  # DataLoader forbids to assign it
            size = self.args.gradient_accumulation_steps
            self._groups = LoopLoader(self.loop, ordered, size, draws=True)
        elif epoch > self._epoch:
            self._epoch = self.loop.next_epoch()
        if epoch < self._epoch:
            return
        resumed_from = more["resume_from_checkpoint"]
        if epoch == more["epochs_trained"] and resumed_from is not None:
            self._load_rng_state(resumed_from)
        self._order.epoch = epoch
        self.epoch_place = EpochPlace()
        report = (more["trial"], epoch, more["ignore_keys_for_eval"], more["start_time"])
        updates = more["num_update_steps_per_epoch"]
        for batches in self._batches(train_dataloader.device, updates):
            self._take_step(model, batches, epoch, steps_in_epoch)
            self._report(model, *report)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._report(model, *report)

    def _protected(self, model: Any) -> dict[str, Any]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.lr_scheduler}

    def _batches(self, device: Any, updates: int) -> Iterator[Any]:
        for batches in self._groups:
            move = _accelerate.utils.send_to_device
            yield [move(each, device) for each in batches] if device else batches
            if self.epoch_place.step // self._groups.size + 1 == updates:
                return

    def _take_step(self, model: Any, batches: list[Any], epoch: int, steps_in_epoch: int) -> None:
        place, args = self.epoch_place, self.args
        self.current_gradient_accumulation_steps = len(batches)
        self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
        losses, place.grad_norm, place.learning_rate = self.loop.run(
            self.compute_loss, partial(self._run_step, model, batches)
        )
        place.step += len(batches)
        for loss, inputs in zip(losses, batches, strict=True):
            if args.logging_nan_inf_filter and not torch.isfinite(loss):
                since = 1 + self.state.global_step - self._globalstep_last_logged
                self._tr_loss += self._tr_loss / since
            else:
                self._tr_loss += loss
            self.current_flos += float(self.floating_point_ops(inputs))
        self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)
        if not isinstance(self.lr_scheduler, _PLATEAU):
            self.lr_scheduler.step()
        model.zero_grad()
        self.state.global_step += 1
        self.state.epoch = epoch + (place.step + 1) / steps_in_epoch
        self.control = self.callback_handler.on_step_end(args, self.state, self.control)

    def _run_step(
        self, model: Any, batches: list[Any]
    ) -> tuple[list[torch.Tensor], float | None, float]:
        """Run the phase of a step."""
        losses = self._backward(model, batches)
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = self._get_grad_norm(model, grad_norm=norm)
        args = self.args
        self.control = self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        number = norm.item() if isinstance(norm, torch.Tensor) else norm
        rate = self._get_learning_rate()
        self.optimizer.step()
        return losses, number, rate

    def _backward(self, model: Any, batches: list[Any]) -> list[torch.Tensor]:
        """Add up the gradients of a step's batches, which the last one reduces; return losses."""
        items = self._get_num_items_in_batch(batches, self.args.device)
        state = self.accelerator.gradient_state
        syncs_each = state.plugin_kwargs.get("sync_each_batch", False)
        losses: list[torch.Tensor] = []
        for inputs in batches:
            is_last = len(losses) + 1 == len(batches)
            state._set_sync_gradients(is_last)
            reduces = is_last or syncs_each
            with contextlib.nullcontext() if reduces else self.accelerator.no_sync(model):
                losses.append(self.training_step(model, inputs, items))
            if not is_last:
                handler = self.callback_handler
                self.control = handler.on_substep_end(self.args, self.state, self.control)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    raise UsageError(
                        f"a callback stops training behind batch {len(losses)} of the"
                        f" {len(batches)} of a step, whose gradients would be lost: stop in"
                        " on_step_end"
                    )
        return losses

    def _report(self, model: Any, trial: Any, epoch: int, ignored: Any, start_time: float) -> None:
        """Log, evaluate and save where the callbacks want it. The loss is made equal first: it is
        the Trainer's only collective outside of evaluations and checkpoints."""
        place = self.epoch_place
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            gather = _trainer.nested_gather
            mean = self.loop.collective(
                "loss", lambda: gather(self._tr_loss.clone(), self.args.parallel_mode).mean().item()
            )
            number = mean / (self.state.global_step - self._globalstep_last_logged)
            logs = {"loss": number}
            if place.grad_norm is not None:
                logs["grad_norm"] = place.grad_norm
            logs["learning_rate"] = (
                self._get_learning_rate() if place.learning_rate is None else place.learning_rate
            )
            self._tr_loss -= self._tr_loss
            self._total_loss_scalar += mean
            self._globalstep_last_logged = self.state.global_step
            self.store_flos()
            self.log(logs, start_time)
        self._maybe_log_save_evaluate(
            self._tr_loss,
            place.grad_norm,
            model,
            trial,
            epoch,
            ignored,
            start_time,
            place.learning_rate,
        )

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, as one phase."""
        call = partial(super().evaluation_loop, dataloader, description, *args, **kwargs)
        if not self.loop.has_begun:
            return call()

        def evaluate() -> tuple[dict[str, Any], int]:
            output = call()
            return output.metrics, output.num_samples

        if description != "Evaluation":
            self.loop.must_be_first("trainer.predict")
        metrics, count = self.loop.run(self.compute_metrics or _nothing, evaluate)
        kind = _transformers.trainer_utils.EvalLoopOutput
        return kind(predictions=None, label_ids=None, metrics=dict(metrics), num_samples=count)

    def store_flos(self) -> None:
        """Add up the operations of all ranks."""
        if self.args.parallel_mode == _transformers.training_args.ParallelMode.DISTRIBUTED:
            gather, flos = _trainer.distributed_broadcast_scalars, [self.current_flos]
            device = self.args.device
            self.current_flos = self.loop.collective(
                "flos", lambda: gather(flos, device=device).sum().item()
            )
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.loop.collective("checkpoint", partial(super()._save_checkpoint, model, trial))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.loop.end()
        return super()._finalize_training(*args, **kwargs)


def _nothing() -> None:
    """Function of an evaluation that runs no code of the script."""


def _unsupported(trainer: Any, loader: Any, more: dict[str, Any]) -> list[str]:
    """Return the features of a Trainer that cannot be made equal."""
    args, found = trainer.args, []
    names = ("fp16", "auto_find_batch_size", "deepspeed", "fsdp", "push_to_hub")
    found += [name for name in names if getattr(args, name, None)]
    if str(args.include_num_input_tokens_seen) not in ("no", "False"):
        found.append("include_num_input_tokens_seen: it sums over ranks between phases")
    if more["trial"] is not None:
        found.append("a search of hyperparameters")
    if more["steps_trained_in_current_epoch"]:
        found.append(
            "resume_from_checkpoint inside an epoch: resume the run (outlast run --resume), or"
            " from the end of an epoch"
        )
    if type(loader).__name__ != "DataLoaderShard" or not hasattr(loader, "base_dataloader"):
        found.append(f"{type(loader).__name__} as loader: use a data set with a length")
    elif isinstance(loader.base_dataloader.dataset, torch.utils.data.IterableDataset):
        found.append("a data set without a length")
    elif not args.accelerator_config.use_seedable_sampler:
        found.append("use_seedable_sampler=False: ranks would agree on an order between phases")
    return found
