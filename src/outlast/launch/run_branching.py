"""A fresh run directory that begins where another run stood, at one of its checkpoints.

It is the same job: run, script, arguments and shared values are those of the other, which is only
read. A launcher that takes the new directory resumes from the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep import checkpoint_copy
from outlast.controller.inputs import SharedValueStored
from outlast.errors import CorruptionError, RunDirError, StorageError
from outlast.launch.decision_journal import read_journal
from outlast.launch.run_directory import RunningJob, write
from outlast.telemetry.segment_files import SegmentWriter

_CHECKPOINTS = "checkpoints"


def branch(origin: Path, place: SavePoint, target: Path, on_damage: Callable[[str], None]) -> None:
    """Make `target`, which must not exist, a run that stands at `origin`'s checkpoint `place`.

    The checkpoint's files are linked where the file system can, else copied and verified. Damage
    of the origin's journal is told to `on_damage`. Raises RunDirError, StorageError, or
    CorruptionError where the checkpoint is gone or damaged; `target` is then of no use.
    """
    try:
        job = msgspec.json.decode((origin / "run.json").read_bytes(), type=RunningJob)
        target.mkdir(parents=True)
        for room in (_CHECKPOINTS, "journal"):
            (target / room).mkdir()
        write(target / "run.json", msgspec.json.format(msgspec.json.encode(job), indent=2))
        # What was shared before the checkpoint is not made again after it.
        shared = [
            entry
            for entry in read_journal(origin / "journal", on_damage)
            if isinstance(entry, SharedValueStored)
        ]
        journal = SegmentWriter(target / "journal", "origin", durable=True)
        for entry in shared:
            journal.append(msgspec.msgpack.encode(entry))
        journal.close()
    except OSError as error:
        raise RunDirError(
            f"{target} cannot be made a branch of {origin}: {error.strerror or error}"
        ) from error
    except msgspec.DecodeError as error:
        raise RunDirError(f"{origin / 'run.json'} cannot be read ({error})") from error
    _take_over(origin / _CHECKPOINTS, place, target / _CHECKPOINTS)


def _take_over(source: Path, place: SavePoint, target: Path) -> None:
    """The commit record comes last: what has none is no checkpoint."""
    names = sorted(Folder(source).files(place.directory), key=lambda name: name == COMMIT)
    if COMMIT not in names:
        raise CorruptionError(f"{source / place.directory} is gone: it was pruned meanwhile")
    try:
        (target / place.directory).mkdir()
        for name in names:
            os.link(source / place.directory / name, target / place.directory / name)
    except FileNotFoundError as error:
        raise StorageError(
            f"{error.filename} went away meanwhile: the run goes on and prunes; take a newer one"
        ) from error
    except OSError:  # another file system, or one without links
        checkpoint_copy.copy_checkpoint(Folder(source), place, Folder(target))
