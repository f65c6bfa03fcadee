"""Streams of other libraries in splits, over data that a test has written."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES, BATCH, SHARDS = 90, 3, 9


def _numbers(samples: list[dict[str, Any]]) -> Any:
    import torch

    return torch.tensor([int(sample["x"]) for sample in samples])


def write_mosaic(folder: Path) -> None:
    """Write shards of numbers."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mosaic"), columns={"x": "int"}, size_limit=200) as out:
        for number in range(SAMPLES):
            out.write({"x": number})


def mosaic(folder: Path) -> Any:
    """Return a data set of Mosaic in splits."""
    from streaming import StreamingDataset

    from outlast.integrations import MosaicSplits

    class Texts(MosaicSplits, StreamingDataset):
        """Mosaic's data set in splits."""

    remote, local = str(folder / "mosaic"), str(folder / "cache")
    return Texts(remote=remote, local=local, batch_size=BATCH, shuffle=True, shuffle_seed=3)


def write_shards(folder: Path) -> None:
    """Write files of lines, of several lengths."""
    folder.mkdir(exist_ok=True)
    numbers = iter(range(SAMPLES))
    for shard in range(SHARDS):
        lines = [f'{{"x": {next(numbers)}}}' for _ in range(SAMPLES // SHARDS - 4 + shard)]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")


def is_kept(sample: dict[str, Any]) -> bool:
    """Return whether a filter keeps a sample."""
    return int(sample["x"]) % 10 != 7


def hugging_face(folder: Path) -> Any:
    """Return a stream of Hugging Face, filtered and shuffled, in splits."""
    import datasets

    from outlast.integrations import HuggingFaceSplits

    files = sorted(str(path) for path in folder.glob("*.jsonl"))
    datasets.config.HF_CACHE_HOME = str(folder)
    stream = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    stream = stream.filter(is_kept).shuffle(seed=5, buffer_size=8)
    return HuggingFaceSplits(stream, HuggingFaceSplits.count(stream))


def write_archives(folder: Path) -> None:
    """Write archives of several lengths."""
    folder.mkdir(exist_ok=True)
    numbers = iter(range(SAMPLES))
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for _ in range(SAMPLES // SHARDS - 4 + shard):
                number = next(numbers)
                data = str(number).encode()
                member = tarfile.TarInfo(f"{number}.x")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def webdataset(folder: Path) -> Any:
    """Return a pipeline of WebDataset, filtered and shuffled, in splits."""
    import webdataset

    from outlast.integrations import WebDatasetSplits

    files = sorted(str(path) for path in folder.glob("*.tar"))
    pipeline = webdataset.WebDataset(
        files, shardshuffle=3, nodesplitter=webdataset.split_by_node, empty_check=False
    )
    pipeline = pipeline.shuffle(8).select(is_kept)
    return WebDatasetSplits(pipeline, WebDatasetSplits.count(pipeline))


WRITERS: dict[str, Callable[[Path], None]] = {
    "mosaic": write_mosaic,
    "hugging face": write_shards,
    "webdataset": write_archives,
}
STREAMS: dict[str, Callable[[Path], Any]] = {
    "mosaic": mosaic,
    "hugging face": hugging_face,
    "webdataset": webdataset,
}


def make_loader(kind: str, folder: Path, workers: int) -> Any:
    """Return the loader of a rank over a stream of a kind."""
    loader = StatefulDataLoader if "stateful" in kind else DataLoader
    dataset = STREAMS[kind.removeprefix("stateful ")](folder)
    return loader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=_numbers)


def batches_of(kind: str, folder: Path, world: int, workers: int, epochs: int) -> list[list[Any]]:
    """Return the batches of all ranks of a job, by its steps; the shortest rank ends an epoch."""
    found: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world))
        patch.setenv("LOCAL_WORLD_SIZE", str(world))
        patch.setattr(dist, "get_world_size", lambda: world)
        patch.setattr(dist, "get_rank", lambda: 0)
        for epoch in range(epochs):
            ranks: list[list[Any]] = []
            for rank in range(world):
                loader = make_loader(kind, folder, workers)
                loader.dataset.rank = rank
                loader.dataset.set_epoch(epoch)
                ranks.append([tuple(batch.tolist()) for batch in loader])
            found += map(list, zip(*ranks, strict=False))
    return found
