"""Streams of Hugging Face and WebDataset in splits."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.data.source_driver import go_on, open_source
from tests.data.source_driver import train as draw_all
from tests.data.test_dealt_loaders import Job, train
from tests.integrations import stream_kinds
from tests.integrations.stream_kinds import BATCH, STREAMS, WRITERS, make_loader
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast.errors import UsageError
from outlast.integrations import HuggingFaceSplits, WebDatasetSplits

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",
    "ignore:unclosed file:ResourceWarning",  # of streams that end early, by WebDataset
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
LIBRARIES = {"hugging face": "datasets", "webdataset": "webdataset"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only rank of a job; `placed` gives a data set another place."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.fixture(params=LIBRARIES)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(LIBRARIES[request.param])
    WRITERS[request.param](tmp_path)
    return request.param


def placed(kind: str, folder: Path, world: int, rank: int, workers: int) -> Any:
    loader = make_loader(kind, folder, workers)
    loader.dataset.num_replicas, loader.dataset.rank = world, rank
    return loader


def read(loader: Any, epoch: int) -> list[list[int]]:
    loader.dataset.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (4, 0), (6, 2), (12, 0)])
def test_all_ranks_read_each_sample_once(
    kind: str, tmp_path: Path, world: int, workers: int
) -> None:
    """Also with more processes than shards; in another order in each epoch."""
    epochs = []
    for epoch in range(2):
        batches = [
            batch
            for rank in range(world)
            for batch in read(placed(kind, tmp_path, world, rank, workers), epoch)
        ]
        epochs.append(batches)
        samples = Counter(sample for batch in batches for sample in batch)
        assert samples == Counter(n for n in range(stream_kinds.SAMPLES) if n % 10 != 7)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stateful", ["", "stateful "])
def test_a_new_process_goes_on(kind: str, tmp_path: Path, workers: int, stateful: str) -> None:
    def make() -> Any:
        return placed(stateful + kind, tmp_path, 2, 1, workers)

    draws = draw_all(open_source(make()), 2, None)
    for at in range(0, len(draws), 6):
        again = go_on(open_source(make()), draws[at], 2, None)
        assert [draw.seen for draw in again] == [draw.seen for draw in draws[at:]]


def test_each_sample_is_trained_once(kind: str, tmp_path: Path) -> None:
    def make(rank: int) -> Any:
        return placed(kind, tmp_path, 4, rank, 0)

    expected = []
    for epoch in range(2):
        ranks = [read(make(rank), epoch) for rank in range(4)]
        rows = min(map(len, ranks))
        expected.append(Counter(n for each in ranks for batch in each[:rows] for n in batch))
    changes = [None, {0, 2, 3}, None, {2}, None, {0, 1, 2, 3}, {1, 3}, None, {0, 1, 3}]
    assert train(Job(make, 4), 2, changes) == expected


def test_wrong_lengths_are_refused(kind: str, tmp_path: Path) -> None:
    stream = STREAMS[kind](tmp_path)
    inner = stream.stream if kind == "hugging face" else stream.pipeline
    with pytest.raises(UsageError, match="the lengths of 2 shards for a stream of 9"):
        type(stream)(inner, [3, 4])
    wrong = type(stream)(inner, [length + (n == 5) for n, length in enumerate(stream.lengths)])
    with pytest.raises(UsageError, match="gives only 81 samples where split_length returns 82"):
        list(wrong)


def test_a_stream_without_an_end(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def numbers(shards: list[int]) -> Any:
        for shard in shards:
            yield from ({"x": shard * 10 + each} for each in range(10))

    stream = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]})
    loader = DataLoader(HuggingFaceSplits(stream.repeat(None)), batch_size=BATCH)
    loader.dataset.num_replicas, loader.dataset.rank = 2, 1
    found = iter(loader)
    batches = [next(found)["x"].tolist() for _ in range(9)]
    assert [n for batch in batches for n in batch][:22] == [*range(10, 20), *range(30, 40), 10, 11]


def test_streams_of_hugging_face_that_are_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    node = pytest.importorskip("datasets.distributed")
    table = datasets.Dataset.from_dict({"x": [*range(20)]})
    stream = table.to_iterable_dataset(num_shards=4)
    for each, why in [
        (table, "a Dataset takes a DistributedSampler"),
        (node.split_dataset_by_node(stream, 0, 2), "leave split_dataset_by_node out"),
        (stream.shuffle(buffer_size=4).map(dict), "its shuffle has no seed"),
    ]:
        with pytest.raises(UsageError, match=why):
            HuggingFaceSplits(each)


def test_a_buffer_that_is_not_in_the_state_is_refused() -> None:
    """Its samples were lost with a replacement, silently."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": [*range(20)]}).to_iterable_dataset(num_shards=4)
    open_source(StatefulDataLoader(stream, batch_size=BATCH))
    shuffled = stream.shuffle(seed=1, buffer_size=4).map(dict)
    open_source(DataLoader(shuffled, batch_size=BATCH))
    with pytest.raises(UsageError, match="does not contain its shuffle buffer"):
        open_source(StatefulDataLoader(shuffled, batch_size=BATCH))


def test_pipelines_that_are_refused(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    urls = [f"{number}.tar" for number in range(4)]

    def make(**settings: Any) -> Any:
        return wds.WebDataset(urls, shardshuffle=False, **settings)

    import random

    for each, why in [
        (
            wds.WebDataset(urls, resampled=True, shardshuffle=False),
            "a ResampledShards and not a list of shards",
        ),
        (make().with_epoch(20), "leave repeat and with_epoch out"),
        (make().shuffle(4, rng=random.Random(1)), "leave rng out"),
        (make().batched(4), "leave batched out"),
        (wds.DataPipeline(), "its first stage is a NoneType"),
    ]:
        with pytest.raises(UsageError, match=why):
            WebDatasetSplits(each, [1] * 4)
