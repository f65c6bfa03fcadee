"""A DataLoader's worker processes: batches by ticket, and their generators' state.

torch seeds each process from the epoch's base seed and its number; batch i comes from process i %
num_workers. So the state of a process behind its last consumed batch is well defined, however far
it has prefetched. The changed part of it travels with the batch, and a process that takes over
receives it with its first ticket.

    TicketSampler --ticket--> TicketDataset: (dry load, states restored)? load, collate
        --LoadedBatch--> MappedSource
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from outlast import random_state
from outlast.data.counted_source import Codec
from outlast.data.loader_state import LoaderState

_PROCESS = "process "


class BatchTicket(NamedTuple):
    """One batch to be loaded. `state`: the process's state before it; b"": unchanged."""

    indices: Any
    state: bytes = b""
    is_blank: bool = False  # nothing is loaded: the next ticket belongs to the next process


class LoadedBatch(NamedTuple):
    """One batch, and the changes in its process since that process's last batch."""

    batch: Any
    process: int
    changes: bytes


class DatasetWrapper:
    """A wrapper of the user's dataset; the user's code sees only the wrapped one."""

    dataset: Any


class TicketDataset(Dataset[Any], DatasetWrapper):
    """The user's dataset and collate function, called with one ticket at a time."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], codec: Codec, *, is_batched: bool
    ) -> None:
        self.dataset = dataset
        self._collate, self._codec = collate, codec
        self._is_batched = is_batched
        self._desk: LoaderProcessState | None = None

    def __getitem__(self, ticket: BatchTicket) -> Any:
        info = get_worker_info()
        if info is None:
            return self._load(ticket.indices)
        if ticket.is_blank:
            return LoadedBatch(None, info.id, b"")
        if self._desk is None:
            self._desk = LoaderProcessState({"dataset": self.dataset, "collate": self._collate})
        if ticket.state:
            # Creates the objects of the first batch (a file, a generator, a flag).
            self._load(ticket.indices)
            self._desk.put(self._codec.decode(ticket.state))
        batch = self._load(ticket.indices)
        news = self._desk.changes()
        return LoadedBatch(batch, info.id, self._codec.encode(news) if news else b"")

    def _load(self, indices: Any) -> Any:
        if not self._is_batched:
            return self._collate(self.dataset[indices])
        many = getattr(self.dataset, "__getitems__", None)
        return self._collate(many(indices) if many else [self.dataset[i] for i in indices])


class LoaderProcessState:
    """Random generators and loader objects of one loader process."""

    def __init__(self, roots: dict[str, Any], *, attributes: bool = True) -> None:
        self._kept = LoaderState(roots, attributes=attributes)
        self._sent: dict[str, Any] = {}
        self._first = random_state.snapshot()

    def all_changes(self) -> dict[str, Any]:
        """Return all changes since the process was started."""
        process = {
            _PROCESS + name: state
            for name, state in random_state.snapshot().items()
            if _PROCESS + name in self._sent or not random_state.same(state, self._first[name])
        }
        return process | self._kept.changes()

    def changes(self) -> dict[str, Any]:
        """Return the changes since the last call."""
        news = {
            path: value
            for path, value in self.all_changes().items()
            if path not in self._sent or not random_state.same(value, self._sent[path])
        }
        self._sent |= news
        return news

    def put(self, saved: dict[str, Any]) -> None:
        """Restore the state of another process."""
        self._sent = dict(saved)
        process = {n: s for n, s in saved.items() if n.startswith(_PROCESS)}
        first = {_PROCESS + name: state for name, state in self._first.items()}
        whole = {n.removeprefix(_PROCESS): s for n, s in (first | process).items()}
        random_state.restore(whole)
        self._kept.put({path: v for path, v in saved.items() if path not in process})


class StartHook:
    """The first call in a loader process: exposes the user's dataset, runs the user's hook."""

    def __init__(self, hook: Callable[[int], None] | None) -> None:
        self._hook = hook

    def __call__(self, process: int) -> None:
        info = get_worker_info()
        assert info is not None, "only loader processes are started so"
        if isinstance(info.dataset, DatasetWrapper):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._hook is not None:
            self._hook(process)


def identity_collate(parcel: Any) -> Any:
    """Return the batch unchanged: TicketDataset has collated it already."""
    return parcel
