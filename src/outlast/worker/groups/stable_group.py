"""The process group that torch, DDP and the script hold for the whole run.

A collective has one of three outcomes. Live: the inner group's own C++ work, unchanged. Closed
generation: StepRefused; inside backward, where an exception would leave autograd's users in an
undefined state, a finished work with defined bytes. Dry (no other rank): the recorded result of
generation 1, else a defined one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from outlast.errors import UnsupportedError, UsageError
from outlast.worker.groups import closed_answers
from outlast.worker.groups.device_drivers import BackendView, has_nccl
from outlast.worker.groups.inner_group import InnerGroup
from outlast.worker.groups.work_handles import FinishedWork, opaque_class

if TYPE_CHECKING:
    from outlast.worker.groups.group_registry import GroupRegistry
    from outlast.worker.groups.rendezvous import GenerationNotes


BACKEND = "outlast"
# torch 2.11 has these collectives under their older names only.
_OLDER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
_METHODS = {
    op: op if hasattr(dist.ProcessGroup, op) else _OLDER.get(op, op) for op in closed_answers.OPS
}


_ProcessGroup: Any = dist.ProcessGroup  # parameter names differ between torch's stubs and its C++


@opaque_class
class StableGroup(_ProcessGroup):
    """One process group of the job on this seat, in every generation."""

    def __init__(
        self,
        groups: GroupRegistry,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        meeting: str,
        backend: str = BACKEND,
    ) -> None:
        """`name` is torch's; `meeting` is the name under which the ranks of the group connect;
        `backend` is the name that the script has asked for."""
        super().__init__(rank, len(ranks))
        self._groups = groups
        self._name = name
        self._backend = backend
        self._desc = "outlast"
        self.place = closed_answers.RankPlace(rank, len(ranks))
        self.ranks = ranks
        self.inner: InnerGroup | None = None
        self.meeting = meeting
        self.number = 0  # of this process's groups, in order of creation
        self._destroyed = False
        self._notes = 0

    @property
    def registry(self) -> GroupRegistry:
        """Return the registry that this group belongs to."""
        return self._groups

    # --- dispatch of all collectives ---

    def _carry(self, op: str, *args: Any, **kwargs: Any) -> Any:
        groups, values = self._groups, (*args, *kwargs.values())
        self._must_exist(op)
        groups.entering(op, args)
        if groups.tape is not None:
            return groups.tape.carry(self, op, args, values)
        return self.carry_live(op, args, values)

    def carry_live(self, op: str, args: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
        """Run a collective with the other ranks, or answer it where there are none. `values`: all
        arguments, `args` those without a name."""
        groups, inner = self._groups, self.inner
        if inner is None or not groups.live:
            return self._answer(op, values)
        call = getattr(inner.group, _METHODS[op])
        ended = groups.presence.watch(op, self.ranks, self.place.rank, values)
        try:
            work = groups.presence.run(call, op, self.ranks, self.place.rank, values)
        except RuntimeError as error:
            if not groups.failed(error):
                raise
            return self._answer(op, values)
        if isinstance(work, FinishedWork):
            return work
        return groups.handed_out(self.number, op, closed_answers.outputs_of(op, args), work, ended)

    def _must_exist(self, op: str) -> None:
        if self._destroyed:
            raise UsageError(
                f"{op} on group {self._name!r}, which this script has destroyed; nothing was sent;"
                " call destroy_process_group() after the last collective"
            )

    def _answer(self, op: str, args: tuple[Any, ...]) -> FinishedWork:
        dry = self._groups.admit(op, self._name)
        outputs = closed_answers.answer(op, self.place, args)
        if dry:
            self._groups.record.replay(self.number, op, closed_answers.outputs_of(op, args))
        source = (
            closed_answers.any_source(self.place) if op == "recv_anysource" else self.place.rank
        )
        return FinishedWork(outputs, source)

    # --- collectives ---

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("allreduce", tensors, *args, **kwargs)

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("allreduce_coalesced", tensors, *args, **kwargs)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("broadcast", tensors, *args, **kwargs)

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("reduce", tensors, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("allgather", outputs, inputs, *args, **kwargs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("allgather_coalesced", outputs, inputs, *args, **kwargs)

    def all_gather_single(self, output: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("all_gather_single", output, inputs, *args, **kwargs)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return self._carry("all_gather_single_coalesced", outputs, inputs, *args, **kwargs)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("reduce_scatter", outputs, inputs, *args, **kwargs)

    def reduce_scatter_single(self, output: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("reduce_scatter_single", output, inputs, *args, **kwargs)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return self._carry("reduce_scatter_single_coalesced", outputs, inputs, *args, **kwargs)

    def gather_single(self, output: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("gather_single", output, inputs, *args, **kwargs)

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("gather", outputs, inputs, *args, **kwargs)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("scatter", outputs, inputs, *args, **kwargs)

    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("alltoall", outputs, inputs, *args, **kwargs)

    def all_to_all_single(self, output: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("all_to_all_single", output, inputs, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._carry("barrier", *args, **kwargs)

    def send(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("send", tensors, *args, **kwargs)

    def recv(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("recv", tensors, *args, **kwargs)

    def recv_anysource(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return self._carry("recv_anysource", tensors, *args, **kwargs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- coalescing ---

    def _start_coalescing(self, device: torch.device) -> None:
        self._must_exist("coalescing")
        self._groups.entering("coalescing", ())
        if self._groups.tape is not None:
            self._groups.tape.refuse("coalesced collectives")
        if self.inner is not None and self._groups.live:
            self.inner.group._start_coalescing(device)  # noqa: SLF001 - torch's own name for it

    def _end_coalescing(self, device: torch.device) -> Any:
        if self.inner is None or not self._groups.live:
            self._groups.admit("coalescing", self._name)
            return FinishedWork([])
        work = self.inner.group._end_coalescing(device)  # noqa: SLF001
        return self._groups.handed_out(self.number, "coalescing", [], work, None)

    # --- queries of torch ---

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ looks it up
        return BACKEND  # DDP in C++ expects a class of torch's own behind "gloo" and "nccl"

    def rank_notes(self) -> GenerationNotes:
        """Return new notes of the ranks, which all of them ask for in the same order."""
        self._notes += 1
        name = f"notes {self._notes} of {self.meeting}"
        return self._groups.notes(name, self.place.rank, self.ranks)

    def name(self) -> str:
        return self._backend

    def getGroupName(self) -> str:  # noqa: N802 - the same
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - the same
        self._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        assert name == self._name, f"torch renames group {self._name!r} to {name!r}"

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - the name that torch's C++ looks up
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - the same
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if has_nccl() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> BackendView:
        return BackendView(self, device)

    get_backend = _get_backend

    def _get_backend_name(self) -> str:
        return self._backend

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations are counted in each generation."""

    def _get_sequence_number_for_group(self) -> int:
        inner: Any = self.inner
        return 0 if inner is None else inner.group._get_sequence_number_for_group()  # noqa: SLF001

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit for this generation; the next one has the job's own."""
        if self.inner is not None:
            self.inner.set_timeout(timeout)

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        pass  # there are no hooks

    def get_group_store(self) -> Store:
        """Return the job's store."""
        return self._groups.job_store()

    # --- other groups, and the end of this one ---

    def split_group(
        self, ranks: list[int], *_: Any, group_name: str | None = None, **__: Any
    ) -> StableGroup | None:
        """Return the group of `ranks`, which are ranks of this one, in their order; None where this
        rank is not among them."""
        self._must_exist("split_group")
        if self.place.rank not in ranks:
            return None
        return self._split(group_name or f"{self._name}:split:{ranks}", ranks)

    splitGroup = split_group  # noqa: N815 - the name that torch's C++ looks up

    def _split(self, name: str, ranks: list[int]) -> StableGroup:
        seats, rank = tuple(self.ranks[at] for at in ranks), ranks.index(self.place.rank)
        return self._groups.adopt(name, seats, rank, len(seats), self._backend)

    def abort(self) -> None:
        """End this generation at the script's request: all ranks leave it and the job recovers."""
        self._groups.aborted(self._name)

    def shutdown(self) -> None:
        """Mark the group as destroyed by the script (`destroy_process_group`)."""
        self._destroyed = True
        self._groups.leave(self)

    # --- refused operations ---

    def monitored_barrier(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: not supported."""
        raise _unsupported("monitored_barrier", "use barrier(); a rank that hangs is found anyway")

    def merge_remote_group(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: not supported."""
        raise _unsupported("merge_remote_group", "the world of a run stays as it was launched")

    mergeRemoteGroup = merge_remote_group  # noqa: N815 - the same

    @property
    def supports_reconfigure(self) -> bool:
        return False

    def get_reconfigure_handle(self) -> str:
        """Refuse: not supported."""
        raise _unsupported("reconfigure", RECONFIGURE_HELP)

    def reconfigure(self, opts: Any) -> Any:  # noqa: ARG002
        """Refuse: not supported."""
        raise _unsupported("reconfigure", RECONFIGURE_HELP)

    def register_pre_hook(self, *_: Any) -> NoReturn:
        """Refuse: torch calls hooks of groups of its own class only."""
        raise _unsupported("a hook of collectives", "call it where the script calls collectives")

    register_post_hook = register_pre_hook
    register_abort_hook = register_pre_hook

    def _register_on_completion_hook(self, hook: object) -> NoReturn:  # noqa: ARG002
        raise _unsupported("a completion hook", "wait for the work that the collective returns")


RECONFIGURE_HELP = "the launcher replaces members; elsewhere give init enable_reconfigure=True"


def _unsupported(what: str, instead: str) -> UnsupportedError:
    return UnsupportedError(f"{what} cannot be carried across generations; {instead}")
