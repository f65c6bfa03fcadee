"""`outlast ckpt copy`: verified copies to another directory or bucket, read back."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from outlast import quantities
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint as carry
from outlast.checkpoint.upkeep.drain_to_target import lacking_checkpoints
from outlast.cli.ckpt.target_argument import check_room, open_destination, open_target
from outlast.cli.output_stream import byte_progress, echo, echo_error, print_json
from outlast.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    CorruptionError,
    OutlastError,
    StorageError,
    UsageError,
)
from outlast.launch.run_directory import RunningJob
from outlast.text_formatting import duration, size


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one copy.

    `present_bytes`: of shards that the destination already had; `error` is "" when the copy is
    complete and committed.
    """

    directory: str
    sent_bytes: int = 0
    present_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


def copy(
    source: str,
    dest: str,
    *,
    step: int | None = None,
    every: Annotated[bool, Parameter(name="--all", negative=())] = False,
    limit_rate: str | None = None,
    json: bool = False,
) -> int:
    """Copy to another directory or bucket, verified and resumable.

    Each chunk is verified when read, and again at the destination. The commit
    record is written last: without it, the destination has no checkpoint. The same
    command resumes an interrupted copy.

    Exit code 1: a checkpoint could not be copied.

    Parameters
    ----------
    source
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    dest
        Directory of checkpoints, created if missing, or a URL.
    step
        Step of the checkpoint (default: the newest).
    every
        Copy all checkpoints that the destination lacks, the newest first.
    limit_rate
        Bandwidth limit to and from the destination, for example 100MB/s (default: none).
    json
        Print one JSON array.
    """
    if every and step is not None:
        raise UsageError("--all and --step exclude each other; give one of them")
    rate = quantities.rate(f"--limit-rate {limit_rate}", limit_rate) if limit_rate else None
    chosen, target = open_target(source), open_destination(dest)
    if _is_same(chosen.store, target):
        raise UsageError(f"{source} and {dest} are the same place; nothing was copied")
    places = lacking_checkpoints(chosen.all_of_it(), target) if every else [chosen.choose(step)]
    _refuse_other_jobs(chosen.store, places, dest)
    check_room(target, sum(_missing_bytes(chosen.store, place, target) for place in places))
    copied: list[CopyReport] = []
    for place in places:
        try:
            copied.append(_copied(chosen.store, place, target, rate))
        except OutlastError as error:
            if not every:
                raise
            echo_error(f"outlast: {place.directory}: {error}")
            copied.append(CopyReport(directory=place.directory, error=str(error)))
        if not json and not copied[-1].error:
            _print(copied[-1], target)
    if json:
        print_json(copied)
    elif not copied:
        echo(f"{target.where} has all checkpoints of {chosen.store.where}")
    return EXIT_USER_ERROR if any(report.error for report in copied) else EXIT_DONE


def _refuse_other_jobs(store: Store, places: list[SavePoint], dest: str) -> None:
    """Raise UsageError if the destination is another run's.

    A run resumes from the newest checkpoint in its directory, and deletes others there.
    """
    path = Path(dest) / "run.json"
    if not path.is_file():
        return
    run = msgspec.json.decode(path.read_bytes(), type=RunningJob).run
    for place in places:
        with suppress(CorruptionError):  # the copy itself reports the damage
            if (job := open_checkpoint(store, place).job) != run:
                raise UsageError(
                    f"{dest} is the directory of job {run}, and {place.directory} is job"
                    f" {job or '(no name)'}'s, from which that could not resume; nothing was"
                    " copied; name another directory"
                )


def _copied(store: Store, place: SavePoint, target: Store, rate: int | None) -> CopyReport:
    began = time.monotonic()
    with byte_progress(f"step {place.step}") as report_progress:
        copied = carry(store, place, target, on_progress=report_progress, limit_bytes_per_s=rate)
    return CopyReport(
        directory=place.directory,
        sent_bytes=copied.sent_bytes,
        present_bytes=copied.present_bytes,
        seconds=time.monotonic() - began,
    )


def _print(done: CopyReport, target: Store) -> None:
    there = f", {size(done.present_bytes)} were there" if done.present_bytes else ""
    echo(
        f"{target.where}/{done.directory}: {size(done.sent_bytes)} sent and read back{there}, in"
        f" {duration(done.seconds)}"
    )


def _missing_bytes(store: Store, place: SavePoint, target: Store) -> int:
    """Return an upper bound of the bytes still to send; 0 for a damaged checkpoint.

    The copy itself reports the damage.
    """
    try:
        total_bytes = open_checkpoint(store, place).size_bytes
    except (CorruptionError, StorageError):
        return 0
    return max(0, total_bytes - sum(target.files(place.directory).values()))


def _is_same(store: Store, target: Store) -> bool:
    if isinstance(store, Folder) and isinstance(target, Folder):
        return store.root.resolve() == target.root.resolve()
    return store.where == target.where
