"""Mosaic's StreamingDataset in splits, without its shared memory.

Mosaic's own iteration waits for all processes of a host at each epoch, so that one new worker
would wait for ever. The order of an epoch follows from its settings alone.

| | Mosaic | here |
|---|---|---|
| order of an epoch | one process of a host computes it | each rank does, by Mosaic's functions |
| number of the epoch | counted in shared memory | set by `session.batches` |
| a shard that is missing | states of shards in shared memory | a lock that ends with its process |
| a shard that is downloaded | grows in its place | takes its place when it is whole |
"""

from __future__ import annotations

import copy
import fcntl
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import get_worker_info

from outlast.data.split_dataset import SplitDataset
from outlast.errors import UsageError

_PACKAGE, _KNOWN = "mosaicml-streaming", "0.13."  # versions whose samples were compared
_ALTERED = ("__iter__", "_each_sample_id", "_get_work", "_resume", "prepare_shard")
_ALTERED_STREAM = ("get_shards", "prepare_shard", "set_up_local", "_download_file")
_DESK = ".outlast"  # folder in a cache with locks, and with shards that are not whole yet

Ids = np.ndarray[Any, np.dtype[np.int64]]


class MosaicSplits(SplitDataset[Any]):
    """Mix-in for Mosaic's `StreamingDataset` or a subclass of it, before it among the bases::

        class Texts(MosaicSplits, StreamingDataset): ...

    Each rank and loader process reads the samples that it reads with Mosaic's own iteration.
    """

    batch_size: Any
    batching_method: str
    num_canonical_nodes: Any
    predownload: int
    shards: list[Any]
    shuffle_algo: str
    spanner: Any
    stream_per_shard: Any
    streams: list[Any]
    _set_shuffle_block_size: Any
    state_dict = load_state_dict = None  # positions belong to the loader's source

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Build the data set from the arguments of the class that is mixed in.

        Raises UsageError for a version of the library that is not known, and for settings that
        need its shared memory.
        """
        with _without_shared_memory():
            super(SplitDataset, self).__init__(*args, **settings)
        _refuse_settings(self)
        ranks, self._world = (vars(self)[f"_{each}_rank_world"] for each in ("unique", "parallel"))
        sharing = ranks.num_ranks // self._world.num_ranks
        env = import_module("streaming.base.distributed")
        rank = dist.get_rank() if dist.is_initialized() else env.get_rank()
        super().__init__(self._world.num_ranks, rank // sharing if sharing > 1 else rank)
        if not self.num_canonical_nodes:
            many = 64 if self.shuffle_algo in {"py1s", "py2s"} else 1
            self.num_canonical_nodes = many * self._world.num_nodes
        self._set_shuffle_block_size(self._world)
        self._orders = _Orders()

    def split_length(self, split: int, splits: int) -> int:
        """See SplitDataset.split_length."""
        return len(self._ids(split, splits))

    def read_split(self, split: int, splits: int) -> Iterator[Any]:
        """See SplitDataset.read_split."""
        return _Samples(self, self._ids(split, splits))

    def _ids(self, split: int, splits: int) -> Ids:
        """Return the samples of a split, as Mosaic partitions and shuffles the epoch."""
        key = self.epoch, splits
        if self._orders.key != key:
            kind, world = type(self._world), self._world
            workers = splits // self.num_replicas
            world = kind(world.num_nodes, world.ranks_per_node, workers, 0)
            work = import_module("streaming.base.batching").generate_work
            found = work(self.batching_method, self, world, self.epoch, 0)
            self._orders.key, self._orders.ids = key, found.reshape(splits, -1)
        ids = self._orders.ids[split]
        return ids[ids != -1]

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:  # noqa: ARG002 - Mosaic's
        """Bring a shard to this host, unless it is there. Several processes may do so at once."""
        shard = self.shards[shard_id]
        stream = self.streams[self.stream_per_shard[shard_id]]
        raw, compressed = zip(*shard.file_pairs, strict=True)
        fetch_files(
            stream,
            {info.basename: info.bytes for info in raw},
            lambda aside: aside.prepare_shard(shard),
            sources={info.basename: info.bytes for info in compressed if info},
        )


class _Orders:
    """Samples of all splits in one epoch, kept apart from the state of the data set."""

    key: tuple[int, int] | None = None  # epoch and number of splits
    ids: Ids = np.empty((0, 0), np.int64)


class _Samples(Iterator[Any]):
    """Samples by their numbers. Shards are brought to this host, ahead in loader processes."""

    def __init__(self, dataset: MosaicSplits, ids: Ids) -> None:
        self._dataset: Any = dataset
        self._ids, self._done = ids, 0
        self._ahead, self._pool = 0, None
        if get_worker_info() is not None:
            self._ahead, self._pool = dataset.predownload, ThreadPoolExecutor(1)
        self._reached = 0  # shards of the samples before are there, or in work
        self._fetches: dict[int, Future[None]] = {}

    def __next__(self) -> Any:
        if self._done >= len(self._ids):
            raise StopIteration
        number = self._ids[self._done]
        self._fetch(number)
        self._done += 1
        return self._dataset[number]

    def skip(self, count: int) -> None:
        """Go on by `count` samples, none of which is read."""
        self._done += count
        self._reached = max(self._reached, self._done)

    def _fetch(self, number: np.int64) -> None:
        """Bring the shard of a sample, and begin with those behind it."""
        shards, end = self._dataset.spanner, self._done + 1 + self._ahead
        for following in self._ids[self._reached : end]:
            shard, _ = shards[following]
            if shard not in self._fetches:
                self._fetches[shard] = self._start(shard)
        self._reached = max(self._reached, end)
        self._fetches[shards[number][0]].result()

    def _start(self, shard: int) -> Future[None]:
        if self._pool is not None:
            return self._pool.submit(self._dataset.prepare_shard, shard)
        self._dataset.prepare_shard(shard)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def fetch_files(
    stream: Any,
    sizes: dict[str, int | None],
    fetch: Callable[[Any], object],
    sources: dict[str, int | None] | None = None,
) -> None:
    """Bring files of a stream to its cache, unless they are there: complete or not at all.

    Args:
        sizes: names relative to the folder of the stream, and bytes where they are known.
        fetch: is given a copy of the stream with another cache, and puts the files there.
        sources: the same of files that `fetch` may use if they are in the cache already.

    Raises UsageError for a file of another size that cannot be fetched again.
    """
    folder, sources = Path(stream.local, stream.split), sources or {}
    if not _missing(folder, sizes):
        return
    desk = folder / _DESK
    desk.mkdir(parents=True, exist_ok=True)
    name = next(iter(sizes)).replace("/", "+")
    aside = copy.copy(stream)
    aside.local = str(desk / name)
    draft = Path(aside.local, aside.split)
    with (desk / f"{name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one fetches; it ends with its own
        missing = _missing(folder, sizes)
        if not missing:
            return
        shutil.rmtree(aside.local, ignore_errors=True)  # of a process that was killed
        for each in (*sizes, *sources):
            (draft / each).parent.mkdir(parents=True, exist_ok=True)
        there = [name for name, size in sources.items() if not _missing(folder, {name: size})]
        if not there and not stream.remote:
            raise UsageError(f"{folder}: without `remote`, {missing} cannot be fetched; copy it")
        for each in there:
            (draft / each).symlink_to((folder / each).absolute())
        fetch(aside)
        if wrong := _missing(draft, sizes):
            raise UsageError(f"{stream.remote}: {wrong} differs from the index of the data set")
        for each in (*sources, *reversed(sizes)):
            if (draft / each).is_file() and not (draft / each).is_symlink():
                (folder / each).parent.mkdir(parents=True, exist_ok=True)
                (draft / each).rename(folder / each)
        for each in there:
            if not (draft / each).is_symlink():  # Mosaic does not keep it
                (folder / each).unlink(missing_ok=True)
        shutil.rmtree(aside.local, ignore_errors=True)


def _missing(folder: Path, sizes: dict[str, int | None]) -> str:
    """Return the names of files that are not there, or have another size; "" if all are there."""
    wrong = []
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            wrong.append(name)
        elif size is not None and path.stat().st_size != size:
            wrong.append(f"{name} (with {path.stat().st_size} bytes in place of {size})")
    return ", ".join(wrong)


class _Unshared:
    """Stand-in for a barrier, a number or an array in shared memory, which nobody reads."""

    def __init__(self, *_args: Any) -> None:
        self.lock = None

    def __setitem__(self, _place: Any, _value: Any) -> None:
        """Keep nothing."""

    def get(self) -> int:
        """Return 0."""
        return 0

    def set(self, _value: Any) -> None:
        """Keep nothing."""


class _NoGroup:
    """Stand-in for torch.distributed: a data set is built without collectives."""

    @staticmethod
    def is_available() -> bool:
        """Return False."""
        return False


@contextmanager
def _without_shared_memory() -> Iterator[None]:
    """Let the library build data sets as though each process were alone on its host."""
    version = metadata.version(_PACKAGE)
    if not version.startswith(_KNOWN):
        raise UsageError(
            f"{_PACKAGE} {version}: MosaicSplits knows versions {_KNOWN}x, and may read other"
            " samples than this one does; nothing was read; install one of those"
        )
    module = import_module("streaming.base.dataset")
    stream, world = module.Stream, module.World
    load_shards = stream.get_shards

    def detect() -> Any:
        """Return the world as its first rank, which does what one process of a host does."""
        found = world.detect()
        return world(found.num_nodes, found.ranks_per_node, 1, 0)

    def get_shards(self: Any, *args: Any) -> list[Any]:
        name = module.get_index_basename()
        if self.remote:
            fetch_files(self, {name: None}, lambda aside: aside._download_file(name))  # noqa: SLF001
        return load_shards(self, *args)

    replaced = [
        (module, "World", type("World", (), {"detect": staticmethod(detect)})),
        (module, "dist", _NoGroup),
        (module, "get_shm_prefix", lambda *_: (0, None)),
        (module, "maybe_init_dist", lambda: False),
        *((module, f"Shared{each}", _Unshared) for each in ("Array", "Barrier", "Scalar")),
        (stream, "get_shards", get_shards),
        (stream, "set_up_local", lambda *_: None),
    ]
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in replaced]
    try:
        for thing, name, value in replaced:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)


def _refuse_settings(dataset: MosaicSplits) -> None:
    """Raise UsageError for settings and classes whose samples would be others than Mosaic's."""
    module = import_module("streaming.base.dataset")
    theirs = super(SplitDataset, dataset)
    altered = [
        f"{type(dataset).__name__}.{name}"
        for name in _ALTERED
        if getattr(theirs, name).__func__ is not getattr(module.StreamingDataset, name)
    ]
    altered += [
        f"{type(stream).__name__}.{name}"
        for stream in dataset.streams
        for name in _ALTERED_STREAM
        if getattr(type(stream), name) is not getattr(module.Stream, name)
    ]
    settings: dict[str, Any] = vars(dataset)
    why = ""
    if altered:
        why = f"{', '.join(altered)} is not Mosaic's own: read its samples in a read_split"
    elif settings["cache_limit"]:
        why = "cache_limit: shards stay in the cache; leave it out, and give the cache its room"
    elif not isinstance(dataset.batch_size, int):
        why = "batch_size decides the order: give it, as to the DataLoader"
    elif any(vars(stream)["_local"] is None for stream in dataset.streams):
        why = "give `local`: a new worker does not find a temporary folder that others made"
    if why:
        raise UsageError(f"MosaicSplits cannot read {type(dataset).__name__}: {why}")
