"""`outlast ckpt import` and `outlast ckpt export`.

Only import, and DCP, need torch: each command imports its own readers and writers.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from outlast import quantities
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.interop.foreign_layouts import TensorNaming
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.checkpoint_copy import copy_checkpoint
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
from outlast.launch.terms.run_identity import RunningJob
from outlast.text_formatting import duration, plural, size


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class NameFlags:
    """Flags that may be repeated."""

    prefix: tuple[str, ...] = ()
    "Select tensors whose names begin with this prefix, and remove it: `--prefix model.`."
    " Repeatable."
    strip: tuple[str, ...] = ()
    "Remove this prefix from names that have it, and keep all others. Repeatable."
    drop: tuple[str, ...] = ()
    "Exclude this tensor. Repeatable."
    add: str = ""
    "Prefix for all names."
    rename: tuple[str, ...] = ()
    "Rename one tensor, after the flags above: `--rename old=new`. Repeatable."

    def naming(self) -> TensorNaming:
        """Return the selection and renames of tensors.

        Raises UsageError for a `--rename` that is not a pair.
        """
        return TensorNaming(
            select=self.prefix,
            drop=self.drop,
            strip=(*self.prefix, *self.strip),
            add=self.add,
            rename=dict(pair("--rename", each) for each in self.rename),
        )


def pair(flag: str, text: str) -> tuple[str, str]:
    """Return two names, as in `old=new`. Raises UsageError naming the flag."""
    old, _, new = text.partition("=")
    if not old or not new:
        raise UsageError(f"{flag} {text}: give two names, as in {flag} old=new")
    return old, new


Form = Literal["auto", "dcp", "safetensors"]


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `skipped`: entries that were not imported, by name, with the reason."""

    directory: str
    tensors: int
    objects: int
    skipped: dict[str, str]


def import_(
    source: Path,
    dest: str,
    *,
    form: Annotated[Form, Parameter(name="--format")] = "auto",
    step: int = 0,
    job: str = "",
    names: NameFlags = NameFlags(),
    json: bool = False,
) -> int:
    """Import a checkpoint from DCP or safetensors.

    Writes a new checkpoint. Nothing is unpickled: objects other than tensors and
    plain values are skipped and listed. A failed import leaves no files.

    Parameters
    ----------
    source
        Directory written by torch.distributed.checkpoint (DCP), directory of safetensors, or a
        .safetensors file.
    dest
        Directory of checkpoints, created if missing, or a URL (s3://...).
    form
        Format of the source; auto detects it.
    step
        Step number of the new checkpoint.
    job
        Job name of the new checkpoint, for a Checkpointer with the argument job.
    json
        Print one JSON object.
    """
    if step < 0:
        raise UsageError(f"--step {step}: must be 0 or more")
    if (Path(dest) / "run.json").is_file():
        raise UsageError(
            f"{dest} is a run directory, and a run cannot resume from an imported checkpoint;"
            " nothing was written; give another directory"
        )
    naming, chosen = names.naming(), _looked(source, form)
    store = open_destination(dest)
    check_room(store, _size_bytes(source))
    if chosen == "safetensors":
        from outlast.checkpoint.interop.safetensors_files import read_safetensors

        imported = read_safetensors(source, store, naming, step=step, job=job)
    else:
        from outlast.checkpoint.interop.dcp_conversion import read_dcp

        imported = read_dcp(source, store, naming, step=step, job=job)
    where = f"{store.where}/{imported.place.directory}"
    brought = ImportReport(
        directory=where,
        tensors=len(imported.tensors),
        objects=len(imported.objects),
        skipped=dict(imported.skipped),
    )
    if json:
        print_json(brought)
        return EXIT_DONE
    objects = f", {plural(brought.objects, 'value')}" if brought.objects else ""
    echo(f"{where}: {plural(brought.tensors, 'tensor')}{objects}")
    for name, why in brought.skipped.items():
        echo(f"  skipped: {name}: {why}")
    return EXIT_DONE


def _looked(source: Path, form: Form) -> Form:
    """Return the format of `source`, detected where no flag names it. Raises UsageError."""
    if not source.exists():
        raise UsageError(f"{source} does not exist; nothing was written")
    if form != "auto":
        return form
    if (source / ".metadata").is_file():
        return "dcp"
    files = [source] if source.is_file() else list(source.glob("*.safetensors"))
    if files and all(path.suffix == ".safetensors" for path in files):
        return "safetensors"
    raise UsageError(
        f"{source} is neither a directory of torch.distributed.checkpoint (it has no .metadata)"
        " nor safetensors; nothing was written; pass --format to skip this detection"
    )


def _size_bytes(source: Path) -> int:
    try:
        files = [source] if source.is_file() else [p for p in source.iterdir() if p.is_file()]
        return sum(path.stat().st_size for path in files)
    except OSError as error:
        raise StorageError(f"{source}: could not be read: {error.strerror or error}") from error


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`."""

    source: str
    directory: str
    files: dict[str, int]


def export(
    target: str,
    dest: Path,
    *,
    form: Annotated[Literal["dcp", "safetensors"], Parameter(name="--format")],
    step: int | None = None,
    names: NameFlags = NameFlags(),
    max_shard_size: str = "5GB",
    tied: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    json: bool = False,
) -> int:
    """Export a checkpoint to DCP or safetensors.

    For torch.distributed.checkpoint or transformers. Every byte is verified. DEST
    appears when it is complete; a failed export leaves no files.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    dest
        New directory; it must not exist.
    form
        dcp: all tensors and plain values, for dcp.load and torchtitan. safetensors: tensors, for
        transformers, as model.safetensors or several files with an index.
    step
        Step of the checkpoint (default: the newest).
    max_shard_size
        For safetensors: size limit of one file.
    tied
        For safetensors: exclude a tensor that is tied to another one: `--tied
        model.lm_head.weight=model.embed.weight`. Their values must be equal. Repeatable.
    json
        Print one JSON object.
    """
    shard_bytes = quantities.size(f"--max-shard-size {max_shard_size}", max_shard_size)
    if form == "dcp" and tied:
        raise UsageError("--tied is for safetensors; DCP keeps both names")
    naming, ties = names.naming(), dict(pair("--tied", each) for each in tied)
    checkpoint = open_target(target).open(step)
    from outlast.checkpoint.load.checkpoint_reader import CheckpointReader  # needs NumPy

    reader = CheckpointReader(checkpoint)
    if form == "safetensors":
        from outlast.checkpoint.interop.safetensors_files import write_safetensors

        write_safetensors(reader, dest, naming, shard_bytes=shard_bytes, tied=ties)
    else:
        from outlast.checkpoint.interop.dcp_conversion import write_dcp

        write_dcp(reader, dest, naming)
    files = {path.name: path.stat().st_size for path in sorted(dest.iterdir())}
    done = ExportReport(source=checkpoint.where, directory=str(dest), files=files)
    if json:
        print_json(done)
    else:
        total = size(sum(files.values()))
        echo(f"{dest}: {plural(len(files), 'file')}, {total}, from {checkpoint.where}")
    return EXIT_DONE


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
            _print_copy(copied[-1], target)
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
                    f" {job or '(no name)'}'s, from which it cannot resume; nothing was"
                    " copied; name another directory"
                )


def _copied(store: Store, place: SavePoint, target: Store, rate: int | None) -> CopyReport:
    began = time.monotonic()
    with byte_progress(f"step {place.step}") as report_progress:
        copied = copy_checkpoint(
            store, place, target, on_progress=report_progress, limit_bytes_per_s=rate
        )
    return CopyReport(
        directory=place.directory,
        sent_bytes=copied.sent_bytes,
        present_bytes=copied.present_bytes,
        seconds=time.monotonic() - began,
    )


def _print_copy(done: CopyReport, target: Store) -> None:
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
