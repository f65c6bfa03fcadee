"""Copies of this rank's shards in keepers' memory, from which a lost rank is rebuilt.

A copy is of use if it is the rank's state before the phase that is redone:

| rank | compares | with |
|---|---|---|
| the lost rank | version counters and digests of its shards, each phase | those at the copy |
| a rank that joins | the copy's name in the lost rank's slot | the decision's copy |
| a rank that stays | the bytes of its own shards | its part of the copy |

Any difference rolls all ranks back, and the summary has the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.load.tensor_fill import fill_tensors
from outlast.checkpoint.state_content import StateContent, flatten_state, rank_buffers
from outlast.config import WorkerSettings
from outlast.errors import MismatchError
from outlast.transport import messages
from outlast.worker.checkpoint_restore import RunRestorer
from outlast.worker.phases.phase_attempt import deep_copy
from outlast.worker.phases.worker_recovery import Ticket
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import digests, local_shard
from outlast.worker.worker_status import WorkerStatus


class _CopyRecord(NamedTuple):
    """This rank's state at a copy: versions and digests of its shards, and all other values."""

    versions: list[tuple[int, int]]
    digests: list[bytes]
    shared: bytes


class CopiedShards:
    """The newest copy in memory that this worker took part in, and rebuilds from one."""

    def __init__(
        self,
        settings: WorkerSettings | None,
        status: WorkerStatus,
        protected: Callable[[], ProtectedState],
    ) -> None:
        self._settings, self._status, self._protected = settings, status, protected
        self.seat = -1
        self._records: dict[str, _CopyRecord] = {}  # by path: the newest one, and one under way

    def record(self, place: SavePoint, content: StateContent) -> None:
        """Record a copy of the present state, which is whole once its phase is complete."""
        copy = messages.Checkpointed(
            n=place.n, step=place.step, path=place.directory, tier="memory"
        )
        newest = self._status.copy.path if self._status.copy is not None else ""
        self._records = {path: each for path, each in self._records.items() if path == newest}
        self._records[copy.path] = _CopyRecord(*self._look(), content.shared)
        self._status.pending_copy = copy

    def current(self) -> str:
        """Return the name of the newest copy; "" if the shards have changed since."""
        for copy in (self._status.pending_copy, self._status.copy):
            record = self._records.get(copy.path) if copy is not None else None
            if copy is not None and record is not None and copy.step == self._status.step:
                return copy.path if self._look() == (record.versions, record.digests) else ""
        return ""

    def _look(self) -> tuple[list[tuple[int, int]], list[bytes]]:
        """Return versions and, where other ranks may not have the same, digests of the shards.

        A write through `.data` passes over the version counter.
        """
        protected = self._protected()
        own = protected.buffers.own()
        tensors = [tensor for name, tensor in protected.tensors().items() if name not in own]
        shards = [local_shard(tensor) for tensor in tensors]
        versions = [(t.data_ptr(), t._version) for t in shards]  # noqa: SLF001 - torch's own counter of changes
        is_divided = any(hasattr(each, "to_local") for each in tensors) or bool(protected.pipeline)
        return versions, digests(shards) if is_divided else []

    def read(self, copy: messages.Checkpointed, named: str) -> tuple[Any, Ticket]:
        """Return the state of the lost rank from `copy`. `named`: the copy that its slot names.

        Raises CorruptionError, StorageError or MismatchError.
        """
        start = time.monotonic()
        if named != copy.path:
            raise MismatchError(
                f"the shards of rank {self.seat} changed between the copy {copy.path} and the phase"
                " in which the rank was lost; change them in phases"
            )
        protected = self._protected()
        self._restorer(copy).restore(protected)
        size_bytes = sum(local_shard(t).nbytes for t in protected.tensors().values())
        staged = deep_copy(protected.replicated(), "cpu")
        return staged, ("", size_bytes, time.monotonic() - start)

    @torch.no_grad()
    def put_back(self, copy: messages.Checkpointed) -> None:
        """Restore this rank's tensors, in place, from `copy`, in which it has taken part.

        All other state must be that of the copy already, small buffers included. Raises
        CorruptionError, StorageError or MismatchError.
        """
        record = self._records.get(copy.path)
        if record is None:
            raise MismatchError(
                f"rank {self.seat} is to take its last step back to the copy {copy.path}, and knows"
                f" only {', '.join(self._records) or 'none'}"
            )
        protected = self._protected()
        state = protected.content()
        content, own = flatten_state(state), rank_buffers(state)
        restorer = self._restorer(copy)
        targets = {name: each for name, each in content.tensors.items() if name not in own}
        fill_tensors(restorer.reader, targets)
        restorer.close()
        protected.buffers.look_away()
        versions, found = self._look()
        self._records[copy.path] = record._replace(versions=versions)
        has_objects = self._lasting(flatten_state(state).shared) == self._lasting(record.shared)
        if found != record.digests or not has_objects:
            what = "objects" if found == record.digests else "shards"
            raise MismatchError(
                f"{what} of rank {self.seat} are not those of the copy {copy.path}, where its last"
                " step is to be taken back; change them in phases"
            )

    @torch.no_grad()
    def compare(self, copy: messages.Checkpointed) -> None:
        """Compare this rank's shards with its part of `copy`.

        Raises MismatchError where they differ, CorruptionError, StorageError.
        """
        protected = self._protected()
        state = protected.content()
        content = flatten_state(state)
        record = self._records.get(copy.path)
        if record is not None and self._lasting(content.shared) != self._lasting(record.shared):
            raise MismatchError(f"objects of rank {self.seat} changed after the copy {copy.path}")
        own = rank_buffers(state)
        restorer = self._restorer(copy)
        for name, tensor in content.tensors.items():
            if name in own:
                continue
            saved = tensor.detach().clone()
            fill_tensors(restorer.reader, {name: saved})
            if not torch.equal(_bytes_of(saved), _bytes_of(tensor)):
                raise MismatchError(
                    f"{name} of rank {self.seat} changed after the copy {copy.path}, outside of a"
                    " step: other ranks' shards in it are as old; change weights in a step"
                )
        restorer.close()

    def _lasting(self, shared: bytes) -> bytes:
        """Return the part of a copy's values that no slot holds: hyperparameters and schedulers
        that the loop changes after the copy are in each rank's own slot."""
        value = codec.decode(shared)
        for optimizer in value["optimizers"].values():
            del optimizer["groups"]
        for name in self._protected().schedules:
            value["objects"].pop(name, None)
            value["classes"].pop(name, None)
        return codec.encode(value)

    def _restorer(self, copy: messages.Checkpointed) -> RunRestorer:
        assert self._settings is not None
        return RunRestorer(self._settings, self.seat, copy, beside_trainers=True)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    shard = local_shard(tensor.detach()).contiguous().reshape(-1)
    return shard.view(torch.uint8) if shard.numel() else shard.new_empty(0, dtype=torch.uint8)
