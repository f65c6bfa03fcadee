"""Counted batch sources, and loader processes that load by ticket and send their state.

torch seeds each loader process from the epoch's base seed and the process number; batch i comes
from process i % num_workers. A process's state after its last consumed batch is therefore
independent of prefetching. State changes are sent with each batch, and a replacement process
receives the state with its first ticket.

    TicketSampler --ticket--> TicketDataset: (dry load, states restored)? load, collate
        --LoadedBatch--> MappedSource
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from outlast import random_state
from outlast.data.loader_state import LoaderState
from outlast.errors import UsageError


def set_epoch(epoch: int, *things: Any) -> None:
    """Call `set_epoch` once per object that has it."""
    able = {id(t): t for t in things if callable(getattr(t, "set_epoch", None))}
    for thing in able.values():
        thing.set_epoch(epoch)


class CountedSource(ABC):
    """Base class of sources that count their batches.

    An epoch begins at its first `next`: before it, nothing is drawn or started, and a joiner may
    still seek to another position.
    """

    kind: ClassVar[str]
    note = ""
    sets_epochs = True  # else the script calls `set_epoch` itself

    def __init__(self) -> None:
        self.epoch = 0
        self._limit: int | None = None
        self._done = 0
        self._begun = False
        self._ended: Literal["", "cut", "exhausted"] = ""

    @property
    def length(self) -> int | None:
        """Return the batches in this epoch on this rank, None if unknown."""
        return None

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """Make the next batch the first of `epoch`, and set the length."""
        if self._begun:
            self._end("cut")
        self.epoch = epoch
        self._done, self._begun, self._ended = 0, False, ""
        self.set_length(length)

    def set_length(self, length: int | None) -> None:
        """Set the length of an epoch that was started and has given no batch.

        It ends after `length` batches, or with the loader when that is None. Raises UsageError for
        an epoch without batches.
        """
        if length is not None and length < 1:
            raise UsageError(
                f"epoch {self.epoch} has {length} batches on some rank: nothing to train on"
            )
        self._limit = length

    def next(self) -> Any:
        """Return the next batch.

        Raises StopIteration at the end of the epoch, UsageError if the loader yields no batches, or
        fewer than its length.
        """
        if self._ended or (self._limit is not None and self._done >= self._limit):
            self._end("cut")
            raise StopIteration
        if not self._begun:
            self._begin()
            self._begun = True
        try:
            batch = self._take()
        except StopIteration:
            self._check_end()
            self._end("exhausted")
            raise
        self._done += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Return the position before the next batch, as data that `checkpoint.tree` encodes."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "limit": self._limit,
            "done": self._done,
            "begun": self._begun,
            "ended": self._ended,
            "of": self.length,
            **self._mark(),
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Go to `position`.

        Generators of this process stay unchanged; the loader's own generators are restored. Raises
        UsageError if the position belongs to another loader.
        """
        if position.get("kind") != self.kind:
            raise UsageError(
                f"the saved data position is that of a {position.get('kind')}, the loader given to"
                f" session.batches() is a {self.kind}: continue with the loader that the run began"
                " with, or start a new run directory"
            )
        self.epoch, self._limit = position["epoch"], position["limit"]
        self._done, self._begun = position["done"], position["begun"]
        self._ended = ""
        self._return(position)
        if self.length != position["of"]:
            raise UsageError(
                f"the loader has {self.length} batches where it had {position['of']} when its"
                " position was saved: continue with the same data and batch size, or start a new"
                " run directory"
            )
        if position["ended"]:
            self._end(position["ended"])

    def set_epoch(self, epoch: int, *things: Any) -> None:
        """Call `set_epoch` once per object that has it, unless the script does."""
        if self.sets_epochs:
            set_epoch(epoch, *things)

    def close(self) -> None:
        """Stop loader workers; the source cannot be used afterwards."""
        self._ended = "cut"

    def _end(self, how: Literal["cut", "exhausted"]) -> None:
        if not self._ended:
            self._finish(exhausted=how == "exhausted")
            self._ended = how

    def _check_end(self) -> None:
        if self._done == 0:
            raise UsageError(
                f"the loader given to session.batches() gave no batch in epoch {self.epoch}: is"
                " the dataset empty, or an iterator that is already used up?"
            ) from None
        if self._limit is not None:
            raise UsageError(
                f"the loader gave {self._done} batches in epoch {self.epoch} where its length"
                f" is {self._limit}: other ranks now wait for a batch that does not exist;"
                " correct len(loader), or remove it"
            ) from None

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the first batch of the epoch."""

    @abstractmethod
    def _take(self) -> Any:
        """Return the next batch; raise StopIteration if there is none."""

    @abstractmethod
    def _mark(self) -> dict[str, Any]:
        """Return the parts of the position other than the counts."""

    @abstractmethod
    def _return(self, position: dict[str, Any]) -> None:
        """Restore the parts returned by `_mark`; the counts are already set."""

    @abstractmethod
    def _finish(self, exhausted: bool) -> None:
        """End the epoch: `exhausted` by the loader, or cut by the limit of batches."""


class Codec(NamedTuple):
    """Encoder and decoder that can be sent to a loader process."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


_PROCESS = "process "


class BatchTicket(NamedTuple):
    """Request for one batch. `state`: process state to restore first; b"" if unchanged."""

    indices: Any
    state: bytes = b""
    is_blank: bool = False  # loads nothing: skips to the next process


class LoadedBatch(NamedTuple):
    """Loaded batch with the state changes of its process since that process's last batch."""

    batch: Any
    process: int
    changes: bytes


class DatasetWrapper:
    """Wrapper of the user's dataset, hidden from the user's code."""

    dataset: Any


class TicketDataset(Dataset[Any], DatasetWrapper):
    """User's dataset and collate function, called with one ticket at a time."""

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
    """Start hook of a loader process: exposes the user's dataset and calls the user's hook."""

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
    """Return the batch unchanged: TicketDataset has already collated it."""
    return parcel
