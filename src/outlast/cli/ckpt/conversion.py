"""`outlast ckpt import` and `outlast ckpt export`.

Only import, and DCP, need torch: each command imports its own readers and writers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from outlast import quantities
from outlast.checkpoint.interop.foreign_layouts import TensorNaming
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.cli.ckpt.target_argument import check_room, open_destination, open_target
from outlast.cli.output_stream import echo, print_json
from outlast.errors import EXIT_DONE, StorageError, UsageError
from outlast.text_formatting import plural, size


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
