"""Streams of other libraries whose samples a new process cannot repeat, refused by name."""

from __future__ import annotations

from typing import Any

from outlast.data.split_dataset import SplitDataset
from outlast.data.stateful_source import is_torchdata
from outlast.errors import UsageError

_HUGGING_FACE = "datasets.iterable_dataset"


def refuse_stream(loader: Any) -> None:
    """Raise UsageError for a loader over a stream that a replacement worker would wait for, or read
    in another order."""
    dataset = getattr(loader, "dataset", None)
    kind = type(dataset).__name__
    is_split = isinstance(dataset, SplitDataset)
    if is_split and getattr(loader, "persistent_workers", False) and loader.num_workers:
        raise UsageError(
            f"persistent loader processes keep the epoch in which they were started, and {kind}"
            " has another order in each: leave persistent_workers out"
        )
    if _is_of(loader, "streaming.base.dataloader"):
        raise UsageError(
            f"{type(loader).__name__} keeps its position in shared memory of the host:"
            " session.batches keeps it for torch's DataLoader and torchdata's StatefulDataLoader"
        )
    is_mixed = is_split and type(dataset).__iter__ is SplitDataset.__iter__
    if _is_of(dataset, "streaming.base.dataset") and not is_mixed:
        raise UsageError(
            f"{kind} waits in shared memory for all ranks of its host, so that a replacement worker"
            " would wait for ever: name outlast.integrations.MosaicSplits before StreamingDataset"
            " among its bases"
        )
    if is_torchdata(loader) and _is_of(dataset, _HUGGING_FACE) and _has_buffer(dataset):
        raise UsageError(
            f"the state_dict of {kind} does not contain its shuffle buffer, whose samples a"
            " replacement worker would lose: use outlast.integrations.HuggingFaceSplits, or torch's"
            " DataLoader"
        )


def _is_of(thing: Any, module: str) -> bool:
    """Return whether the class of an object, or a base of it, is one of a module."""
    return any(base.__module__ == module for base in type(thing).__mro__)


def _has_buffer(part: Any) -> bool:
    """Return whether an operation of a stream, or one before it, shuffles in a buffer."""
    if not _is_of(part, _HUGGING_FACE):
        return False
    values = [each if isinstance(each, list) else [each] for each in vars(part).values()]
    is_one = type(part).__name__ == "BufferShuffledExamplesIterable"
    return is_one or any(_has_buffer(inner) for value in values for inner in value)
