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
    "Only names that begin so, and without it: `--prefix model.`"
    strip: tuple[str, ...] = ()
    "Take this off names that begin so; the others come along as they are."
    drop: tuple[str, ...] = ()
    "Leave this name out."
    add: str = ""
    "Put this in front of every name."
    rename: tuple[str, ...] = ()
    "Call one otherwise, after all that: `--rename old=new`."

    def naming(self) -> TensorNaming:
        """Return the selection and renames of tensors.

        Raises UsageError for a `--rename` that is no pair.
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

    It becomes a new checkpoint. Nothing is unpickled: objects other than
    tensors and plain values are left out, and listed. Nothing is left of an
    import that failed.

    Parameters
    ----------
    source
        A directory of torch.distributed.checkpoint, or of safetensors, or a .safetensors file.
    dest
        A directory of checkpoints, made if it is not there, or a URL (s3://...).
    form
        What it is; auto looks.
    step
        The step that the checkpoint counts as.
    job
        The job that it belongs to, for a Checkpointer that has one.
    json
        One JSON object.
    """
    if step < 0:
        raise UsageError(f"--step {step}: a count of steps is not negative")
    if (Path(dest) / "run.json").is_file():
        raise UsageError(
            f"{dest} is a run's directory, which resumes from its newest checkpoint, and cannot"
            " from one that another program wrote; nothing was written; name another directory"
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
        echo(f"  left out: {name}: {why}")
    return EXIT_DONE


def _looked(source: Path, form: Form) -> Form:
    """Return the format of `source`, detected where no flag names it. Raises UsageError."""
    if not source.exists():
        raise UsageError(f"{source} is not there; nothing was written")
    if form != "auto":
        return form
    if (source / ".metadata").is_file():
        return "dcp"
    found = [source] if source.is_file() else list(source.glob("*.safetensors"))
    if found and all(path.suffix == ".safetensors" for path in found):
        return "safetensors"
    raise UsageError(
        f"{source} is neither a directory of torch.distributed.checkpoint (it has no .metadata) nor"
        " safetensors; nothing was written; give --format if it is"
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

    As torch.distributed.checkpoint or transformers load it. Every byte is
    verified as it is read. DEST appears whole, or not at all.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    dest
        A directory that is not there yet.
    form
        dcp: all tensors and plain values, for dcp.load and torchtitan. safetensors: tensors, as
        model.safetensors or several files with an index, for transformers.
    step
        The checkpoint of this step; the newest when left out.
    max_shard_size
        Of safetensors: the most bytes of tensors in one file.
    tied
        Of safetensors: leave out a name that shares its values with another, which is checked:
        `--tied model.lm_head.weight=model.embed.weight`.
    json
        One JSON object.
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
