"""torchft's `Manager` in a job of Outlast: a script written for torchft changes its imports.

    from outlast.integrations.torchft_manager import DataLoader, DistributedDataParallel, Manager
    from outlast.integrations.torchft_manager import Optimizer, DistributedSampler, ProcessGroupGloo

A replica group is a rank. A step, from the draw of its batch to `optimizer.step()`, is a phase: one
that torchft would lose is run again with its batch. torchft itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import parallel

from outlast.errors import StepRefused, UsageError
from outlast.integrations.framework_loop import FrameworkLoop, refuse
from outlast.integrations.loop_bodies import LoopBody
from outlast.integrations.torchft_loaders import DataLoader as DataLoader
from outlast.integrations.torchft_loaders import DistributedSampler as DistributedSampler
from outlast.integrations.torchft_loaders import ProcessGroupGloo as ProcessGroupGloo
from outlast.integrations.torchft_loaders import ProcessGroupNCCL as ProcessGroupNCCL
from outlast.integrations.torchft_loaders import StatefulDataLoader as StatefulDataLoader
from outlast.integrations.torchft_loaders import (
    read_by,
    schedulers_of,
    set_replica_group,
    why_not_continued,
    why_not_shared,
)
from outlast.worker.batch_loop import ENDLESS

set_replica_group()
_ELSEWHERE = {
    "LocalSGD": "a plain step with each batch (replicas that differ between averages are lost)",
    "DiLoCo": "a plain step with each batch (replicas that differ between averages are lost)",
    "ParameterServer": "the job's groups",
    "ManagedProcessGroup": "the job's groups",
    "ManagedDeviceMesh": "torch's DeviceMesh and outlast.init()",
    "ProcessGroupBabyGloo": "ProcessGroupGloo",
    "ProcessGroupBabyNCCL": "ProcessGroupNCCL",
    "ProcessGroupBabyXCCL": "ProcessGroupNCCL",
    "ProcessGroupXCCL": "ProcessGroupNCCL",
    "PureDistributedDataParallel": "DistributedDataParallel",
}


def __getattr__(name: str) -> Any:
    """Refuse names of torchft by name."""
    if name in _ELSEWHERE:
        raise UsageError(
            f"torchft's {name} has no meaning in a job of Outlast: use {_ELSEWHERE[name]}"
        )
    raise AttributeError(f"module {__name__} has no attribute {name}")


class ManagerPlace:
    """Numbers of a manager, for `session.protect`."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, int]:
        """Return the numbers."""
        return {"offset": self._manager.offset, "batches": self._manager.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the numbers."""
        self._manager.offset, self._manager.batches = state["offset"], state["batches"]


class Manager:
    """Manager of torchft whose quorum is the job. Its constructor takes a seat."""

    def __init__(
        self,
        pg: Any = None,  # noqa: ARG002 - torchft's; the launcher connects ranks
        load_state_dict: Callable[[Any], None] | None = None,  # noqa: ARG002 - torchft's
        state_dict: Callable[[], Any] | None = None,  # noqa: ARG002 - torchft's
        min_replica_size: int = 1,
        **options: Any,
    ) -> None:
        self.loop = FrameworkLoop("torchft")
        session = self.loop.session
        self.rank, self.world = session.rank, session.world_size
        self.init_sync = options.pop("init_sync", True)
        refuse("torchft", [*self._unsupported(min_replica_size, options)])
        self.offset = self.batches = 0
        self.models: list[nn.Module] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.wrappers: list[OptimizerWrapper] = []
        self._body = LoopBody(self.loop, "optimizer.step()")
        self._is_reading = self._counts_epochs = False
        self._is_first = True  # no loader has been read
        self._protected: dict[str, Any] = {}
        self._error: Exception | None = None
        read_by(self.read)

    def _unsupported(self, minimum: int, options: dict[str, Any]) -> Iterator[str]:
        """Yield the options that would change what is computed."""
        if options.pop("world_size", 1) not in (1, None) or options.pop("rank", 0):
            yield "replica groups of several ranks: use outlast.init() and torch's HSDP mesh"
        if minimum > self.world:
            yield f"min_replica_size={minimum} in a job of {self.world} ranks"
        name = options.pop("replica_id", None) or ""
        digits = name[len(name.rstrip("0123456789")) :]
        if digits and int(digits) != self.rank:
            yield (
                f"replica_id={name!r} in rank {self.rank}: import outlast's module above the line"
                " that reads REPLICA_GROUP_ID"
            )
        mode = getattr(options.pop("world_size_mode", None), "name", "DYNAMIC")
        if mode != "DYNAMIC":
            yield f"world_size_mode={mode}: spares are processes here (outlast run --spares)"
        if options.pop("max_retries", None) is not None:
            yield "max_retries: `outlast run --limit attempts_max=N` stops a step that fails again"
        for each in sorted(options.keys() - _CONNECTION):
            yield f"Manager({each}=...), which is not known"

    # --- the loop ---

    def protect(self, **objects: Any) -> None:
        """Protect further objects, above the loop: what `session.protect` takes, for example a
        moving average of the weights that the body updates behind its step. torchft has none."""
        self.loop.must_be_first("manager.protect")
        self._protected |= objects

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of epochs, for a loop around that over batches. torchft has none."""
        self._begin(count)
        while True:
            try:
                yield self.loop.next_epoch()
            except StopIteration:
                return

    def read(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch, each until its step is committed."""
        if self._is_reading:
            raise UsageError(
                "a loop over a DataLoader of outlast.integrations.torchft_manager is inside another"
                " one: use torch's DataLoader for an evaluation"
            )
        if self._is_first:
            self._is_first = False
            refuse("torchft", [*why_not_continued(self._counts_epochs)])
            refuse("torchft", [*why_not_shared(loader, self.rank, self.world)])
        if not self.loop.has_begun:
            self._begin(None)
        if not self._counts_epochs:
            self.loop.next_epoch()
        self._is_reading = True
        try:
            yield from self._body.batches(loader)
        finally:
            self._is_reading = False

    def _begin(self, epochs: int | None) -> None:
        self._counts_epochs = epochs is not None
        if self.optimizer is None or not self.models:
            raise UsageError(
                "the loop has begun without a model or an optimizer of this manager: wrap them,"
                " DistributedDataParallel(manager, model) and Optimizer(manager, optimizer), above"
            )
        named: dict[str, Any] = {f"model{n or ''}": each for n, each in enumerate(self.models)}
        for number, each in enumerate(schedulers_of(self.optimizer, *self.wrappers)):
            named[f"scheduler{number or ''}"] = each
        if taken := self._protected.keys() & named.keys():
            raise UsageError(f"manager.protect: this manager itself names {', '.join(taken)}")
        named |= self._protected
        self._body.averages = [e for e in self._protected.values() if isinstance(e, nn.Module)]
        self.optimizer.register_step_post_hook(self._stepped)
        count = ENDLESS if epochs is None else epochs
        self.loop.begin(count, ManagerPlace(self), optimizer=self.optimizer, **named)

    # --- a step ---

    def start_quorum(self, *_: Any, **__: Any) -> None:
        """Begin a step. The quorum is formed by the launcher."""
        self._error = None

    def wait_quorum(self) -> None:
        """Return at once: the quorum is formed by the launcher."""

    def should_commit(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torchft's
        """Vote with all ranks; return whether the optimizer may step. If not, the loop gives the
        same batch again."""
        if self._error is not None:
            raise self._error
        assert self.optimizer is not None
        return self._body.vote(self.optimizer)

    def _stepped(self, *_: Any) -> None:
        if self._body.is_open and self._body.commit():
            self.batches += self.num_participants()

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: Any = dist.ReduceOp.AVG,
    ) -> Work:
        """Reduce a tensor over all ranks, in place, by default to its mean."""
        refuse("torchft", ["allreduce(should_quantize=True)"] if should_quantize else [])
        is_mean = reduce_op == dist.ReduceOp.AVG
        if is_mean and not torch.is_floating_point(tensor):
            raise ValueError("a mean is of floating-point numbers only")
        operation = dist.ReduceOp.SUM if is_mean else reduce_op

        def reduce(total: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(total, operation)
            return total.div_(self.world) if is_mean else total

        try:
            if self._body.is_open:
                reduce(tensor)
            else:  # which may be repeated
                tensor.copy_(self.loop.collective("allreduce", lambda: reduce(tensor.clone())))
        except (StepRefused, RuntimeError) as error:
            self.refuse(error)
        return Work(tensor)

    def report_error(self, e: Exception) -> None:
        """End the run by an error at the step's vote: the step would fail in each attempt."""
        self._error = e

    def errored(self) -> Exception | None:
        """Return the error that was reported in this step."""
        return self._error

    def refuse(self, error: BaseException) -> None:
        """Refuse the step under way, if `error` is that of a lost rank; else raise it."""
        self._body.refuse(error)

    @staticmethod
    def wrap_future(fut: Any, default: Any, timeout: timedelta | None = None) -> Any:  # noqa: ARG004 - torchft's
        """Return a future itself: collectives of a lost rank end by themselves."""
        return fut

    # --- numbers ---

    def current_step(self) -> int:
        """Return the number of committed steps."""
        return self.offset + self.loop.session.step_index

    def batches_committed(self) -> int:
        """Return the number of batches of all ranks in committed steps."""
        return self.batches

    def num_participants(self) -> int:
        """Return the number of ranks that take part."""
        return len(self.loop.session.present)

    def participating_rank(self) -> int:
        """Return this rank."""
        return self.rank

    def is_participating(self) -> bool:
        """Return True: a rank that joins takes its whole part in its first step."""
        return True

    # --- state ---

    def state_dict(self) -> dict[str, int]:
        """Return the numbers of a checkpoint of the script's own."""
        return {"step": self.current_step(), "batches_committed": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue the numbers of a checkpoint of the script's own, above the loop."""
        self.loop.must_be_first("manager.load_state_dict")
        self.offset, self.batches = state_dict["step"], state_dict["batches_committed"]

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Accept the functions of a state, which is moved by other means."""

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Accept the functions of a state, which is moved by other means."""

    def allow_state_dict_read(self) -> None:
        """Return at once: state moves between steps."""

    def disallow_state_dict_read(self) -> None:
        """Return at once: state moves between steps."""

    def shutdown(self, wait: bool = True) -> None:
        """Return at once: a worker ends with its process."""


_CONNECTION = frozenset(  # the launcher connects ranks: without effect
    {"use_async_quorum", "timeout", "quorum_timeout", "connect_timeout", "heartbeat_interval"}
    | {"store_addr", "store_port", "lighthouse_addr", "hostname", "port", "quorum_retries"}
    | {"checkpoint_transport"}
)


class Work:
    """Collective that has ended."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torchft's
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Return a future that has its value."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(self._value)
        return future


class DistributedDataParallel(parallel.DistributedDataParallel):
    """DDP of torch, over the ranks of the job. Unused parameters are allowed, as in torchft."""

    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        refuse("torchft", [f"{n}=..., another group" for n in kwargs if n == "process_group"])
        super().__init__(module, find_unused_parameters=True, init_sync=manager.init_sync, **kwargs)
        self._manager = manager

        def reduce(_state: Any, bucket: Any) -> Any:
            return manager.allreduce(bucket.buffer()).get_future()

        reduce.__annotations__.clear()  # torch compares them with classes, and these are text
        # As torchft reduces: the sum, divided. DDP's own reduction may raise, which ends backward.
        self.register_comm_hook(None, reduce)
        manager.models.append(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Where ranks are lost, this step's results are not used."""
        try:
            return super().forward(*inputs, **kwargs)
        except (StepRefused, RuntimeError) as error:  # at the broadcast of buffers
            self._manager.refuse(error)
            return self.module(*inputs, **kwargs)


class OptimizerWrapper(torch.optim.Optimizer):
    """Optimizer whose step is voted on by all ranks."""

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        if manager.optimizer is not None:
            raise UsageError(
                "a second Optimizer(manager, ...): a step of torchft has one vote, so that one"
                " would commit without the other; use one optimizer with several parameter groups"
            )
        self.optim, self.manager = optim, manager
        manager.optimizer = optim
        manager.wrappers.append(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer."""
        return self.optim.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step, if all ranks have come here."""
        refuse("torchft", ["optimizer.step(closure)"] if closure is not None else [])
        if self.manager.should_commit():
            self.optim.step()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """State of the wrapped optimizer."""
        return self.optim.state


Optimizer = OptimizerWrapper
