"""Pipelines of WebDataset in splits.

| stage | in a split |
|---|---|
| list of shards | the shards of the split |
| split_by_node, split_by_worker, single_node_only | left out |
| shuffle and detshuffle without a seed, or with one that WebDataset has drawn | seeded anew |
| detshuffle with a seed | in the epoch |
| all others | as they are |
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from outlast.errors import UsageError
from outlast.integrations.counted_shards import CountedShards


class WebDatasetSplits(CountedShards):
    """Splits of a `webdataset.WebDataset` or `DataPipeline` of samples::

        dataset = WebDatasetSplits(pipeline, lengths)

    `lengths`: of `WebDatasetSplits.count(pipeline)`, or the known sizes of the shards. `seed`: with
    epoch and split, of shuffles that have none in the pipeline.
    """

    def __init__(self, pipeline: Any, lengths: Sequence[int], *, seed: int = 0) -> None:
        """Raise UsageError for a pipeline that other processes cannot read again."""
        why = _why_not_read(pipeline)
        if why:
            raise UsageError(f"WebDatasetSplits cannot read {type(pipeline).__name__}: {why}")
        super().__init__(len(pipeline.pipeline[0].urls), lengths)
        self.pipeline, self.seed = pipeline, seed

    @staticmethod
    def count(pipeline: Any) -> list[int]:
        """Return the number of samples of each shard. All of them are read: do so once, in
        `session.shared("lengths", lambda: WebDatasetSplits.count(pipeline))`."""
        shards = range(len(pipeline.pipeline[0].urls))
        return [sum(1 for _ in _part(pipeline, n, len(shards), "0")) for n in shards]

    def read_shards(self, first: int, step: int) -> Iterator[Any]:
        """See CountedShards.read_shards."""
        seed = f"{self.seed} {self.epoch} {first} {step}"
        return _part(self.pipeline, first, step, seed, self.epoch)


def _part(pipeline: Any, first: int, step: int, seed: str, epoch: int = 0) -> Iterator[Any]:
    """Return the samples of every `step`-th shard. `seed`: of shuffles that have none."""
    lists, filters = (import_module(f"webdataset.{each}") for each in ("shardlists", "filters"))
    drawn = getattr(pipeline, "seed", None)  # by WebDataset, where the script gives it none
    divisions = (lists.split_by_node, lists.split_by_worker, lists.single_node_only)
    shards, *stages = pipeline.pipeline
    part = copy.copy(pipeline)
    part.pipeline = [lists.SimpleShardList(shards.urls[first::step], seed=shards.seed)]
    for number, stage in enumerate(stages):
        if stage in divisions:
            continue
        placed = copy.copy(stage)
        is_ordered = isinstance(stage, filters.detshuffle)
        if (is_ordered or _is(stage, "_shuffle")) and _seed(stage) in (None, drawn):
            rng = random.Random(f"{seed} {number}")
            sizes = (stage.bufsize, stage.initial) if is_ordered else stage.args
            placed = filters.shuffle(
                *sizes, **getattr(stage, "kw", {}) | {"seed": None, "rng": rng}
            )
        elif is_ordered:
            placed.epoch = epoch - 1  # it adds one when it begins
        part.pipeline.append(placed)
    return iter(part)


def _is(stage: Any, name: str) -> bool:
    """Return whether a stage is a filter of WebDataset of that name."""
    return getattr(getattr(stage, "f", None), "__name__", "") == name


def _seed(stage: Any) -> Any:
    """Return the seed of a shuffle; None without one."""
    return stage.kw.get("seed") if hasattr(stage, "kw") else stage.seed


def _why_not_read(pipeline: Any) -> str:
    parts: list[Any] = getattr(pipeline, "pipeline", None) or [None]
    shards, *stages = parts
    if type(shards).__name__ != "SimpleShardList":
        return f"its first stage is a {type(shards).__name__} and not a list of shards"
    if isinstance(shards.seed, float):
        return "its list of shards is shuffled by the time of day: give it a number as seed"
    if pipeline.repetitions != 1:
        return "it repeats: leave repeat and with_epoch out, session.batches begins each epoch"
    for stage in stages:
        if _is(stage, "_shuffle") and ("rng" in stage.kw or len(stage.args) > 2):
            return "a shuffle has a generator, which goes on over epochs: leave rng out"
        if _is(stage, "_batched"):
            return "it batches by itself: leave batched out, and give the DataLoader its batch_size"
    return ""
