"""Trainer of torchtitan whose ranks can be replaced: `OutlastTitanTrainer` in place of `Trainer`.

The loop and the step are written anew here, as in torchtitan 0.3: it reduces the numbers that it
logs behind the optimizer's step, in the same function. Here a step is a phase, and so are these
numbers, a checkpoint and a validation. Everything else stays torchtitan's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import distributed as dist

from outlast.errors import UsageError
from outlast.integrations.framework_loop import FrameworkLoop, refuse
from outlast.worker.batch_loop import ENDLESS

_KNOWN = "0.3."


def _import() -> Any:
    try:
        found = version("torchtitan")
    except PackageNotFoundError as error:
        raise UsageError(
            "torchtitan cannot be imported: pip install 'torchtitan==0.3.0'"
        ) from error
    if not found.startswith(_KNOWN):
        raise UsageError(
            f"torchtitan {found}: its step is written anew for {_KNOWN}x, and another version may"
            " compute another one; nothing was trained: pip install 'torchtitan==0.3.0'"
        )
    return import_module("torchtitan.trainer")


_titan = _import()


class TitanPlace:
    """State of a trainer between its steps, for `session.protect`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as plain values."""
        metrics = self._trainer.metrics_processor
        times = len(metrics.data_loading_times)
        return {
            **self._trainer.state_dict(),
            "tokens": metrics.ntokens_since_last_log,
            "times": times,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place. Times of loading are those of this process."""
        self._trainer.load_state_dict(state)
        metrics = self._trainer.metrics_processor
        metrics.ntokens_since_last_log = state["tokens"]
        metrics.data_loading_times[:] = [0.0] * state["times"]


class LayoutHooks:
    """Hooks by which modules of torchtitan give their state in another layout (fused weights as
    parts): they gather shards from all ranks. Outlast's own copies hold the shards as they are."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        modules = [module for part in parts for module in part.modules()]
        tables = [table for m in modules for table in (m._state_dict_hooks, *_load_hooks(m))]
        self._hooks = [
            (table, number, hook)
            for table in tables
            for number, hook in table.items()
            if getattr(getattr(hook, "hook", hook), "__module__", "").startswith("torchtitan.")
        ]

    def take(self) -> None:
        """Take the hooks from their modules."""
        for table, number, _ in self._hooks:
            del table[number]

    def put_back(self) -> None:
        """Put the hooks back."""
        for table, number, hook in self._hooks:
            table[number] = hook


def _load_hooks(module: torch.nn.Module) -> tuple[Any, ...]:
    return (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)


class OutlastTitanTrainer(_titan.Trainer):
    """Trainer of torchtitan in a job that outlasts the loss of ranks: `OutlastTitanTrainer(config)`
    in place of `config.build()`."""

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.Trainer.Config):
        """Configuration whose `build` makes this trainer."""

    def __init__(self, config: Any) -> None:
        self.loop = FrameworkLoop("torchtitan")
        super().__init__(config)

    def train(self) -> None:
        """Train, as Trainer.train does."""
        self.loop.must_be_first("trainer.train")
        refuse("torchtitan", _unsupported(self))
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        self._hooks = LayoutHooks(self.model_parts)
        self._hooks.take()
        self.loop.begin(ENDLESS, TitanPlace(self), **self._protected())
        folder = self.config.dump_folder
        with self.config.profiler.build(global_step=self.step, base_folder=folder) as profiler:
            while self.should_continue_training():
                self.loop.next_epoch()
                before = self.step
                for batch in self.loop.session.batches(self.dataloader):
                    self._take_step(batch)
                    profiler.step()
                    if not self.should_continue_training():
                        break
                if self.step == before:
                    _titan.logger.warning("Ran out of data.")
                    break
        self.loop.end()
        self._hooks.put_back()
        _titan.logger.info("Training completed")

    def _protected(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"model{n}": each for n, each in enumerate(self.model_parts)}
        found |= {f"optimizer{n}": each for n, each in enumerate(self.optimizers)}
        return found | {f"scheduler{n}": each for n, each in enumerate(self.lr_schedulers)}

    def _take_step(self, batch: Any) -> None:
        self.step += 1
        self.gc_handler.run(self.step)
        self.metrics_processor.ntokens_since_last_log += batch[1].numel()
        self.metrics_processor.data_loading_times.append(0.0)
        numbers = self.loop.run(
            type(self).post_dataloading_process, partial(self._run_step, batch, self.ntokens_seen)
        )
        loss, norm, tokens, own, self.ntokens_seen = numbers
        rates = self.lr_schedulers.get_metrics()
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self._report(loss, norm, (tokens, own), rates)
        is_last = self.step == self.config.training.steps
        if self.checkpointer._should_save(self.step, is_last):
            self.loop.collective("checkpoint", partial(self._save, is_last))

    def _save(self, is_last: bool) -> None:
        self._hooks.put_back()
        try:
            self.checkpointer.save(self.step, last_step=is_last)
        finally:
            self._hooks.take()

    def _run_step(self, batch: Any, count: int) -> tuple[float, float, int, int, int]:
        """Run the phase of a step, behind `count` tokens. Return its loss, the norm of gradients,
        the tokens of all ranks and of this one, and those that this one has had."""
        self.ntokens_seen, utils = count, _titan.dist_utils
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        inputs, labels = dict(batch[0]), batch[1]
        own = (labels != _titan.IGNORE_INDEX).sum()
        tokens = own.to(self.device)
        if self.parallel_dims.dp_enabled:
            tokens = utils.dist_sum_tensor(tokens, self.parallel_dims.get_mesh("batch"))
        for name, value in inputs.items():
            inputs[name] = value.to(self.device) if isinstance(value, torch.Tensor) else value
        loss = self.forward_backward_step(
            input_dict=inputs, labels=labels.to(self.device), global_valid_tokens=tokens
        )
        norm = utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=None,
            ep_enabled=False,
        )
        self.checkpointer.maybe_wait_for_staging()
        numbers = loss.item(), float(norm.item()), int(tokens), int(own), self.ntokens_seen
        for each in self.optimizers:  # their container is an Optimizer too, which has no state
            each.step()
        return numbers

    def _report(
        self, loss: float, norm: float, tokens: tuple[int, int], rates: dict[str, float]
    ) -> None:
        """Log the numbers of a step, reduced over ranks."""

        def reduce() -> tuple[float, float, float]:
            mesh, device = self.parallel_dims.get_optional_mesh("loss"), self.device
            own = torch.tensor(loss, device=device)
            all_tokens, own_tokens = (torch.tensor(each, device=device) for each in tokens)
            count = torch.tensor(self.ntokens_seen, dtype=torch.int64, device=device)
            utils = _titan.dist_utils
            return (
                utils.dist_sum(own, mesh),
                utils.dist_max(own * all_tokens / own_tokens, mesh),
                utils.dist_sum(count, mesh),
            )

        if self.parallel_dims.dp_cp_enabled:
            mean, most, count = self.loop.collective("numbers", reduce)
        else:
            mean, most, count = loss, loss, self.ntokens_seen
        if not math.isfinite(mean):
            raise RuntimeError(f"the loss of step {self.step} is {mean}")
        metrics = {"n_tokens_seen": count, **rates}
        self.metrics_processor.log(self.step, mean, most, norm, extra_metrics=metrics)


def _unsupported(trainer: Any) -> list[str]:
    """Return the features of a trainer that cannot be made equal."""
    config, dims = trainer.config, trainer.parallel_dims
    found = []
    if trainer.gradient_accumulation_steps != 1:
        found.append("global_batch_size: gradient accumulation; use a larger local_batch_size")
    if dims.pp_enabled or dims.ep_enabled or dims.cp_enabled:
        found.append("pipeline, expert and context parallelism")
    hooks = (
        trainer.optimizers._optimizer_step_pre_hooks,
        trainer.optimizers._optimizer_step_post_hooks,
    )
    if any(hooks):
        found.append("hooks of the container of optimizers, as for the balance of experts")
    if config.validator.enable:
        found.append("validator: evaluate checkpoints in another job")
    if not config.training.disable_cuda_graphs:
        found.append("CUDA graphs, which hold collectives: training.disable_cuda_graphs")
    if getattr(config.checkpoint, "async_mode", "disabled") != "disabled":
        found.append(
            "checkpoint.async_mode: `outlast run --checkpoint-every` saves in the background"
        )
    if dist.get_backend() != "outlast":
        found.append(f"a group of {dist.get_backend()}, which torchtitan has made by itself")
    return found
