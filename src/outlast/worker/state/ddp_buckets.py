"""DDP's gradient buckets as recorded state.

DDP chooses its buckets from the order in which the gradients of one backward became ready. The
buckets determine the order in which gloo and NCCL add, and so the bits of the sums. Two ranks with
different buckets add different parameters without an error. A joiner therefore takes its donor's
buckets, and every rank restores the recorded ones when a generation opens.

    stage     state of the reducer                            left when
    built     the buckets of its construction                 its first backward is committed
    counted   the same, and the uses of each gradient         its second backward is committed
    rebuilt   the buckets of the order of one backward        never

`counted` exists under `static_graph` only. With `find_unused_parameters` DDP stays `built`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from outlast.errors import ProtectError, UnsupportedError
from outlast.worker.groups.work_handles import FinishedWork

_c10d: Any = dist  # torch's stubs do not know all of it
Buckets = list[list[int]]  # per bucket: its parameters, numbered in DDP's order
_ProcessGroup: Any = dist.ProcessGroup  # its stubs name other parameters than its C++ does
_BUILTIN = "BuiltinCommHookType."  # prefix of C++ hooks in DDP's logger
_NEEDED = (
    "_get_zeros_like_grad_buckets",
    "_push_all_rebuilt_params",
    "_rebuild_buckets",
    "_remove_autograd_hooks",
    "_reset_state",
    "_update_process_group",
)


class BucketState(msgspec.Struct, frozen=True, array_like=True):
    """State that decides the next collectives of one DDP. `sync`: its next forward broadcasts
    buffers."""

    sync: bool
    counted: bool = False
    buckets: Buckets | None = None


class DDPBuckets:
    """The reducers of all DDP modules that `parts` names, in that order."""

    def __init__(self, parts: Callable[[], list[DistributedDataParallel]]) -> None:
        """Record the present buckets. Raises UnsupportedError if a DDP does not allow it."""
        self._parts = parts
        self._known: dict[int, _Reducer] = {}
        self._all()

    def _all(self) -> list[_Reducer]:
        found = []
        for part in self._parts():
            known = self._known.get(id(part))
            if known is None:
                known = self._known[id(part)] = _Reducer(part)
            found.append(known)
        return found

    def settle(self) -> None:
        """Rebuild the buckets that DDP would rebuild in its next forward, so that no vote leaves an
        order that only this process knows. Collective; no-op if no rebuild is due."""
        for each in self._all():
            each.settle()

    def commit(self) -> None:
        """Record the buckets of this attempt as the job's, after a won vote."""
        for each in self._all():
            each.commit()

    def restore(self) -> None:
        """Restore every reducer to the recorded state, without a reduction in flight. Local; while
        `is_static`, all ranks must call it at the same place, or none."""
        for each in self._all():
            each.restore()

    def states(self) -> list[BucketState]:
        """Return the recorded state of each DDP."""
        return [each.state() for each in self._all()]

    def adopt(self, states: list[BucketState]) -> None:
        """Adopt a donor's states. Raises ProtectError, changing nothing, if they do not fit."""
        known = self._all()
        if len(states) != len(known) or not all(
            each.fits(state) for each, state in zip(known, states, strict=True)
        ):
            raise ProtectError(
                f"{len(states)} DDP modules were saved whose buckets do not fit the"
                f" {len(known)} DDP modules that this script protects: it built another model;"
                " nothing was taken over"
            )
        for each, state in zip(known, states, strict=True):
            each.adopt(state)

    @property
    def is_static(self) -> bool:
        """Return whether some DDP treats the first backward after `restore` differently."""
        return any(each.part.static_graph for each in self._all())

    @property
    def is_ready(self) -> bool:
        """Return whether no reducer still needs counts that only a backward can provide."""
        return all(each.is_ready for each in self._all())


class _Reducer:
    """The reducer of one DDP, and its recorded state."""

    def __init__(self, part: DistributedDataParallel) -> None:
        _check(part)
        self.part: Any = part  # private names are not in torch's stubs
        self.has_buckets = hasattr(part, "reducer")  # False if all reductions are delayed
        self._buckets: Buckets | None = None
        self._counted = False
        self._attempt: Buckets | None = None
        if self.has_buckets:
            self._parameters, self._sparse = self.part._build_params_for_reducer()  # noqa: SLF001
            self._number = {id(p): number for number, p in enumerate(self._parameters)}
            self._built = self._read()
            if sum(map(len, self._built)) != len(self._parameters):
                raise _other_parameters()
            self.settle()  # a script may have trained before `protect`
            self.commit()

    def settle(self) -> None:
        part = self.part
        if not self.has_buckets:
            return
        if not part._has_rebuilt_buckets and part.reducer._rebuild_buckets():  # noqa: SLF001
            part._has_rebuilt_buckets = True  # noqa: SLF001 - as DDP's own forward does
        if part._has_rebuilt_buckets and self._attempt is None:  # noqa: SLF001
            self._attempt = self._read()

    def commit(self) -> None:
        self._buckets, self._counted = self._attempt, self._has_counted

    def state(self) -> BucketState:
        return BucketState(self.part.require_forward_param_sync, self._counted, self._buckets)

    def fits(self, state: BucketState) -> bool:
        if state.buckets is None:
            return True
        numbers = sorted(number for bucket in state.buckets for number in bucket)
        return self.has_buckets and numbers == list(range(len(self._parameters)))

    def adopt(self, state: BucketState) -> None:
        self.part.require_forward_param_sync = state.sync
        if (state.counted, state.buckets) != (self._counted, self._buckets):
            self._counted, self._buckets = state.counted, state.buckets
            self.restore()

    def restore(self) -> None:
        if not self.has_buckets:
            return
        part, self._attempt = self.part, self._buckets
        if self._counts_on and self._has_counted:
            part.reducer._reset_state()  # noqa: SLF001 - keeps the counts
            if part._has_rebuilt_buckets:  # noqa: SLF001 - in an attempt that was refused
                self._impose(self._built)
                part.reducer._reset_state()  # noqa: SLF001
                part._has_rebuilt_buckets = False  # noqa: SLF001
            return
        self._renew()
        if self._buckets is not None:
            self._impose(self._buckets)

    @property
    def is_ready(self) -> bool:
        return not self._counts_on or self._has_counted

    @property
    def _counts_on(self) -> bool:
        """Return whether the next backward needs the counts of an earlier one."""
        return self._counted and self._buckets is None

    @property
    def _has_counted(self) -> bool:
        part = self.part
        return part.static_graph and part._static_graph_delay_allreduce_enqueued  # noqa: SLF001

    def _read(self) -> Buckets:
        with torch._C._AutoDispatchBelowAutograd(), _NoMemory():  # noqa: SLF001
            buckets = self.part.reducer._get_zeros_like_grad_buckets()  # noqa: SLF001
        try:
            return [[self._number[id(p)] for p in bucket.parameters()] for bucket in buckets]
        except KeyError:
            raise _other_parameters() from None

    def _renew(self) -> None:
        """Give the DDP a new reducer, as its construction does. A reducer that an exception left in
        the middle of a backward cannot be repaired; one with rebuilt buckets keeps a table of the
        first ones."""
        part = self.part
        hook = part._get_ddp_logging_data().get("comm_hook", "")  # noqa: SLF001
        part.reducer._remove_autograd_hooks()  # noqa: SLF001
        # Free its memory before the next reducer allocates as much.
        vars(part).update(reducer=None, logger=None)
        with _trainable(self._parameters):
            names = part._build_debug_param_to_name_mapping(self._parameters)  # noqa: SLF001
            part._ddp_init_helper(  # noqa: SLF001 - as DDP does it when it is unpickled
                self._parameters, self._sparse, names, part.static_graph
            )
        part._has_rebuilt_buckets = False  # noqa: SLF001
        if vars(part).get("_require_manual_backward_finalization"):  # from torch 2.15 on
            part.require_manual_backward_finalization = True  # of the new reducer
        if part.static_graph:
            part.reducer._set_static_graph()  # noqa: SLF001
            part.logger._set_static_graph()  # noqa: SLF001
            part._static_graph_delay_allreduce_enqueued = False  # noqa: SLF001
        if hook:
            part.logger._set_comm_hook_name(hook)  # noqa: SLF001
        if hook.startswith(_BUILTIN):
            kind = getattr(_c10d.BuiltinCommHookType, hook.removeprefix(_BUILTIN))
            _c10d._register_builtin_comm_hook(part.reducer, kind)  # noqa: SLF001
        elif hook:
            for function, state in part._comm_hooks:  # noqa: SLF001
                _c10d._register_comm_hook(part.reducer, state, function)  # noqa: SLF001

    def _impose(self, buckets: Buckets) -> None:
        """Rebuild to `buckets`: a substitute group returns them in place of rank 0's."""
        part = self.part
        dictation = _Dictation(buckets)  # a reference: torch keeps only a group's C++ half alive
        part.reducer._push_all_rebuilt_params()  # noqa: SLF001
        part.reducer._update_process_group(dictation)  # noqa: SLF001
        try:
            part._has_rebuilt_buckets = part.reducer._rebuild_buckets()  # noqa: SLF001
        finally:
            part.reducer._update_process_group(part.process_group)  # noqa: SLF001
        if not part._has_rebuilt_buckets:  # noqa: SLF001
            raise UnsupportedError(
                f"the DDP of torch {torch.__version__} did not take the recorded buckets; torch"
                " 2.11 to 2.15 does"
            )


def _other_parameters() -> ProtectError:
    return ProtectError(
        "a DDP reduces other parameters than those that require gradients now: freeze before the"
        " DDP is made, or after protect(); add parameters (adapters) before it is made: it reduces"
        " none that comes later; nothing was applied"
    )


def must_fit_phase(part: DistributedDataParallel, objects: Collection[int]) -> None:
    """Raise as the two functions below do."""
    _must_not_join(part)
    _must_protect_hooks(part, objects)


def _must_protect_hooks(part: DistributedDataParallel, objects: Collection[int]) -> None:
    """Raise ProtectError for a communication hook with a state that is none of `objects` (ids)."""
    for hook, state in getattr(part, "_comm_hooks", ()):  # absent if all are delayed
        if not (state is None or isinstance(state, dist.ProcessGroup) or id(state) in objects):
            raise ProtectError(
                f"the DDP communication hook {getattr(hook, '__qualname__', hook)} keeps a"
                f" state ({type(state).__name__}) that is not protected: a redo and a"
                " replacement worker would go on without it; protect that object (it needs"
                " state_dict and load_state_dict), or leave the hook out"
            )


def _must_not_join(part: DistributedDataParallel) -> None:
    """Raise UnsupportedError inside `with model.join()`."""
    if getattr(getattr(part, "_join_config", None), "enable", False):
        raise UnsupportedError(
            "DistributedDataParallel.join() adds a collective to each forward that nobody waits"
            " for, and makes up for ranks that have no batch left; leave it out: session.batches"
            " ends an epoch for all ranks where the first one has no batch left"
        )


def refuse_hidden(parts: Iterable[nn.Module]) -> None:
    """Raise UnsupportedError for a DDP that is no module: its reducer would be missed."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None:
        return
    for part in parts:
        if composable.replicate.state(part) is not None:
            raise UnsupportedError(
                f"replicate() on {type(part).__name__} keeps its DDP where its buckets cannot be"
                " recorded; wrap the module in DistributedDataParallel"
            )


def _check(part: DistributedDataParallel) -> None:
    reducer = getattr(part, "reducer", None)
    missing = [name for name in _NEEDED if reducer is not None and not hasattr(reducer, name)]
    if missing or not hasattr(part, "_ddp_init_helper"):
        raise UnsupportedError(
            f"the buckets of the DDP of torch {torch.__version__} cannot be recorded"
            f" ({', '.join(missing) or '_ddp_init_helper'} is missing); torch 2.11 to 2.15 can"
        )
    if part.mixed_precision is not None:
        raise UnsupportedError(
            "DDP(mixed_precision=...) swaps the parameters' memory in forward, and a refused"
            " attempt could not put it back; use torch.autocast"
        )


class _NoMemory(TorchDispatchMode):
    """Mode that answers `zeros_like` without allocating memory as large as all gradients."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return torch.empty(0, device="meta")
        return func(*args, **(kwargs or {}))


class _Dictation(_ProcessGroup):
    """Group that answers a rebuild's two broadcasts: numbers and bucket count, then sizes."""

    def __init__(self, buckets: Buckets) -> None:
        super().__init__(0, 1)
        numbers = [number for bucket in buckets for number in bucket]
        self._answers = iter([[*numbers, len(buckets)], [len(bucket) for bucket in buckets]])

    def broadcast(self, tensors: Any, *_: Any, **__: Any) -> Any:
        for tensor in tensors:
            tensor.copy_(torch.tensor(next(self._answers), dtype=tensor.dtype))
        return FinishedWork(tensors)

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch's C++ looks up
        return "outlast"


@contextmanager
def _trainable(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Make all parameters trainable in this context: a reducer accepts no frozen ones."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
