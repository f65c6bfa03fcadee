"""Cases of shared loads by four ranks, compared with loads by each rank alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.checkpoint.checkpoint_maker import make
from tests.checkpoint.load import layout_ranks
from tests.checkpoint.sample_checkpoint import flip, place
from torch import distributed as dist
from torch import nn

from outlast.checkpoint import Checkpointer
from outlast.checkpoint.format import codec
from outlast.checkpoint.load import load_preparation
from outlast.checkpoint.rank_group import RankGroup
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import OutlastError, StorageError

WORLD, CHUNK = 4, 4096
SIZES = {"a": 9000, "b": 7003, "c": 12_001}
Read = Callable[[Folder, str, str, int, memoryview], None]
whole_read: Read = Folder.read
whole_get = Folder.get


class Seen(NamedTuple):
    """Results of one rank's load.

    `size_bytes`: read from folders by all ranks. `records`: number of manifests.
    """

    told: str
    notes: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    size_bytes: int
    records: int


def values(step: int) -> dict[str, np.ndarray[Any, Any]]:
    made = np.random.default_rng(step)
    return {f"model.{n}": made.standard_normal(size, np.float32) for n, size in SIZES.items()}


def saved(root: Path, *steps: int, world: int = WORLD) -> int:
    """Save checkpoints of many small chunks; return the bytes of one."""
    if dist.get_rank() == 0:
        for step in steps:
            make(root, place(step), values(step), world, chunk_bytes=CHUNK, time_ns=step,
                 shared=codec.encode({}))  # fmt: skip
    dist.barrier()
    directory = root / place(steps[0]).directory
    return sum(shard.stat().st_size for shard in directory.glob("shard-*"))


@contextmanager
def reading(read: Read) -> Iterator[None]:
    """Read folders by `read` within the context."""
    Folder.read = read
    yield
    Folder.read, Folder.get = whole_read, whole_get


def load(
    root: Path, names: str, share: bool | None, read: Read = whole_read, **settings: Any
) -> Seen:
    """Load tensors of these names into zeros, on all ranks at once."""
    state = {"model": nn.ParameterDict({n: torch.zeros(SIZES[n]) for n in names})}
    count = torch.zeros(2, dtype=torch.int64)

    def counted(self: Folder, directory: str, name: str, at: int, into: memoryview) -> None:
        count[0] += len(into)
        read(self, directory, name, at, into)

    def get(self: Folder, directory: str, name: str) -> bytes:
        count[1] += name.startswith("rank-")
        return whole_get(self, directory, name)

    told, notes = "", ()
    options = {name: settings.pop(name) for name in ("cast", "strict") if name in settings}
    if options.get("cast"):
        state["model"].to(torch.bfloat16)
    with Checkpointer(root, complete=False, **settings) as saves, reading(counted):
        Folder.get = get
        try:
            restored = saves.load(state, share=share, **options)
            assert restored
            told, notes = f"step {restored.step}", restored.notes
        except OutlastError as error:
            told = f"{type(error).__name__}: {error}"
    dist.all_reduce(count)
    found = {n: p.detach() for n, p in state["model"].items()}
    return Seen(told, notes, found, int(count[0]), int(count[1]))


def equal(seen: Seen, step: int) -> bool:
    expected = values(step)
    return all(
        torch.equal(tensor, torch.from_numpy(expected[f"model.{n}"]).to(tensor.dtype))
        for n, tensor in seen.tensors.items()
    )


def same(one: Seen, other: Seen) -> bool:
    """Return what each rank is told, whoever read."""
    return (one.told, one.notes) == (other.told, other.notes)


def replicas(root: Path, rank: int) -> None:
    """Load replicas: each rank reads a quarter of the bytes."""
    size = saved(root, 1)
    alone = load(root, "abc", False)
    assert equal(alone, 1) and alone.size_bytes >= WORLD * size, alone.size_bytes / size
    together = load(root, "abc", True)
    assert equal(together, 1) and same(alone, together)
    assert together.size_bytes == size, together.size_bytes / size
    of_rank_0, of_all = WORLD, WORLD  # it alone looks for what there is to load
    assert together.records == of_rank_0 + of_all, together.records
    assert load(root, "abc", None).size_bytes == alone.size_bytes, "one host reads its own disk"
    here = load_preparation._host
    load_preparation._host = lambda: f"host {rank % 2}"
    apart = load(root, "abc", None)
    load_preparation._host = here
    assert equal(apart, 1) and apart.size_bytes == size, "two hosts read together"
    cast = load(root, "abc", True, cast=True)
    assert equal(cast, 1) and cast.size_bytes == size, cast.size_bytes / size


def own_saves(root: Path, rank: int) -> None:
    """Load saves with rank-local state: random generators and a position."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    state, own = {"model": model, "best": 3}, {"position": {"at": rank}}
    torch.manual_seed(rank)
    with Checkpointer(root, complete=False, on_failure="raise") as saves:
        saves.save(1, state, own)
        saves.wait()
        dist.barrier()
        size = sum(shard.stat().st_size for shard in root.glob("step-*/shard-*"))
        count = torch.zeros(1, dtype=torch.int64)

        def counted(self: Folder, directory: str, name: str, at: int, into: memoryview) -> None:
            count.add_(len(into))
            whole_read(self, directory, name, at, into)

        again, found = {"model": nn.Linear(300, 300), "best": 0}, {"position": {}}
        with reading(counted):
            assert saves.load(again, found, share=True)
    dist.all_reduce(count)
    assert torch.equal(again["model"].weight, model.weight)
    assert (again["best"], found) == (3, {"position": {"at": rank}})
    assert int(count) == size, (int(count), size)


def unlike(root: Path, rank: int) -> None:
    """Load two stages with two replicas each, one of them smaller, and ranks without tensors."""
    size = saved(root, 1, world=3)
    for names in (("ac", "ac", "bc", "bc"), ("abc", "a", "c", ""), ("", "b", "b", "")):
        together = load(root, names[rank], True, strict=False)
        assert equal(together, 1), together
        assert same(together, load(root, names[rank], False, strict=False)), together
        assert together.size_bytes <= size, together.size_bytes / size


def damage(root: Path, rank: int) -> None:
    """Damage a chunk that all ranks need: all skip it, or read it from durable storage."""
    here, far = root / "here", root / "far"
    size = saved(here, 1, 2)
    shard = here / place(2).directory / "shard-00001"
    dist.barrier()
    if rank == 0:
        shutil.copytree(here, far)
        flip(shard, 2 * CHUNK + 5)
    dist.barrier()
    alone, together = load(here, "abc", False), load(here, "abc", True)
    assert together.told == "step 1" and equal(together, 1) and same(alone, together), together
    assert "shard-00001: chunk 2" in together.notes[0]
    together = load(here, "abc", True, durable=far, job="job")
    assert together.told == "step 2" and equal(together, 2), together
    (note,) = together.notes  # of the rank that read it
    assert "shard-00001: chunk 2" in note and f"read from {far}" in note
    assert together.size_bytes <= 2 * size + CHUNK


def wire(root: Path, rank: int) -> None:
    """Damage the chunks that one rank forwards: all ranks behind it read them directly."""
    saved(root, 1)
    send = RankGroup.send

    def wrong(self: RankGroup, data: memoryview, to: int, number: int) -> Any:
        bad = bytearray(data)
        bad[number % len(bad)] ^= 4
        return send(self, memoryview(bad), to, number)

    if rank == 1:
        RankGroup.send = wrong
    seen = load(root, "abc", True)
    RankGroup.send = send
    assert seen.told == "step 1" and equal(seen, 1) and seen.notes == (), seen


def unread(root: Path, rank: int) -> None:
    """Fail one rank's disk: all ranks raise an error, as in separate loads."""
    saved(root, 1)

    def failing(self: Folder, directory: str, name: str, at: int, into: memoryview) -> None:
        if rank == 2 and name == "shard-00001" and at:
            raise StorageError("EIO")
        whole_read(self, directory, name, at, into)

    alone, together = load(root, "abc", False, failing), load(root, "abc", True, failing)
    assert "StorageError" in together.told and "rank 2: EIO" in together.told
    # Alone, which of its chunks fails first is a matter of threads.
    assert together.told.split("chunk")[0] == alone.told.split("chunk")[0]
    seen = load(root, "abc", rank == 1)
    assert "UsageError: share differs between ranks" in seen.told, seen


def subgroup(root: Path, rank: int) -> None:
    """Load in a subgroup of two ranks with other numbers."""
    group = dist.new_group([1, 3])
    size = saved(root, 1)
    if rank not in (1, 3):
        return
    state = {"model": nn.ParameterDict({n: torch.zeros(s) for n, s in SIZES.items()})}
    count = 0

    def counted(self: Folder, directory: str, name: str, at: int, into: memoryview) -> None:
        nonlocal count
        count += len(into)
        whole_read(self, directory, name, at, into)

    with Checkpointer(root, complete=False, group=group) as saves, reading(counted):
        assert saves.load(state, share=True)
    expected = torch.from_numpy(values(1)["model.b"])
    assert torch.equal(state["model"]["b"], expected) and count <= size * 2 // 3, count / size


def layouts_of_torch(root: Path, rank: int) -> None:
    """Load HSDP into itself, FSDP, tensor parallelism and replicas."""
    known = layout_ranks.layouts()
    _, make_model = known["hsdp"]
    with Checkpointer(root, complete=False, on_failure="raise") as saves:
        saves.save(1, dict(make_model()))
        saves.wait()
        dist.barrier()
        size = sum(shard.stat().st_size for shard in root.glob("step-*/shard-*"))
        for layout in ("hsdp", "fsdp4 by columns", "fsdp+tp", "by hand", "ddp"):
            _, make_model = known[layout]
            expected = make_model()
            state = {name: value.clone() for name, value in expected.items()}
            count = torch.zeros(1, dtype=torch.int64)

            def counted(
                self: Folder, directory: str, name: str, at: int, into: memoryview,
                count: torch.Tensor = count,
            ) -> None:  # fmt: skip
                count.add_(len(into))
                whole_read(self, directory, name, at, into)

            for value in state.values():
                layout_ranks.local(value).fill_(7)
            with reading(counted):
                assert saves.load(state, share=True)
            for name, value in state.items():
                other = layout_ranks.local(expected[name])
                assert torch.equal(layout_ranks.local(value), other), (layout, name)
            dist.all_reduce(count)
            # Elsewhere a rank may hold a chunk for its own values alone, of these few large ones.
            most = size if layout in ("hsdp", "ddp") else 1.5 * size
            assert int(count) <= most, (layout, int(count) / size)


def bucket(root: Path, rank: int, address: str) -> None:
    """Load from a bucket, without a request for a shared load."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    with Checkpointer(root, complete=False, on_failure="raise", durable=address) as saves:
        saves.save(1, {"model": model})
    dist.barrier()
    again = nn.Linear(300, 300)
    with Checkpointer(root / "empty", complete=False, durable=address) as saves:
        restored = saves.load({"model": again})
    assert restored and "is read from s3://" in restored.notes[0]
    assert torch.equal(again.weight, model.weight)


LOADS = (replicas, own_saves, unlike, damage, wire, unread, subgroup)
