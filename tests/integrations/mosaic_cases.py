"""Mosaic's data sets of many settings, and their samples by Mosaic's own iteration.

    python -m tests.integrations.mosaic_cases FOLDER > tests/integrations/mosaic_samples.json

prints a digest of the samples of each case, with barriers in shared memory, which take minutes.
Processes of one node run at a time, since nodes share no memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

SIZES = {"a": 101, "b": 40}
EPOCHS = 2


class Layout(NamedTuple):
    """Processes of a job."""

    ranks: int
    ranks_per_node: int
    workers: int


LAYOUTS = {
    "one node": Layout(3, 3, 0),
    "one node with loader processes": Layout(2, 2, 2),
    "two nodes": Layout(4, 2, 1),
}
_BLOCKS = {"shuffle": True, "shuffle_block_size": 30, "num_canonical_nodes": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "in order": {},
    "single samples": {"batch_size": 1, "shuffle": True},
    "py1e": {**_BLOCKS, "shuffle_algo": "py1e"},
    "py1br": {**_BLOCKS, "shuffle_algo": "py1br", "batch_size": 4},
    "py1s": {"shuffle": True, "shuffle_algo": "py1s", "shuffle_seed": 5},
    "py2s": {"shuffle": True, "shuffle_algo": "py2s", "partition_algo": "orig"},
    "naive": {**_BLOCKS, "shuffle_algo": "naive", "drop_last": True, "batch_size": 5},
    "parts of streams": {"streams": {"a": {"proportion": 0.3}, "b": {"proportion": 0.7}}},
    "repeats": {"streams": {"a": {"repeat": 0.4}, "b": {"choose": 90}}, **_BLOCKS},
    "fixed": {
        "streams": {"a": {"proportion": 0.5}, "b": {"proportion": 0.5}},
        **_BLOCKS,
        "sampling_method": "fixed",
        "sampling_granularity": 4,
        "epoch_size": 77,
    },
    "stratified": {"streams": {"a": {}, "b": {}}, "batching_method": "stratified", **_BLOCKS},
    "per stream": {"streams": {"a": {}, "b": {}}, "batching_method": "per_stream", **_BLOCKS},
    "device": {"streams": {"a": {}, "b": {}}, "batching_method": "device_per_stream", **_BLOCKS},
    "compressed": {"of": "compressed", **_BLOCKS},
    "lines": {"of": "lines"},
}
REPLICATED = {"replicated": {"shuffle": True, "replication": 2}}


def write_data(folder: Path) -> None:
    """Write the remote shards."""
    from streaming import JSONWriter, MDSWriter

    for name, first in (("a", 0), ("b", 1000)):
        with MDSWriter(out=str(folder / name), columns={"x": "int"}, size_limit=200) as out:
            for number in range(first, first + SIZES[name]):
                out.write({"x": number})
    packed = str(folder / "compressed")
    with MDSWriter(
        out=packed, columns={"x": "int"}, size_limit=200, compression="zstd", hashes=["sha1"]
    ) as out:
        for number in range(60):
            out.write({"x": number})
    with JSONWriter(out=str(folder / "lines"), columns={"x": "int"}, size_limit=200) as out:
        for number in range(60):
            out.write({"x": number})


def make_loader(
    kind: type[Any], case: str, remote: Path, local: Path, workers: int = 0, loader: Any = None
) -> Any:
    """Return the loader of a case over a data set of class `kind`."""
    from streaming import Stream
    from torch.utils.data import DataLoader

    settings = {"batch_size": 3, **(SETTINGS | REPLICATED)[case]}
    drop_last = settings.pop("drop_last", False)
    streams, of = settings.pop("streams", {}), settings.pop("of", "a")
    if streams:
        settings["streams"] = [
            Stream(remote=str(remote / name), local=str(local / name), **more)
            for name, more in streams.items()
        ]
    else:
        settings |= {"remote": str(remote / of), "local": str(local / of)}
    if of == "compressed":
        settings["validate_hash"] = "sha1"
    dataset = kind(**settings)
    return (loader or DataLoader)(
        dataset, batch_size=settings["batch_size"], num_workers=workers, drop_last=drop_last
    )


def digest_of(ranks: list[list[list[list[int]]]]) -> str:
    """Return the digest of the epochs of all ranks."""
    return xxhash.xxh3_64_hexdigest(json.dumps(ranks).encode())


def samples(loader: Any) -> list[list[int]]:
    """Return the batches of one epoch."""
    return [batch["x"].tolist() for batch in loader]


def cases_of(layout: Layout) -> list[str]:
    """Return the settings that a layout has."""
    return [*SETTINGS, *(REPLICATED if layout.ranks % 2 == 0 else {})]


def _read_as_rank(rank: int, name: str, folder: Path, answers: Any) -> None:
    import torch.distributed as dist
    from streaming import StreamingDataset

    layout = LAYOUTS[name]
    node, local_rank = divmod(rank, layout.ranks_per_node)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(layout.ranks),
        "LOCAL_WORLD_SIZE": str(layout.ranks_per_node),
    }
    store = f"file://{folder}/{name}-{node}"
    dist.init_process_group("gloo", store, rank=local_rank, world_size=layout.ranks_per_node)
    for case in cases_of(layout):
        local = folder / f"native {name} {node} {case}"
        loader = make_loader(StreamingDataset, case, folder / "remote", local, layout.workers)
        answers.put((name, case, rank, [samples(loader) for _ in range(EPOCHS)]))
    dist.destroy_process_group()


def _main(folder: Path) -> None:
    """Read all cases with Mosaic's own iteration."""
    import streaming

    assert streaming.StreamingDataset  # imported once, before all forks
    write_data(folder / "remote")
    fork = multiprocessing.get_context("fork")
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for name, layout in LAYOUTS.items():
        for first in range(0, layout.ranks, layout.ranks_per_node):
            answers = fork.SimpleQueue()
            ranks = range(first, first + layout.ranks_per_node)
            processes = [
                fork.Process(target=_read_as_rank, args=(rank, name, folder, answers))
                for rank in ranks
            ]
            for process in processes:
                process.start()
            for _ in range(len(cases_of(layout)) * len(ranks)):
                where, case, rank, epochs = answers.get()
                found.setdefault(where, {}).setdefault(case, {})[rank] = epochs
            for process in processes:
                process.join()
                assert process.exitcode == 0
    digests = {
        name: {
            case: digest_of([*dict(sorted(ranks.items())).values()])
            for case, ranks in cases.items()
        }
        for name, cases in found.items()
    }
    print(json.dumps(digests, indent=1))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _main(Path(sys.argv[1]))
