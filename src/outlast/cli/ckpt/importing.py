"""`outlast ckpt import`: import from other formats, without running code in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from outlast.checkpoint.interop.safetensors_import import read_safetensors
from outlast.cli.ckpt.name_flags import NameFlags
from outlast.cli.ckpt.target_argument import check_room, open_destination
from outlast.cli.output_stream import as_json, say
from outlast.errors import EXIT_DONE, StorageError, UsageError
from outlast.text_formatting import plural

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
    names: NameFlags = NameFlags(),  # noqa: B008 - frozen
    json: bool = False,
) -> int:
    """Import a checkpoint from DCP or safetensors.

    Into a checkpoint of its own. Nothing in them is unpickled: what is more
    than tensors and plain values is left out, and named. Nothing is left of an
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
        imported = read_safetensors(source, store, naming, step=step, job=job)
    else:
        from outlast.checkpoint.interop.dcp_import import read_dcp  # needs torch, for its values

        imported = read_dcp(source, store, naming, step=step, job=job)
    where = f"{store.where}/{imported.place.directory}"
    brought = ImportReport(
        directory=where,
        tensors=len(imported.tensors),
        objects=len(imported.objects),
        skipped=dict(imported.skipped),
    )
    if json:
        as_json(brought)
        return EXIT_DONE
    objects = f", {plural(brought.objects, 'value')}" if brought.objects else ""
    say(f"{where}: {plural(brought.tensors, 'tensor')}{objects}")
    for name, why in brought.skipped.items():
        say(f"  left out: {name}: {why}")
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
        " safetensors; nothing was written; say --format if it is"
    )


def _size_bytes(source: Path) -> int:
    try:
        files = [source] if source.is_file() else [p for p in source.iterdir() if p.is_file()]
        return sum(path.stat().st_size for path in files)
    except OSError as error:
        raise StorageError(f"{source}: could not be read: {error.strerror or error}") from error
