"""Outlast's names over plain torch.distributed: the reference that a script is compared with.

Under torchrun this module stands in front of the installed package. It adds no arithmetic: phases
are calls, `protect` does nothing, and batches come from the loader itself.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Replicated:
    """Marks nothing."""

    def __init__(self, target: Any) -> None:
        self.target = target


class Session:
    """A rank of a plain job."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.device = self.rank, torch.device("cpu")
        self.step_index = 0
        self.reports: dict[int, dict[str, float]] = {}
        self._in_phase = self._pending = self._in_epochs = False

    def protect(self, **named: Any) -> None:
        """Nothing is replaced here, so nothing needs to survive."""

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return rank 0's value."""
        values = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(values)
        return values[0]

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn`; the first call after a batch was drawn completes a step."""
        self._in_phase = True
        result = fn(*args, **kwargs)
        self._in_phase = False
        self.step_index += self._pending
        self._pending = False
        return result

    run_with_undo = run

    def report(self, **values: float) -> None:
        """Record numbers of the step being made, outside a phase of the last one."""
        step = self.step_index + (self._in_phase and self._pending)
        numbers = {name: float(value) for name, value in values.items()}
        self.reports.setdefault(step, {}).update(numbers)

    def batches(
        self,
        loader: Any,
        *,
        until: int | None = None,
        epochs: int | None = None,
        batches_per_step: int | None = None,
    ) -> Iterator[Any]:
        """Yield batches epoch after epoch; an epoch ends where the first rank has none left. Inside
        a loop over `epochs`, the loader's own."""
        if self._in_epochs:
            try:
                for batch in _grouped(loader, batches_per_step):
                    self._pending = True
                    yield batch
            finally:
                self._pending = False
            return
        for epoch in itertools.count():
            if epoch == epochs:
                return
            for thing in (loader, *(getattr(loader, n, None) for n in ("sampler", "dataset"))):
                if hasattr(thing, "set_epoch"):
                    thing.set_epoch(epoch)
            length = None if loader is None else self._shortest(_length(loader))
            source = iter(itertools.count() if loader is None else loader)
            for index in itertools.count():
                if self.step_index == until:
                    return
                if index == length:
                    break
                batch = next(source, None)
                if loader is not None and length is None and not self._shortest(batch is not None):
                    break
                self._pending = True
                yield batch

    def enumerate(self, loader: Any, start: int = 0, **options: Any) -> Iterator[tuple[int, Any]]:
        """Yield numbered batches."""
        return enumerate(self.batches(loader, **options), start)

    def epochs(self, epochs: int | range) -> Iterator[int]:
        """Yield numbers; batches are those of one epoch from here on."""
        self._in_epochs = True
        yield from range(epochs) if isinstance(epochs, int) else epochs

    def _shortest(self, length: int | None) -> int | None:
        shortest = torch.tensor(-1 if length is None else int(length))
        dist.all_reduce(shortest, dist.ReduceOp.MIN)
        return None if shortest < 0 else int(shortest)


def _grouped(loader: Any, size: int | None) -> Iterator[Any]:
    """Yield batches, or lists of `size` of them."""
    batches = iter(loader)
    if size is None:
        yield from batches
    else:
        while group := list(itertools.islice(batches, size)):
            yield group


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def init(*, hot_spares: bool = False) -> Session:
    """Join the process group that torchrun, or a test that forks ranks, describes."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meet = os.environ.get("PLAIN_RENDEZVOUS", "env://")
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    session = Session()

    def finish() -> None:
        folder = Path(os.environ["DIGESTS"])
        (folder / f"reports-{session.rank}.json").write_text(json.dumps(session.reports))
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(finish)
    return session
