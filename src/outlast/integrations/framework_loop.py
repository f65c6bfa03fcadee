"""Training loops of frameworks, whose steps, evaluations and collectives become phases.

A framework keeps its loop. An adapter calls `begin` when everything is built, `next_epoch` before
each epoch, draws through `batches`, and gives each step, evaluation and collective to `run`. A
replacement worker runs the script into the framework's loop, where the first epoch and the first
draw give it the place of the lost worker:

    begin -> next_epoch -> (the place at the beginning of the epoch is restored)
          -> batches    -> (the place at the draw is restored) -> run -> it has joined
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from outlast.checkpoint.format import codec
from outlast.checkpoint.script_state import Stateful
from outlast.data.batch_groups import BatchGroups
from outlast.errors import UsageError
from outlast.worker.phases.step_calls import step_key
from outlast.worker.script.value_encoding import refill, written
from outlast.worker.script.value_paths import is_own_class
from outlast.worker.session import Session, start
from outlast.worker.state.optimizer_state import hyperparameters, put_in_groups

_CHANGED_TWICE = 2
T = TypeVar("T")
_running: list[str] = []  # the framework of this process


def import_framework(name: str, minimum: tuple[int, int], distribution: str = "") -> Any:
    """Import a framework. Raise UsageError if it is absent or older than `minimum`."""
    needed = f"{distribution or name}>={minimum[0]}.{minimum[1]}"
    try:
        module = import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} cannot be imported ({error}): pip install '{needed}'") from error
    version = str(module.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < minimum:
        raise UsageError(f"{name} {version} is too old for Outlast: pip install '{needed}'")
    return module


class FrameworkLoop:
    """Session of a process whose training loop belongs to a framework."""

    def __init__(self, framework: str) -> None:
        """Take a seat. Raise UsageError if another integration has one in this process."""
        if _running:
            raise UsageError(
                f"{framework} cannot train in the process in which {_running[0]} does: a job has"
                " one training loop; start a second job for the other"
            )
        _running.append(framework)
        self.framework = framework
        self._worker = start()
        self.session = Session(self._worker)
        self._epochs: Iterator[int] | None = None
        self.has_begun = False  # the training loop

    @property
    def index(self) -> int:
        """Return the number of the newest draw in its epoch."""
        return self._worker.loop.index

    @property
    def continues(self) -> bool:
        """Return whether this process has taken over a place of the run."""
        return self._worker.phases.joining.walk is not None

    @property
    def is_real(self) -> bool:
        """Return False in attempts that are always undone: rehearsals and dry steps."""
        return self._worker.phases.is_real

    def begin(self, epochs: int | range, place: Stateful, **protected: Any) -> None:
        """Protect the state of a run, and begin the framework's loop over epochs."""
        self._worker.script.check_header = _no_header
        self.protect(FrameworkPlace(place, protected), **protected)
        self._epochs = iter(self.session.epochs(epochs))

    def protect(self, place: Stateful, **protected: Any) -> None:
        """Protect the state of a run, whose loop begins now. `place`: the framework's own state,
        which a replacement worker gets at each draw."""
        self.session.protect(place=place, **protected)
        self.has_begun = True

    def must_be_first(self, call: str) -> None:
        """Raise UsageError if the training loop has begun, or ended, before `call`."""
        if self.has_begun:
            raise UsageError(
                f"{call} comes behind the training of this process, and a run has one training"
                " loop: nothing was lost, do it in another run, from a checkpoint"
            )

    def next_epoch(self) -> int:
        """Begin the next epoch, or in a replacement worker the current one; return its number."""
        assert self._epochs is not None
        return next(self._epochs)

    def end(self) -> None:
        """End the loop over epochs."""
        if self._epochs is not None:
            self._epochs.close()  # type: ignore[attr-defined] # a generator

    def run(self, function: Callable[..., Any], call: Callable[[], T], *, undo: bool = False) -> T:
        """Run `call` as a phase, which runs the script's `function`. `undo`: it may step more than
        once."""
        return self._worker.run(step_key(function), function, call, undo=undo)

    def collective(self, name: str, call: Callable[[], T]) -> T:
        """Run a collective of the framework: as a phase of its own between phases of the loop."""
        if self._worker.phases.attempt is not None or not self.has_begun:
            return call()
        return self._worker.run(f"{self.framework}.{name}", _collective, call, undo=False)


def _no_header(*_: Any) -> None:
    """Accept the code that iterates over epochs and batches: it is the framework's."""


def _collective() -> None:
    """Function of a phase that runs no code of the script."""


class FrameworkPlace:
    """Place of a framework's loop, with its learning rates: a replacement worker gets schedulers
    and optimizers from another rank only when it joins, and hooks at its first draw read them."""

    def __init__(self, place: Stateful, protected: Mapping[str, Any]) -> None:
        self._place = place
        named = protected.items()
        self._optimizers = {n: each for n, each in named if isinstance(each, Optimizer)}
        self._schedulers = {n: each for n, each in named if isinstance(each, LRScheduler)}

    def state_dict(self) -> dict[str, Any]:
        """Return the place, as plain values and tensors."""
        return {
            "place": self._place.state_dict(),
            "rates": {name: hyperparameters(each) for name, each in self._optimizers.items()},
            "schedulers": {name: each.state_dict() for name, each in self._schedulers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        for name, rates in state["rates"].items():
            put_in_groups(self._optimizers[name], rates)
        for name, saved in state["schedulers"].items():
            self._schedulers[name].load_state_dict(saved)
        self._place.load_state_dict(state["place"])


class StepBatches(list[Any]):
    """Batches of one step. For pytrees it is a leaf, as a batch is."""


class LoopLoader:
    """Training loader of a framework, whose batches have a place in the run. It gives the batches
    of a step at once: `size`, or fewer at the end of an epoch. Its length counts batches."""

    def __init__(self, loop: FrameworkLoop, loader: Any, size: int, *, draws: bool) -> None:
        """`draws`: see BatchGroups."""
        self._loop, self.loader, self.size = loop, loader, size
        self._groups = BatchGroups(loader, size, draws=draws)

    def __iter__(self) -> Iterator[StepBatches]:
        batches = self._loop.session.batches  # begins with the first draw
        if self.size == 1:  # other ranks may read these
            for batch in batches(self.loader):
                yield StepBatches([batch])
        else:
            for group in batches(self._groups):
                yield StepBatches(group)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        """Return the data set."""
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        """Return the sampler, whose `set_epoch` a framework calls."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """Return the sampler of batches."""
        return getattr(self.loader, "batch_sampler", None)

    @property
    def batch_size(self) -> Any:
        """Return the number of samples of a batch."""
        return getattr(self.loader, "batch_size", None)


class PlainAttributes:
    """Plain attributes of objects that a framework calls between phases (callbacks), for a
    replacement worker. Others may not change if their object's class is the script's own."""

    def __init__(self, objects: dict[str, Any], without: frozenset[str] = frozenset()) -> None:
        self._objects, self._without = objects, without
        self._others: dict[tuple[str, str], Any] = {}
        self._changes: dict[tuple[str, str], int] = {}

    def state_dict(self) -> dict[str, dict[str, bytes]]:
        """Return the plain attributes of each object, encoded."""
        state: dict[str, dict[str, bytes]] = {}
        for name, each in self._objects.items():
            found = state[name] = {}
            for attribute, value in vars(each).items():
                if attribute in self._without:
                    continue
                data = written(value)
                if data is not None:
                    found[attribute] = data
                elif is_own_class(type(each)):
                    self._follow(name, attribute, value)
        return state

    def _follow(self, name: str, attribute: str, value: Any) -> None:
        key = (name, attribute)
        size = len(value) if isinstance(value, (list, dict, set)) else 0
        look, before = (value, size), self._others.get(key)
        self._others[key] = look
        if before is None or (before[0] is value and before[1] == size):
            return
        self._changes[key] = self._changes.get(key, 0) + 1
        if self._changes[key] == _CHANGED_TWICE:
            raise UsageError(
                f"the loop changes {name}.{attribute} ({type(value).__name__}), which a"
                " replacement worker could not get: keep plain values of at most 1 MiB in"
                f" attributes of {name}"
            )

    def load_state_dict(self, state: dict[str, dict[str, bytes]]) -> None:
        """Set the plain attributes of each object."""
        for name, each in self._objects.items():
            attributes, saved = vars(each), state[name]
            for attribute, data in saved.items():
                live = attributes.get(attribute)
                if attribute not in attributes or written(live) != data:
                    value, _ = refill(live, codec.decode(data), in_place=False)
                    attributes[attribute] = value
            for attribute in attributes.keys() - saved.keys() - self._without:
                if written(attributes[attribute]) is not None:  # bound later than at that place
                    del attributes[attribute]


def own_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules of the script's own classes, by name."""
    return {
        f"module {name}": each for name, each in model.named_modules() if is_own_class(type(each))
    }


def refuse(framework: str, reasons: Sequence[str]) -> None:
    """Raise UsageError for features of a framework that cannot be made equal."""
    if reasons:
        raise UsageError(f"Outlast cannot keep this {framework} run equal: {'; '.join(reasons)}")
