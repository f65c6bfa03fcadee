"""The engines that are compared, each as its users are told to use it; tuned where it says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from checkpointing.state import State
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from outlast.checkpoint import Checkpointer


class Engine(Protocol):
    """Saves a state under a root, and loads the newest save into tensors that exist."""

    def save(self, step: int, state: State) -> Callable[[], object]:
        """Returns when the state may change again, with what waits for the rest."""
        ...

    def load(self, step: int | None, into: State) -> None:
        """`step` None: the newest, where the engine knows it."""
        ...

    def close(self) -> None: ...


class Outlast:
    """The public face, with its defaults."""

    arenas = 2

    def __init__(self, root: Path) -> None:
        self._saves = Checkpointer(root, on_failure="raise", arenas=self.arenas)

    def prepare(self, state: State) -> None:
        """Begin to make the arenas, as a script does before its first steps."""
        self._saves.prepare(state._asdict())

    def save(self, step: int, state: State) -> Callable[[], object]:
        self._saves.save(step, state._asdict())
        return self._saves.wait

    def load(self, step: int | None, into: State) -> None:
        if not self._saves.load(into._asdict(), step=step):
            raise SystemExit("there is nothing to load")

    def close(self) -> None:
        self._saves.close()


class TorchSave:
    """One file; whoever wants it durable syncs it himself."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, step: int, state: State) -> Callable[[], object]:
        torch.save(dicts(state), self._root / f"{step}.pt")
        return nothing_left

    def load(self, step: int | None, into: State) -> None:
        found = torch.load(self._root / f"{step}.pt", weights_only=True)
        into.model.load_state_dict(found["model"])
        for index, kept in found["optimizer"]["state"].items():
            put = into.optimizer.state_dict()["state"][index]  # its own way would cast moments
            for key, value in kept.items():
                put[key].copy_(value)

    def close(self) -> None:
        pass


class Dcp:
    """torch.distributed.checkpoint, `dcp.save`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)

    def save(self, step: int, state: State) -> Callable[[], object]:
        state_dict_saver.save(named(state), checkpoint_id=self._path(step))
        return nothing_left

    def load(self, step: int | None, into: State) -> None:
        state_dict_loader.load(named(into), checkpoint_id=self._path(step))

    def close(self) -> None:
        dist.destroy_process_group()

    def _path(self, step: int | None) -> str:
        return str(self._root / f"{step}")


class DcpTwoFiles(Dcp):
    """`dcp.save` with two threads: what its best reader finds."""

    def save(self, step: int, state: State) -> Callable[[], object]:
        state_dict_saver.save(
            named(state), storage_writer=FileSystemWriter(self._path(step), thread_count=2)
        )
        return nothing_left


class DcpAsync(Dcp):
    """`dcp.async_save`, as it comes: a thread, a copy that is made anew each time."""

    def save(self, step: int, state: State) -> Callable[[], object]:
        return waiter(state_dict_saver.async_save(named(state), checkpoint_id=self._path(step)))


class DcpTuned(Dcp):
    """The best that was found: a process, shared memory that is used again, two threads, plans
    that are cached. (It tears saves that overlap, so each one is waited for.)"""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._stager = DefaultStager(StagingOptions(False, True, False, False))

    def save(self, step: int, state: State) -> Callable[[], object]:
        saving = state_dict_saver.async_save(
            named(state),
            storage_writer=FileSystemWriter(self._path(step), thread_count=2),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        return waiter(saving)


class Torchsnapshot:
    """`Snapshot.async_take`; only where it is installed."""

    def __init__(self, root: Path) -> None:
        import torchsnapshot  # pyright: ignore[reportMissingImports]

        self._library: Any = torchsnapshot
        self._root = root

    def save(self, step: int, state: State) -> Callable[[], object]:
        path = str(self._root / f"{step}")
        return self._library.Snapshot.async_take(path, state._asdict()).wait

    def load(self, step: int | None, into: State) -> None:
        self._library.Snapshot(str(self._root / f"{step}")).restore(into._asdict())

    def close(self) -> None:
        pass


class TorchCheckpointing:
    """`CheckpointManager` of torch_checkpointing (0.1.1 was tried), only where it is installed
    (`pip install torch_checkpointing`).

    As its guide says: asynchronous, pinned memory where there is an accelerator, `lock()` around
    what changes the state. Its direct writes end with EINVAL on ext4 unless a file's length happens
    to fit, so they are off, as its guide says for such a file system.
    """

    def __init__(self, root: Path) -> None:
        library: Any = import_module("torch_checkpointing")
        config: Any = import_module("torch_checkpointing.config")
        storage: Any = import_module("torch_checkpointing.storage.filesystem")
        saving = config.AsyncCheckpointSaverConfig()
        saving.process_config.subprocess_init_timeout_secs = (
            START_S  # 30: too few on a busy machine
        )
        self._manager = library.CheckpointManager(
            library.CheckpointManager.Config(
                save=saving,
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._root = root

    def save(self, step: int, state: State) -> Callable[[], object]:
        written = self._manager.save(str(self._root / f"{step}"), dicts(state))
        with self._manager.lock():  # until its copies have ended
            return written.result

    def load(self, step: int | None, into: State) -> None:
        found = self._manager.load(str(self._root / f"{step}"), into=dicts(into), strict=True)
        into.model.load_state_dict(found["model"])

    def close(self) -> None:
        self._manager.close()


START_S = 300
OURS = "outlast"
ENGINES: dict[str, Callable[[Path], Engine]] = {
    OURS: Outlast,
    "torch.save": TorchSave,
    "DCP sync": Dcp,
    "DCP async": DcpAsync,
    "DCP tuned": DcpTuned,
}
if find_spec("torchsnapshot"):
    ENGINES["torchsnapshot"] = Torchsnapshot
if find_spec("torch_checkpointing"):
    ENGINES["torch_checkpointing"] = TorchCheckpointing


def dicts(state: State) -> dict[str, Any]:
    """As torch's tutorials save a script's state."""
    return {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}


def named(state: State) -> dict[str, Any]:
    """As DCP's tutorials do: with the parameters' names in place of numbers."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer}


def waiter(saving: Future[Any] | AsyncSaveResponse) -> Callable[[], object]:
    """What waits for the rest of an asynchronous save; its copies have ended."""
    if isinstance(saving, AsyncSaveResponse):
        saving.staging_completion.result()
        return saving.upload_completion.result
    return saving.result


def nothing_left() -> None:
    """A save that had ended when it returned."""


def sync(root: Path) -> None:
    """Every file and directory below: what a rival leaves to its user, or to luck."""
    for path in (root, *root.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def forget(root: Path) -> None:
    """No page of these files stays in the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
