"""Mosaic's data sets in splits have the samples of Mosaic's own iteration."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.source_driver import go_on, open_source
from tests.data.source_driver import train as draw_all
from tests.data.test_dealt_loaders import Job, plain, train
from tests.integrations.mosaic_cases import (
    EPOCHS,
    LAYOUTS,
    Layout,
    cases_of,
    digest_of,
    make_loader,
    samples,
    write_data,
)
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast.errors import UsageError
from outlast.integrations import MosaicSplits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    streaming = pytest.importorskip("streaming", reason="pip install mosaicml-streaming==0.13.0")

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",
    "ignore:Length of IterableDataset",
    "ignore:unclosed file:ResourceWarning",  # compressed shards, by Mosaic
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:Trying to partition 101 samples over 128 canonical nodes",
)
RECORDED = json.loads(Path(__file__).with_name("mosaic_samples.json").read_text())


class Numbers(MosaicSplits, streaming.StreamingDataset):
    """Mosaic's data set in splits."""


class Noisy(Numbers):
    """The same, with noise of the process's generators."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at) | {"noise": torch.rand(()).item()}


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mosaic")
    write_data(folder)
    return folder


class World:
    """Environment of the ranks of a layout, one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch, remote: Path, local: Path) -> None:
        self.patch, self.remote, self.local = patch, remote, local

    def loader(
        self, layout: Layout, rank: int, case: str = "py1e", kind: Any = Numbers, loader: Any = None
    ) -> Any:
        node, local_rank = divmod(rank, layout.ranks_per_node)
        places = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": layout.ranks}
        for name, value in {**places, "LOCAL_WORLD_SIZE": layout.ranks_per_node}.items():
            self.patch.setenv(name, str(value))
        local = self.local / f"{node} {case}"
        return make_loader(kind, case, self.remote, local, layout.workers, loader)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, remote: Path, tmp_path: Path) -> World:
    return World(monkeypatch, remote, tmp_path)


def test_all_cases_are_recorded() -> None:
    assert {name: [*cases] for name, cases in RECORDED.items()} == {
        name: cases_of(layout) for name, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_samples_are_those_of_mosaic(world: World, name: str) -> None:
    layout = LAYOUTS[name]
    for case, digest in RECORDED[name].items():
        found: list[list[list[list[int]]]] = []
        for rank in range(layout.ranks):
            loader = world.loader(layout, rank, case)
            found.append([])
            for epoch in range(EPOCHS):
                loader.dataset.set_epoch(epoch)
                found[-1].append(samples(loader))
        assert digest_of(found) == digest, case


def numbers(batch: list[dict[str, Any]]) -> list[int]:
    return [int(sample["x"]) for sample in batch]


def counting(**settings: Any) -> Any:
    """Return a loader whose batches are lists of numbers."""
    return DataLoader(settings.pop("dataset"), collate_fn=numbers, **settings)


@pytest.mark.parametrize("case", ["py1e", "device", "naive"])
def test_each_sample_is_trained_once(world: World, case: str) -> None:
    """Ranks leave and come back in two epochs, whose samples are those of all ranks."""
    layout = Layout(4, 4, 0)

    def make(rank: int) -> Any:
        return world.loader(
            layout, rank, case, loader=lambda dataset, **more: counting(dataset=dataset, **more)
        )

    expected = [plain(make, 4, epoch) for epoch in range(2)]
    changes = [None, {0, 2, 3}, None, {2}, None, {0, 1, 2, 3}, *[None] * 4, {1, 3}, None, {0, 1, 3}]
    assert train(Job(make, 4), 2, changes) == expected


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_process_goes_on(world: World, kind: Any, workers: int) -> None:
    """From each position of two epochs, with the same noise."""
    layout = Layout(3, 3, workers)

    def make() -> Any:
        return world.loader(layout, 1, kind=Noisy, loader=kind)

    draws = draw_all(open_source(make()), 2, None)
    for at in range(0, len(draws), 5):
        again = go_on(open_source(make()), draws[at], 2, None)
        assert [draw.seen for draw in again] == [draw.seen for draw in draws[at:]]


def test_a_cache_with_damaged_files_is_filled_again(world: World) -> None:
    """Files of a process that was killed: shorter ones in their places, and a folder of a fetch."""
    layout = LAYOUTS["one node"]
    expected = samples(world.loader(layout, 0))
    folder = world.local / "0 py1e" / "a"
    (one, two, *_) = sorted(folder.glob("*.mds"))
    one.write_bytes(one.read_bytes()[:-7])
    two.unlink()
    aside = folder / ".outlast" / two.name / "a"
    aside.mkdir(parents=True)
    (aside / two.name).write_bytes(b"half")
    assert samples(world.loader(layout, 0)) == expected
    assert not [*folder.glob(".outlast/*/")] or all(
        path.is_file() for path in folder.glob(".outlast/*")
    )


def test_only_local_shards(world: World) -> None:
    shutil.copytree(world.remote / "a", world.local / "a")

    def make() -> Any:
        return Numbers(local=str(world.local / "a"), batch_size=3)

    assert len([*make()]) == 101
    (shard, *_) = sorted((world.local / "a").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"without `remote`, shard.00000.mds \(with"):
        list(make())
    shard.unlink()
    with pytest.raises(UsageError, match=r"without `remote`, shard.00000.mds cannot be fetched"):
        list(make())


class OwnWay(streaming.StreamingDataset):
    """Data set that reads in a way of its own."""

    def __iter__(self) -> Iterator[Any]:
        yield from ()


class OwnWaySplits(MosaicSplits, OwnWay):
    """Mix-in that would hide it."""


class Turned(streaming.StreamingDataset, MosaicSplits):
    """Mix-in behind the data set."""


class OwnStream(streaming.Stream):
    """Stream with an index of its own."""

    def get_shards(self, *args: Any) -> Any:
        return super().get_shards(*args)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        (OwnWaySplits, {}, "OwnWaySplits.__iter__ is not Mosaic's own"),
        (Numbers, {"cache_limit": "1gb"}, "cache_limit: shards stay in the cache"),
        (Numbers, {"batch_size": None}, "batch_size decides the order"),
        (Numbers, {"local": None}, "give `local`"),
        (Numbers, {"streams": OwnStream}, "OwnStream.get_shards is not Mosaic's own"),
    ],
)
def test_settings_that_are_refused(world: World, kind: Any, settings: Any, why: str) -> None:
    more = {"remote": str(world.remote / "a"), "local": str(world.local), "batch_size": 2}
    if "streams" in settings:
        stream = OwnStream(remote=more.pop("remote"), local=more.pop("local"))
        settings = {"streams": [stream]}
    with pytest.raises(UsageError, match=why):
        kind(**{**more, **settings})


def test_another_version_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.12.1")
    with pytest.raises(UsageError, match=r"mosaicml-streaming 0.12.1: MosaicSplits knows"):
        Numbers(remote=str(world.remote / "a"), local=str(world.local), batch_size=2)


def test_loaders_that_are_refused(world: World) -> None:
    dataset = world.loader(LAYOUTS["one node"], 0).dataset
    with pytest.raises(UsageError, match="StreamingDataLoader keeps its position in"):
        open_source(streaming.StreamingDataLoader(dataset, batch_size=3))
    with pytest.raises(UsageError, match="persistent"):
        open_source(DataLoader(dataset, batch_size=3, num_workers=1, persistent_workers=True))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # else Mosaic makes a process group
        world.patch.setenv(name, "1")
    turned = Turned(remote=str(world.remote / "b"), local=str(world.local / "turned"), batch_size=3)
    with pytest.raises(UsageError, match=r"Turned .* outlast.integrations.MosaicSplits"):
        open_source(DataLoader(turned, batch_size=3))
