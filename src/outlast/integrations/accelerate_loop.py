"""Accelerator of Hugging Face, around a loop of the script's own, whose ranks can be replaced.

    accelerator = OutlastAccelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train(batches):
        for batch in batches:
            with accelerator.accumulate(model):
                ...

    for epoch in accelerator.epochs(3):
        for batches in accelerator.batches(loader):
            accelerator.run(train, batches)

What `prepare` and `register_for_checkpointing` got is protected when `epochs` begins. An epoch of
Accelerate's DataLoaderShard is written anew here, with the session's batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from outlast.errors import UsageError
from outlast.integrations.framework_loop import (
    FrameworkLoop,
    LoopLoader,
    import_framework,
    refuse,
)
from outlast.integrations.hugging_face_epochs import EpochBatches

_accelerate = import_framework("accelerate", (1, 15))
_synchronize = _accelerate.utils.synchronize_rng_states
T = TypeVar("T")


class PreparedBatches:
    """Batches of one optimizer step, on the device. Reading them sets what Accelerate's loader says
    of its place."""

    def __init__(self, loader: Any, batches: list[Any], *, ends_epoch: bool) -> None:
        self._loader, self._batches, self._ends_epoch = loader, batches, ends_epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        move, device = _accelerate.utils.send_to_device, self._loader.device
        for number, batch in enumerate(self._batches, 1):
            self._loader.end_of_dataloader = self._ends_epoch and number == len(self._batches)
            yield move(batch, device) if device else batch


class AcceleratorPlace:
    """State of an Accelerator between steps, for `session.protect`."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as plain values."""
        accelerator, gradients = self._accelerator, self._accelerator.gradient_state
        loaders = accelerator._dataloaders
        numbers = {id(loader): number for number, loader in enumerate(loaders)}
        open_loaders = [numbers.get(id(each), -1) for each in gradients.dataloader_references]
        return {
            "step": accelerator.step,
            "syncs": gradients.sync_gradients,
            "open": open_loaders,
            "epochs": [loader.iteration for loader in loaders],
            "ends": [[loader.end_of_dataloader, loader.remainder] for loader in loaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        accelerator, gradients = self._accelerator, self._accelerator.gradient_state
        loaders = accelerator._dataloaders
        accelerator.step = state["step"]
        gradients.sync_gradients = state["syncs"]
        gradients.dataloader_references = [
            None if number < 0 else loaders[number] for number in state["open"]
        ]
        for loader, epoch, ends in zip(loaders, state["epochs"], state["ends"], strict=True):
            loader.iteration = epoch
            loader.end_of_dataloader, loader.remainder = ends


class OutlastAccelerator(_accelerate.Accelerator):
    """Accelerator in a job that outlasts the loss of ranks. Its constructor takes a seat, so that
    it stands below slow imports, which spares execute in advance."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.loop = FrameworkLoop("accelerate")
        self.session = self.loop.session
        self._ordered: dict[int, tuple[EpochBatches, LoopLoader]] = {}
        super().__init__(*args, **options)

    def epochs(self, epochs: int | range) -> Iterator[int]:
        """Yield the numbers of epochs, as `session.epochs` does, and protect what was prepared."""
        self.loop.must_be_first("accelerator.epochs")
        refuse("Accelerate", _unsupported(self))
        named: dict[str, Any] = {f"model{n}": each for n, each in enumerate(self._models)}
        for number, optimizer in enumerate(self._optimizers):
            named[f"optimizer{number}"] = optimizer.optimizer
        for number, scheduler in enumerate(self._schedulers):
            named[f"scheduler{number}"] = scheduler.scheduler
        for number, each in enumerate(self._custom_objects):
            named[f"object{number}"] = each
        self.loop.protect(AcceleratorPlace(self), **named)
        return self.session.epochs(epochs)

    def batches(self, loader: Any) -> Iterator[PreparedBatches]:
        """Yield the batches of each optimizer step of an epoch of a prepared loader."""
        if not any(loader is each for each in self._dataloaders):
            raise UsageError(
                "accelerator.batches takes a loader that accelerator.prepare has returned, not a"
                f" {type(loader).__name__}"
            )
        order, groups = self._ordered.get(id(loader)) or self._order(loader)
        self._agree_on_generator(loader)
        loader.begin()
        loader.set_epoch(loader.iteration)
        order.epoch = loader.iteration
        for group in groups:
            last = self.loop.index * groups.size + len(group)
            yield PreparedBatches(loader, group, ends_epoch=last == len(order))
        loader.iteration += 1
        loader.end()

    def _order(self, loader: Any) -> tuple[EpochBatches, LoopLoader]:
        refuse("Accelerate", _unsupported_loader(loader))
        ordered = copy.copy(loader.base_dataloader)
        order = EpochBatches(ordered.batch_sampler)
        vars(ordered)["batch_sampler"] = order  # DataLoader forbids to assign it
        size = self.gradient_accumulation_steps
        found = order, LoopLoader(self.loop, ordered, size, draws=True)
        self._ordered[id(loader)] = found
        return found

    def _agree_on_generator(self, loader: Any) -> None:
        """Give the loader's generator the state of rank 0, as Accelerate does in each epoch."""
        generator = loader.synchronized_generator
        if generator is None or not loader.rng_types:
            return

        def agree() -> torch.Tensor:
            _synchronize(loader.rng_types, generator)
            return generator.get_state()

        generator.set_state(self.loop.collective("generator", agree))

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` as one phase, as `session.run` does."""
        return self.session.run(fn, *args, **kwargs)

    # --- collectives ---

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks."""
        return self.loop.collective("gather", partial(super().gather, tensor))

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensors or objects of all ranks, without those that pad the last batch."""
        call = partial(super().gather_for_metrics, *args, **kwargs)
        return self.loop.collective("gather_for_metrics", call)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor reduced over ranks."""
        return self.loop.collective("reduce", partial(super().reduce, *args, **kwargs))

    def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tensor padded to the size that it has on all ranks."""
        call = partial(super().pad_across_processes, *args, **kwargs)
        return self.loop.collective("pad_across_processes", call)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        self.loop.collective("wait_for_everyone", super().wait_for_everyone)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint of Accelerate's own."""
        return self.loop.collective("save_state", partial(super().save_state, *args, **kwargs))

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint of Accelerate's own, before training."""
        self.loop.must_be_first("accelerator.load_state")
        super().load_state(*args, **kwargs)


def _unsupported(accelerator: Any) -> list[str]:
    """Return the features of an Accelerator that cannot be made equal."""
    found, kind = [], str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        found.append(f"{kind}, which was not tried")
    if not accelerator._models or not accelerator._optimizers:
        found.append("no prepared model, or no prepared optimizer, before accelerator.epochs")
    if accelerator.project_configuration.automatic_checkpoint_naming:
        found.append(
            "automatic_checkpoint_naming, by which a save that is redone fails: name the folder in"
            " accelerator.save_state(folder)"
        )
    if accelerator.mixed_precision == "fp16":
        found.append("fp16: use bf16")
    state = accelerator.gradient_state
    if accelerator.gradient_accumulation_steps > 1 and not state.sync_with_dataloader:
        found.append("sync_with_dataloader=False: a step would have batches of two epochs")
    return found


def _unsupported_loader(loader: Any) -> list[str]:
    """Return the features of a prepared training loader that cannot be made equal."""
    if type(loader).__name__ != "DataLoaderShard":
        return [f"{type(loader).__name__} as loader: use a data set with a length"]
    found = []
    if isinstance(loader.base_dataloader.dataset, torch.utils.data.IterableDataset):
        found.append("a data set without a length")
    if loader.use_stateful_dataloader:
        found.append("use_stateful_dataloader: the session keeps the position of the data")
    if loader.skip_batches:
        found.append("skip_first_batches: resume the run (outlast run --resume)")
    if loader.base_dataloader.batch_sampler is None:
        found.append("a loader without batches of its own (batch_size=None)")
    if set(loader.rng_types or ()) - {"generator"}:
        found.append(f"rng_types={loader.rng_types}: ranks agree on a loader's generator alone")
    return found
