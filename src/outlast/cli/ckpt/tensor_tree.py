"""Tensors as a tree of their names, with equal layers folded into one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text
from rich.tree import Tree

from outlast.checkpoint.format.manifests import ITEM_BYTES, Tensor
from outlast.cli.output_stream import visible
from outlast.text_formatting import plural, size

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
        while inner.tensor is None and len(inner.below) == 1:  # a.b.c, and not a line for each
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
