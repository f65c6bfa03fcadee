"""`outlast ckpt show`: origin and contents of a checkpoint, and the ranks' shards."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import msgspec
from rich.text import Text
from rich.tree import Tree

from outlast.checkpoint.format.manifests import ITEM_BYTES, Manifest, Tensor
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.cli.ckpt.target_argument import open_target
from outlast.cli.output_stream import echo, print_json, visible
from outlast.errors import EXIT_DONE, MismatchError, UsageError
from outlast.terminal_tables import layout_grid, listing, number_column, text_column
from outlast.text_formatting import duration, plural, size

_IN_LINE_MAX = 6


@dataclass
class Branch:
    """Tensors with a common prefix; `tensor`: the one with exactly this name."""

    tensor: Tensor | None = None
    below: dict[str, Branch] = field(default_factory=dict[str, "Branch"])

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of this branch and of all below it, depth first."""
        if self.tensor:
            yield self.tensor
        for branch in self.below.values():
            yield from branch.tensors


def size_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def make_tree(tensors: Mapping[str, Tensor]) -> Branch:
    """Return the tree of dotted names, sorted, so that it does not depend on the writing ranks."""
    root = Branch()
    for name, tensor in sorted(tensors.items()):
        branch = root
        for part in name.split("."):
            branch = branch.below.setdefault(part, Branch())
        branch.tensor = tensor
    return root


def render_tree(tensors: Mapping[str, Tensor], title: str) -> Tree:
    """Render the tree for a terminal, with equal neighbours folded into one line."""
    tree = Tree(Text(title), guide_style="bright_black")
    _draw(make_tree(tensors), tree)
    return tree


def _draw(branch: Branch, tree: Tree) -> None:
    for label, alike in _folded(branch.below.items()):
        inner, path = alike[0], label
        while inner.tensor is None and len(inner.below) == 1:  # one line a.b.c instead of three
            ((part, inner),) = inner.below.items()
            path = f"{path}.{part}"
        total = size(sum(size_bytes(tensor) for each in alike for tensor in each.tensors))
        in_line = _in_line(inner)
        count = sum(1 for each in alike for _ in each.tensors)
        path = visible(path)
        text = Text(f"{path}  {visible(in_line) or plural(count, 'tensor')}, {total}")
        text.stylize("bold", 0, len(path))
        node = tree.add(text)
        if not in_line:
            _draw(inner, node)


def _in_line(branch: Branch) -> str:
    """Describe a branch that holds a few tensors and no branch; return "" for others."""
    if not branch.below and branch.tensor:
        return _describe(branch.tensor)
    if branch.tensor or len(branch.below) > _IN_LINE_MAX:
        return ""
    names: dict[str, list[str]] = {}
    for name, each in branch.below.items():
        if each.below or each.tensor is None:
            return ""
        names.setdefault(_describe(each.tensor), []).append(name)
    return "; ".join(f"{', '.join(alike)} {text}" for text, alike in names.items())


def _folded(below: Iterable[tuple[str, Branch]]) -> Iterator[tuple[str, list[Branch]]]:
    """Fold neighbours that differ only in a number of their name."""
    ordered = sorted(below, key=lambda item: int(item[0]) if item[0].isdecimal() else -1)
    for (numbered, _), group in groupby(
        ordered,
        key=lambda item: (item[0].isdecimal(), _shape(item[1]) if item[0].isdecimal() else item[0]),
    ):
        members = list(group)
        first, last = members[0][0], members[-1][0]
        several = numbered and len(members) > 1
        label = f"{first} to {last} ({len(members)} alike)" if several else first
        yield label, [branch for _, branch in members]


def _shape(branch: Branch) -> object:
    """Return a key that is equal for branches with the same contents under other numbers."""
    return branch.tensor, tuple((name, _shape(each)) for name, each in branch.below.items())


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {' x '.join(map(str, tensor.shape))}".rstrip()


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

    Reads and checks the records, not the shards.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    step
        Step of the checkpoint (default: the newest).
    tensors
        List only tensors whose names match this pattern, for example `model.layers.0.*`, with the
        ranks that hold them.
    json
        Print one JSON object.
    """
    checkpoint = open_target(target).open(step)
    report = _shown(checkpoint, tensors)
    if json:
        print_json(report)
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
            dtype=tensor.dtype,
            shape=tensor.shape,
            size_bytes=size_bytes(tensor),
            ranks=tuple(ranks[name]),
        )
        for name, tensor in sorted(checkpoint.tensors.items())
        if fnmatchcase(name, pattern)
    }
    if not holders and pattern != "*":
        raise UsageError(
            f"{checkpoint.where}: none of its {plural(len(ranks), 'tensor')} matches {pattern!r}"
        )
    try:
        values = values_in(checkpoint)
    except ModuleNotFoundError:
        values = None
    return ShowReport(
        where=checkpoint.where,
        job=commit.job,
        step=commit.place.step,
        n=commit.place.n,
        attempt=commit.place.attempt,
        time_ns=commit.time_ns,
        size_bytes=commit.size_bytes,
        origin=commit.origin,
        tensors=holders,
        shards=list(map(_shard, checkpoint.manifests)),
        values=values,
    )


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
    echo(shown.where)
    about = layout_grid(text_column(), text_column())
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
        about.add_row("state", "not shown: pip install 'outlast[run]' adds the decoder")
    echo(about)
    if shown.values:
        state = listing(text_column("state"), text_column())
        for name, value in shown.values.items():
            state.add_row(name, value)
        echo(state)
    total = size(sum(tensor.size_bytes for tensor in shown.tensors.values()))
    title = f"{plural(len(shown.tensors), 'tensor')}, {total}"
    echo(render_tree(checkpoint.tensors, title))
    figures = ("rank", "shard", "tensors", "pieces", "values")
    shards = listing(*map(number_column, figures))
    for shard in shown.shards[:_RANKS_MAX]:
        shards.add_row(
            str(shard.rank),
            size(shard.size_bytes),
            size(shard.tensor_bytes),
            str(shard.pieces),
            size(sum(shard.blobs.values())),
        )
    echo(shards)
    if rest := shown.shards[_RANKS_MAX:]:
        echo(f"and {plural(len(rest), 'more rank')}")


def _balance(shards: list[Shard]) -> str:
    """Describe the balance of the bytes that each rank writes."""
    largest = max(shard.size_bytes for shard in shards)
    mean = sum(shard.size_bytes for shard in shards) / len(shards)
    text = f"{plural(len(shards), 'rank')}, {size(sum(shard.size_bytes for shard in shards))}"
    return f"{text}, the largest {largest / mean:.2f} of the mean" if mean else text


def _print_some(shown: ShowReport) -> None:
    attributes = map(text_column, ("tensor", "dtype", "shape"))
    tensors = listing(*attributes, number_column("size"), text_column("ranks"))
    for name, rows in shown.tensors.items():
        shape = " x ".join(map(str, rows.shape))
        ranks = ", ".join(map(str, rows.ranks))
        tensors.add_row(name, rows.dtype, shape, size(rows.size_bytes), ranks)
    echo(tensors)
