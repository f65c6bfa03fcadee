"""`outlast ckpt show`: origin and contents of a checkpoint, and the ranks' shards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from outlast.checkpoint.format.manifests import ITEM_BYTES, Manifest
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.cli.ckpt import ckpt_output
from outlast.cli.ckpt.target_argument import open_target
from outlast.cli.ckpt.tensor_tree import render_tree, size_bytes
from outlast.cli.output_stream import as_json, say
from outlast.errors import EXIT_DONE, MismatchError, UsageError
from outlast.text_formatting import duration, plural, size

_LINE_MAX = 200


def values_in(checkpoint: Checkpoint) -> dict[str, str]:
    """Yield each part of the shared value with its contents.

    Raises ModuleNotFoundError without torch, CorruptionError or StorageError as reading does.
    """
    from outlast.checkpoint.format import codec
    from outlast.checkpoint.load.checkpoint_reader import CheckpointReader

    try:
        shared = codec.decode(CheckpointReader(checkpoint).blob(0, "shared"))
    except MismatchError:
        return {}
    if not isinstance(shared, dict):
        return {"shared": _short(shared)}
    if "kinds" not in shared:
        return {str(name): _short(value) for name, value in shared.items()}
    parts = {name: _part(shared, name, kind) for name, kind in shared["kinds"].items()}
    parts |= {name: _short(value) for name, value in shared.get("imported", {}).items()}
    return parts


def _part(shared: Mapping[str, Any], name: str, kind: str) -> str:
    what = shared["classes"].get(name) or kind
    if name in shared["optimizers"]:
        groups = shared["optimizers"][name]["groups"]["value"]
        return f"{what}: " + "; ".join(map(_short, groups))
    for room in ("objects", "values"):
        if name in shared[room]:
            value = _short(shared[room][name]["value"])
            return value if room == "values" else f"{what}: {value}"
    return what


def _short(value: Any) -> str:
    """Return the repr of a value, shortened to one line."""
    if isinstance(value, dict):
        text = ", ".join(f"{key}={item!r}" for key, item in value.items())
    else:
        text = repr(value)
    line = " ".join(text.split())
    return line if len(line) <= _LINE_MAX else line[: _LINE_MAX - 3] + "..."


_RANKS_MAX = 16


class HeldTensorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, and the ranks whose shards hold parts of it."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    ranks: tuple[int, ...]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Shard of one rank.

    `tensor_bytes`: of its tensors, without values and padding; `frozen_bytes`: of frozen tensors,
    in a file that other checkpoints may share.
    """

    rank: int
    name: str
    size_bytes: int
    frozen_bytes: int
    tensor_bytes: int
    pieces: int
    blobs: dict[str, int]


class ShowReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `values` is None where torch, which decodes them, is missing."""

    where: str
    job: str
    step: int
    n: int
    attempt: str
    time_ns: int
    size_bytes: int
    origin: dict[str, str]
    tensors: dict[str, HeldTensorRow]
    shards: list[Shard]
    values: dict[str, str] | None


def show(target: str, *, step: int | None = None, tensors: str = "*", json: bool = False) -> int:
    """Show the origin and the contents of a checkpoint.

    Records are read and checked, shards are not.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    step
        The checkpoint of this step; the newest when left out.
    tensors
        A pattern of names (`model.layers.0.*`): these one by one, with the ranks that hold them.
    json
        One JSON object.
    """
    checkpoint = open_target(target).open(step)
    report = _shown(checkpoint, tensors)
    if json:
        as_json(report)
    elif tensors == "*":
        _print_all(checkpoint, report)
    else:
        _print_some(report)
    return EXIT_DONE


def _shown(checkpoint: Checkpoint, pattern: str) -> ShowReport:
    commit = checkpoint.commit
    ranks: dict[str, dict[int, None]] = {name: {} for name in checkpoint.tensors}
    for manifest in checkpoint.manifests:
        for piece in manifest.pieces:
            ranks[piece.name][manifest.rank] = None
    holders = {
        name: HeldTensorRow(
            dtype=tensor.dtype, shape=tensor.shape, size_bytes=size_bytes(tensor),
            ranks=tuple(ranks[name]),
        )
        for name, tensor in sorted(checkpoint.tensors.items())
        if fnmatchcase(name, pattern)
    }  # fmt: skip
    if not holders and pattern != "*":
        raise UsageError(
            f"{checkpoint.where}: none of its {plural(len(ranks), 'tensor')} is called {pattern!r}"
        )
    try:
        values = values_in(checkpoint)
    except ModuleNotFoundError:
        values = None
    return ShowReport(
        where=checkpoint.where, job=commit.job, step=commit.place.step, n=commit.place.n,
        attempt=commit.place.attempt, time_ns=commit.time_ns, size_bytes=commit.size_bytes,
        origin=commit.origin, tensors=holders, shards=list(map(_shard, checkpoint.manifests)),
        values=values,
    )  # fmt: skip


def _shard(manifest: Manifest) -> Shard:
    return Shard(
        rank=manifest.rank,
        name=manifest.shard,
        size_bytes=manifest.size_bytes,
        frozen_bytes=manifest.frozen_bytes,
        tensor_bytes=sum(
            Box(piece.start, piece.size).elements * ITEM_BYTES[manifest.tensors[piece.name].dtype]
            for piece in manifest.pieces
        ),
        pieces=len(manifest.pieces),
        blobs={blob.name: blob.size_bytes for blob in manifest.blobs},
    )


def _print_all(checkpoint: Checkpoint, shown: ShowReport) -> None:
    say(shown.where)
    about = ckpt_output.table("", "")
    about.show_header = False
    when = datetime.fromtimestamp(shown.time_ns / 1e9, tz=UTC).astimezone()
    age_s = max(0, time.time_ns() - shown.time_ns) / 1e9
    about.add_row("step", f"{shown.step} (n {shown.n}, attempt {shown.attempt})")
    about.add_row("job", shown.job or "(no name)")
    about.add_row("committed", f"{when:%Y-%m-%d %H:%M:%S %Z}, {duration(age_s)} ago")
    for name, value in shown.origin.items():
        about.add_row(name, value)
    about.add_row("shards", _balance(shown.shards))
    if frozen_bytes := sum(shard.frozen_bytes for shard in shown.shards):
        about.add_row("not trained", f"{size(frozen_bytes)} of them")
    if shown.values is None:
        about.add_row("state", "not shown: pip install 'outlast[run]' adds what decodes it")
    say(about)
    if shown.values:
        state = ckpt_output.table("state", "")
        for name, value in shown.values.items():
            state.add_row(name, value)
        say(state)
    total = size(sum(each.size_bytes for each in shown.tensors.values()))
    title = f"{plural(len(shown.tensors), 'tensor')}, {total}"
    say(render_tree(checkpoint.tensors, title))
    table = ckpt_output.table(
        "rank",
        "shard",
        "tensors",
        "pieces",
        "values",
        right=("rank", "shard", "tensors", "pieces", "values"),
    )
    for shard in shown.shards[:_RANKS_MAX]:
        table.add_row(
            str(shard.rank), size(shard.size_bytes), size(shard.tensor_bytes), str(shard.pieces),
            size(sum(shard.blobs.values())),
        )  # fmt: skip
    say(table)
    if rest := shown.shards[_RANKS_MAX:]:
        say(f"and {plural(len(rest), 'more rank')}")


def _balance(shards: list[Shard]) -> str:
    """Describe the balance of the bytes that each rank writes."""
    largest = max(shard.size_bytes for shard in shards)
    mean = sum(shard.size_bytes for shard in shards) / len(shards)
    text = f"{plural(len(shards), 'rank')}, {size(sum(shard.size_bytes for shard in shards))}"
    return f"{text}, the largest {largest / mean:.2f} of the mean" if mean else text


def _print_some(shown: ShowReport) -> None:
    table = ckpt_output.table("tensor", "dtype", "shape", "size", "ranks", right=("size",))
    for name, rows in shown.tensors.items():
        table.add_row(
            name, rows.dtype, " x ".join(map(str, rows.shape)), size(rows.size_bytes),
            ", ".join(map(str, rows.ranks)),
        )  # fmt: skip
    say(table)
