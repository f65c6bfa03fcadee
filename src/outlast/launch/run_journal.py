"""Journal of a run's decisions, and branches of a run.

A branch is the same job: run id, script, arguments and shared values are copied from the origin,
which is only read. A launcher of the new directory resumes from the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.atomic_files import replace_file
from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep import checkpoint_copy
from outlast.controller.audit.audit_records import CopyBar
from outlast.controller.inputs import AnyEntry, CopiesBarred, SharedValueStored
from outlast.controller.lifecycle.journal_segments import join_segments
from outlast.errors import CorruptionError, RunDirError, StorageError
from outlast.launch.terms.run_identity import CHECKPOINTS, RunningJob, checkpoints_of
from outlast.telemetry.segment_files import SegmentWriter, read_records

ORIGIN = "origin"  # writer of a branch's first segment
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def read_segments(
    directory: Path, damaged: Callable[[str], None]
) -> dict[int, tuple[AnyEntry, ...]]:
    """Return all entries of each term's segment, oldest first; those of another
    writer, a branch's origin, as term 0.

    Damage is passed to `damaged`, including the torn tail of a killed launcher, which was never
    acted on. Raises RunDirError if a whole record is no entry known to this version.
    """
    segments: dict[int, list[AnyEntry]] = {}
    for record in read_records(directory, lambda damage: damaged(str(damage))):
        number = record.writer.removeprefix("term")
        term = int(number) if number.isdecimal() else 0
        try:
            segments.setdefault(term, []).append(_decoder.decode(record.payload))
        except msgspec.DecodeError as error:
            raise RunDirError(
                f"the journal in {directory} holds an entry that cannot be read ({error});"
                " nothing was changed; resume with the version that wrote it"
            ) from error
    return {term: tuple(entries) for term, entries in segments.items()}


def read_journal(directory: Path, damaged: Callable[[str], None]) -> tuple[AnyEntry, ...]:
    """Return the decisions of earlier terms that count, oldest first; as `read_segments`."""
    return join_segments(read_segments(directory, damaged))


def bars_of(run_dir: Path) -> tuple[CopyBar, ...]:
    """Return the copies that a run's audits have barred; raises as `read_journal` does."""
    entries = read_journal(run_dir / "journal", lambda _: None)
    return tuple(
        CopyBar(one.after_n, one.generation) for one in entries if isinstance(one, CopiesBarred)
    )


def branch(origin: Path, place: SavePoint, target: Path, on_damage: Callable[[str], None]) -> None:
    """Create the run `target`, which must not exist, at the checkpoint `place` of `origin`.

    The checkpoint's files are hard-linked if possible, else copied and verified. Damage of the
    origin's journal is passed to `on_damage`. Raises RunDirError, StorageError, or CorruptionError
    if the checkpoint is missing or damaged; `target` is then incomplete.
    """
    try:
        job = msgspec.json.decode((origin / "run.json").read_bytes(), type=RunningJob)
        target.mkdir(parents=True)
        job = msgspec.structs.replace(job, home="")
        for room in (CHECKPOINTS, "journal"):
            (target / room).mkdir()
        replace_file(target / "run.json", msgspec.json.format(msgspec.json.encode(job), indent=2))
        # Values shared before the checkpoint are not created again after it.
        shared = [
            entry
            for entry in read_journal(origin / "journal", on_damage)
            if isinstance(entry, SharedValueStored)
        ]
        journal = SegmentWriter(target / "journal", ORIGIN, durable=True)
        for entry in shared:
            journal.append(msgspec.msgpack.encode(entry))
        journal.close()
    except OSError as error:
        raise RunDirError(
            f"{target} cannot be made a branch of {origin}: {error.strerror or error}"
        ) from error
    except msgspec.DecodeError as error:
        raise RunDirError(f"{origin / 'run.json'} cannot be read ({error})") from error
    _take_over(checkpoints_of(origin), place, target / CHECKPOINTS)


def _take_over(source: Path, place: SavePoint, target: Path) -> None:
    """Link or copy the checkpoint; the commit record is last, since it makes it complete."""
    names = sorted(Folder(source).files(place.directory), key=lambda name: name == COMMIT)
    if COMMIT not in names:
        raise CorruptionError(f"{source / place.directory} does not exist: it was pruned meanwhile")
    try:
        (target / place.directory).mkdir()
        for name in names:
            os.link(source / place.directory / name, target / place.directory / name)
    except FileNotFoundError as error:
        raise StorageError(
            f"{error.filename} was pruned meanwhile by the live run; choose a newer one"
        ) from error
    except OSError:  # another file system, or no support for hard links
        checkpoint_copy.copy_checkpoint(Folder(source), place, Folder(target))
