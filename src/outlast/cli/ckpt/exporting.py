"""`outlast ckpt export`: export of a checkpoint to other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from outlast import quantities
from outlast.checkpoint.interop.safetensors_export import write_safetensors
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.cli.ckpt.name_flags import NameFlags, pair
from outlast.cli.ckpt.target_argument import open_target
from outlast.cli.output_stream import as_json, say
from outlast.errors import EXIT_DONE, UsageError
from outlast.text_formatting import plural, size


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
    names: NameFlags = NameFlags(),  # noqa: B008 - frozen
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
        write_safetensors(reader, dest, naming, shard_bytes=shard_bytes, tied=ties)
    else:
        from outlast.checkpoint.interop.dcp_export import write_dcp  # starts much of torch

        write_dcp(reader, dest, naming)
    files = {path.name: path.stat().st_size for path in sorted(dest.iterdir())}
    done = ExportReport(source=checkpoint.where, directory=str(dest), files=files)
    if json:
        as_json(done)
    else:
        total = size(sum(files.values()))
        say(f"{dest}: {plural(len(files), 'file')}, {total}, from {checkpoint.where}")
    return EXIT_DONE
