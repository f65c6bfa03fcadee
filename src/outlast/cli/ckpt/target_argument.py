"""TARGET argument: a directory of checkpoints, a run, one checkpoint, or a URL.

All commands report wrong targets alike.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.controller.audit.audit_records import is_barred
from outlast.errors import StorageError, UsageError
from outlast.launch.run_journal import bars_of
from outlast.launch.terms.run_identity import checkpoints_of

_RUN = "run.json"  # in a run directory
_OLDER = re.compile(r"step-\d{9,}-n\d+")
_LOCAL = "file://"
_SHOWN_MAX = 8


class CheckpointTarget(NamedTuple):
    """Parsed TARGET. `place` is set where it names one checkpoint and not a whole store; `run_dir`
    where it names a run directory."""

    store: Store
    place: SavePoint | None
    run_dir: Path | None = None

    def barred(self) -> Callable[[SavePoint], bool]:
        """Return a predicate: whether an audit of the run has barred a checkpoint.

        Raises RunDirError where the run's journal cannot be read.
        """
        root = self.store.root.parent if isinstance(self.store, Folder) else None
        root = self.run_dir or root
        bars = bars_of(root) if root is not None and (root / _RUN).is_file() else ()
        return lambda place: is_barred(bars, place.n, place.directory)

    def choose(self, step: int | None) -> SavePoint:
        """Return the chosen checkpoint: the named one, that of a step, or the newest.

        Barred checkpoints are never the newest. Raises UsageError when there is none, StorageError
        when the store cannot be listed.
        """
        if self.place is not None:
            if step is not None and step != self.place.step:
                raise UsageError(f"{self.place.directory} is not of step {step}; omit --step")
            if COMMIT not in self.store.files(self.place.directory):
                raise UsageError(
                    f"{self.store.where}/{self.place.directory} has no commit record: it is not"
                    " a complete checkpoint; nothing was read; `outlast ckpt ls"
                    f" {self.store.where}` lists the complete ones"
                )
            return self.place
        places, barred = checkpoint_places(self.store), self.barred()
        fit = (place for place in places if not barred(place)) if step is None else places
        chosen = next((place for place in fit if step in (None, place.step)), None)
        if chosen is None:
            raise UsageError(_nothing(self.store, places, step))
        return chosen

    def open(self, step: int | None) -> Checkpoint:
        """Return the chosen checkpoint with its commit record read.

        Raises as `choose`, and CorruptionError where the record is damaged.
        """
        return open_checkpoint(self.store, self.choose(step))

    def all_of_it(self) -> Store:
        """Return the store. Raises UsageError where the target names one checkpoint."""
        if self.place is not None:
            raise UsageError(
                f"{self.place.directory} is one checkpoint; give the directory that contains"
                f" it: {self.store.where}"
            )
        return self.store


def open_target(address: str) -> CheckpointTarget:
    """Open the checkpoints at `address`.

    Raises UsageError for an address without checkpoints, ConfigError for an unknown kind of address
    or a missing extra, StorageError for a bucket that cannot be reached or listed.
    """
    if "://" in _local(address):
        root, _, last = address.rstrip("/").rpartition("/")
        place = SavePoint.parse(last)
        return CheckpointTarget(open_store(root if place else address), place)
    path = Path(_local(address)).absolute()
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}; give a directory of checkpoints, or a run directory")
    if place := SavePoint.parse(path.name):
        return CheckpointTarget(Folder(path.parent), place)
    if (path / _RUN).is_file():
        return CheckpointTarget(Folder(checkpoints_of(path)), None, path)
    store = Folder(path)
    if not any(map(SavePoint.parse, store.directories())):
        _refuse_foreign(path)
    return CheckpointTarget(store, None)


def open_destination(address: str) -> Store:
    """Open the destination of checkpoints; the first write makes its directory.

    Raises as `open_target`, except for a directory that does not exist yet.
    """
    if SavePoint.parse(address.rstrip("/").rpartition("/")[2]):
        raise UsageError(
            f"{address} is one checkpoint; give a directory of checkpoints; nothing was written"
        )
    if "://" in _local(address):
        return open_store(address)
    path = Path(_local(address)).absolute()
    if not (above := _nearest(path)).is_dir():
        raise UsageError(f"{above} is not a directory; nothing was written")
    return Folder(checkpoints_of(path) if (path / _RUN).is_file() else path)


def check_room(store: Store, size_bytes: int) -> None:
    """Raise StorageError where a directory has too little space; buckets are unlimited."""
    if not isinstance(store, Folder):
        return
    free_bytes = shutil.disk_usage(_nearest(store.root)).free
    if size_bytes > free_bytes:
        raise StorageError(
            f"{store.where} needs {size_bytes} bytes, and its disk has {free_bytes} left;"
            " nothing was written; free some space, or give another destination"
        )


def is_older(directory: str) -> bool:
    """Return whether this is a checkpoint directory in the first format."""
    return _OLDER.fullmatch(directory) is not None


def _local(address: str) -> str:
    """Return the path of a file URL; any other address unchanged."""
    if address.startswith(_LOCAL):
        open_store(address)  # raises for an address that is no path
    return address.removeprefix(_LOCAL)


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def _refuse_foreign(path: Path) -> None:
    """Raise UsageError for a directory without checkpoints, naming the format it holds."""
    if any(is_older(name) for name in (path.name, *Folder(path).directories())):
        raise UsageError(
            f"{path} holds checkpoints of format 1, and this Outlast reads formats 2 to 4;"
            " nothing was changed; use the version of Outlast that wrote them"
        )
    if (path / ".metadata").is_file():
        what = "torch.distributed.checkpoint"
    elif next(path.glob("*.safetensors"), None):
        what = "safetensors"
    else:
        return
    raise UsageError(f"{path} holds {what}; import it with: outlast ckpt import {path} DIRECTORY")


def _nothing(store: Store, places: list[SavePoint], step: int | None) -> str:
    if not places:
        return f"{store.where} holds no complete checkpoint"
    steps = sorted({place.step for place in places}, reverse=True)
    more = f" and {len(steps) - _SHOWN_MAX} more" if steps[_SHOWN_MAX:] else ""
    listed = ", ".join(map(str, steps[:_SHOWN_MAX]))
    return f"{store.where} holds no checkpoint of step {step} (there are {listed}{more})"
