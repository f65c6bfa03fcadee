"""Place of a Lightning trainer in its loops, as plain values that another process can take over.

| part | contents |
|---|---|
| progress | counters of the loops |
| results | numbers of `self.log`, with what they have added up |
| metrics | states of the module's torchmetrics |
| shown | metrics that callbacks and loggers read |
| attributes | plain attributes of the module, the data module and the callbacks |

A step's counter of completed steps follows its counter of ready ones: the first grows behind the
vote, in the same phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from outlast.integrations.framework_loop import PlainAttributes, own_modules

_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph")
_INDEX = ("add_dataloader_idx", "dataloader_idx", "metric_attribute")
_STATES = ("value", "cumulated_batch_size")
_CONNECTOR = ("_first_loop_iter", "_current_fx")
_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class LightningPlace:
    """State of a trainer's loops, logged numbers, metrics and callbacks, for `session.protect`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        module = trainer.lightning_module
        pytorch = import_module("lightning.pytorch")
        objects = own_modules(module) | {"module ": module, "datamodule": trainer.datamodule}
        for number, callback in enumerate(trainer.callbacks):
            objects[f"{type(callback).__name__}{number or ''}"] = callback
        bases = (pytorch.LightningModule(), pytorch.LightningDataModule())
        inner = frozenset({"forward"}).union(*(vars(each).keys() for each in bases))
        self._attributes = PlainAttributes(
            {name: each for name, each in objects.items() if each is not None}, inner
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as plain values and tensors."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        connector, val = trainer._logger_connector, fit.epoch_loop.val_loop
        return {
            "progress": [_followed(_counters(each)) for each in self._progress()],
            "loop": [
                fit.epoch_loop._batches_that_stepped,
                fit._data_fetcher.fetched if fit._data_fetcher is not None else 0,
                trainer.should_stop,
                val._has_run,
            ],
            "outputs": list(val._logged_outputs),
            "modes": dict(val._module_mode.mode),
            "results": [_results(each) for each in self._collections()],
            "metrics": {name: _metric(each) for name, each in self._metrics()},
            "shown": {name: dict(getattr(connector, name)) for name in _SHOWN},
            "connector": [getattr(connector, name) for name in _CONNECTOR],
            "attributes": self._attributes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        connector, val = trainer._logger_connector, fit.epoch_loop.val_loop
        for each, counters in zip(self._progress(), state["progress"], strict=True):
            _count(each, counters)
        fit.epoch_loop._batches_that_stepped, fetched, trainer.should_stop, val._has_run = state[
            "loop"
        ]
        if fit._data_fetcher is not None:
            fit._data_fetcher.fetched = fetched
        device = trainer.strategy.root_device
        val._logged_outputs = _moved(state["outputs"], device)
        val._module_mode.mode = dict(state["modes"])
        for each, saved in zip(self._collections(), state["results"], strict=True):
            self._load_results(each, _moved(saved, device))
        for name, metric in self._metrics():
            _load_metric(metric, _moved(state["metrics"][name], device))
        for name in _SHOWN:
            setattr(connector, name, _moved(state["shown"][name], device))
        for name, value in zip(_CONNECTOR, state["connector"], strict=True):
            setattr(connector, name, value)
        self._attributes.load_state_dict(state["attributes"])

    def _progress(self) -> list[Any]:
        fit = self._trainer.fit_loop
        epoch = fit.epoch_loop
        return [
            fit.epoch_progress,
            epoch.batch_progress,
            epoch.scheduler_progress,
            epoch.automatic_optimization.optim_progress,
            epoch.manual_optimization.optim_step_progress,
            epoch.val_loop.batch_progress,
        ]

    def _collections(self) -> list[Any]:
        epoch = self._trainer.fit_loop.epoch_loop
        return [epoch._results, epoch.val_loop._results]

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        """Yield the torchmetrics of the module, and their names."""
        kind = import_module("torchmetrics").Metric
        module = self._trainer.lightning_module
        if any(issubclass(each, kind) for each in _kinds_of(module)):
            for name, each in module.named_modules():
                if isinstance(each, kind):
                    yield name, each

    def _load_results(self, live: Any, saved: dict[str, dict[str, Any]]) -> None:
        """Make the logged numbers those of another process."""
        home = import_module("lightning.pytorch.trainer.connectors.logger_connector.result")
        for key in live.keys() - saved.keys():
            del live[key]
        for key in [*saved]:
            record = saved[key]
            if key not in live:
                meta = home._Metadata(**record["meta"], reduce_fx=record["reduce"])
                should, op, rank_zero_only = record["sync"]
                sync = home._Sync(
                    fn=self._trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only
                )
                sync.op = op
                meta.sync = sync
                live[key] = home._ResultMetric(meta, record["is_tensor"])
            result = live[key]
            for name, value in record["attributes"].items():
                setattr(result, name, value)
            if not result.is_tensor:
                result.value = self._trainer.lightning_module.get_submodule(
                    result.meta.metric_attribute
                )
        ordered = {key: live[key] for key in saved}
        live.clear()
        live.update(ordered)


def _counters(progress: Any) -> dict[str, Any]:
    """Return the numbers and flags of a progress; `dataclasses.asdict` would copy each of them."""
    return {
        name: value if isinstance(value, int) else _counters(value)
        for name, value in vars(progress).items()
    }


def _followed(counters: dict[str, Any]) -> dict[str, Any]:
    """Return counters in which each step that is ready is complete."""
    if "optimizer" in counters:
        counters = {"optimizer": counters["optimizer"]}
        for part in counters["optimizer"]["step"].values():
            part["completed"] = part["ready"]
    elif counters.keys() == {"total", "current"} and counters["total"].keys() == {
        "ready",
        "completed",
    }:
        for part in counters.values():
            part["completed"] = part["ready"]
    return counters


def _count(progress: Any, counters: dict[str, Any]) -> None:
    """Set the counters of a progress."""
    for name, value in counters.items():
        live = getattr(progress, name)
        if is_dataclass(live):
            _count(live, value)
        else:
            setattr(progress, name, value)


def _kinds_of(module: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of all submodules, more quickly than `modules` would."""
    found, todo = {module}, [module]
    for each in todo:
        new = {*filter(None, each._modules.values())} - found if each._modules else ()
        found.update(new)
        todo += new
    return {*map(type, found)}


def _results(collection: Any) -> dict[str, dict[str, Any]]:
    """Return the logged numbers of a collection."""
    found = {}
    for key, result in collection.items():
        meta = result.meta
        names = ["has_reset", "_forward_cache", "_computed", "_update_count"]
        names += [name for name in _STATES if result.is_tensor and hasattr(result, name)]
        found[key] = {
            "meta": {name: getattr(meta, name) for name in (*_META, *_INDEX)},
            "reduce": meta.reduce_fx.__name__,
            "sync": [meta.sync.should, meta.sync.op, meta.sync.rank_zero_only],
            "is_tensor": result.is_tensor,
            "attributes": {name: getattr(result, name) for name in names},
        }
    return found


def _metric(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: getattr(metric, name) for name in names}


def _load_metric(metric: nn.Module, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, value)


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value whose tensors are on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value
