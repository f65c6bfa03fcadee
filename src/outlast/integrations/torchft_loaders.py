"""Loaders and samplers of scripts that were written for torchft, and the loops around them."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import data

from outlast.config import local_rank, set_rank, worker_settings
from outlast.errors import UsageError
from outlast.worker.script.value_paths import own_frames

Read = Callable[[Any], Iterator[Any]]
_readers: list[Read] = []  # of this process's manager


def read_by(read: Read) -> None:
    """Let the manager of this process read training loaders."""
    _readers.append(read)


class _Loader:
    """Training loader, which gives a batch again until its step is committed."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        if not _readers:
            raise UsageError(
                f"{type(self).__name__} of outlast.integrations.torchft_manager is read before the"
                " script has made its Manager: it is for the training loop; use torch's for others"
            )
        return _readers[0](self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise UsageError(
                f"loader.{name}() would keep a second position beside the run's own: leave it out;"
                " `outlast run --resume` continues at the batch that follows"
            )
        return getattr(self.loader, name)


class DataLoader(_Loader):
    """DataLoader of torch for the training loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(data.DataLoader(*args, **kwargs))


class StatefulDataLoader(_Loader):
    """StatefulDataLoader of torchdata for the training loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = import_module("torchdata.stateful_dataloader").StatefulDataLoader
        super().__init__(kind(*args, **kwargs))


class DistributedSampler(data.DistributedSampler[Any]):
    """Sampler of torchft: each rank reads its share, and each sample is read."""

    def __init__(
        self,
        dataset: Any,
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        count = 1 if num_replicas is None else num_replicas
        self.place = (group_rank or 0) + count * replica_rank, count * num_replica_groups
        rank, world = self.place
        super().__init__(dataset, rank=rank, num_replicas=world, **kwargs)


def set_replica_group() -> None:
    """Set torchft's variables in a worker that has a rank already. A spare waits where it reads
    them."""
    settings = worker_settings()
    if settings is not None and settings.seat >= 0:
        group = settings.seat // settings.ranks_per_node
        set_rank(settings.seat, settings.world, local_rank(), group)


def why_not_shared(loader: Any, rank: int, world: int) -> Iterator[str]:
    """Yield why a loader does not read the share of a rank."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, data.DistributedSampler):
        found = sampler.rank, sampler.num_replicas
        if found != (rank, world):
            yield (
                f"a sampler of rank {found[0]} of {found[1]} in rank {rank} of {world}: a replica"
                " group is a rank here (REPLICA_GROUP_ID and NUM_REPLICA_GROUPS are set to it)"
            )


def schedulers_of(*optimizers: Optimizer) -> list[LRScheduler]:
    """Return the schedulers of an optimizer that the script's variables name."""
    found: dict[int, LRScheduler] = {}
    for frame in reversed([*own_frames()]):
        for value in (*frame.f_globals.values(), *frame.f_locals.values()):
            if isinstance(value, LRScheduler) and any(value.optimizer is o for o in optimizers):
                found[id(value)] = value
    return [*found.values()]


def why_not_continued(counts_epochs: bool) -> Iterator[str]:
    """Yield why the loops around the loader, on the stack, cannot be continued by another process.
    `counts_epochs`: manager.epochs gives the numbers of epochs."""
    for depth, frame in enumerate(own_frames()):
        loops = [*_loops_at(frame)]
        if not depth:
            yield from _why_not_read(loops.pop()) if loops else ()
        for each in loops:
            if not (counts_epochs and "epochs" in ast.unparse(each.iter)):
                yield (
                    f"`for {ast.unparse(each.target)} in {ast.unparse(each.iter)}` around the loop"
                    " over batches begins anew in a replacement worker: use `for ... in"
                    " manager.epochs(count)`, or `while manager.current_step() < count`"
                )


def _why_not_read(loop: ast.For | ast.comprehension) -> Iterator[str]:
    """Yield why the loop over the loader itself cannot be continued elsewhere."""
    call = loop.iter
    if isinstance(loop, ast.comprehension):
        yield "the loop over batches is inside a comprehension: use a for statement"
    elif isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
        name, target = call.func.id, loop.target
        if name == "enumerate" and isinstance(target, ast.Tuple):
            number = ast.unparse(target.elts[0])
            body = (node for part in loop.body for node in ast.walk(part))
            is_read = any(isinstance(node, ast.Name) and node.id == number for node in body)
            if is_read:
                yield (
                    f"`enumerate` around the loader counts `{number}` from 0 again in a replacement"
                    " worker: use manager.current_step()"
                )
        elif name in ("zip", "enumerate", "islice"):
            yield f"`{name}` around the loader begins anew in a replacement worker"


def _loops_at(frame: types.FrameType) -> Iterator[ast.For | ast.comprehension]:
    """Yield the `for` loops around the line of a frame, the innermost last."""
    for node in ast.walk(_parsed(frame.f_code.co_filename)):
        if isinstance(node, ast.For):
            head, last = node.lineno, node.end_lineno
        elif isinstance(node, ast.comprehension):
            head, last = node.iter.lineno, node.iter.end_lineno
        else:
            continue
        first = frame.f_code.co_firstlineno
        if first <= head <= frame.f_lineno <= (last or head):
            yield node


@cache
def _parsed(name: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(name)))
    except SyntaxError:
        return ast.Module([], [])


class JobGroup:
    """Stand-in for a process group of torchft: ranks use the job's. A `timeout` has no effect."""

    def __init__(self, timeout: Any = None, **_: Any) -> None:
        self.timeout = timeout

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"a process group of torchft was asked for {name}: in a job of Outlast collectives are"
            " manager.allreduce, or torch.distributed's inside of a step"
        )


class ProcessGroupGloo(JobGroup):
    """Gloo, of the job."""


class ProcessGroupNCCL(JobGroup):
    """NCCL, of the job."""
