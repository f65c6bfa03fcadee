"""Which tensors go out or come in, and what they are called on the other side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outlast.checkpoint.record import Tensor
from outlast.errors import UsageError

OBJECT = "dcp.object/"  # in front of the names of objects that DCP saved

_SHOWN_MAX = 10


@dataclass(frozen=True)
class Naming:
    """Names here and names there.

    `select`: only names with one of these prefixes (none given: all), less those of `drop` (whole
    names). The first prefix of `strip` that fits is taken off, `add` is put in front, and `rename`
    (whole names as they would then be) has the last word.
    """

    select: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()
    add: str = ""
    rename: Mapping[str, str] = field(default_factory=dict[str, str])

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """Each selected name with what it becomes.

        Raises UsageError where nothing is selected or two names become one.
        """
        names = list(names)
        chosen = {name: self._renamed(name) for name in names if self._selects(name)}
        if not chosen:
            more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
            raise UsageError(
                f"no tensor has a name with the prefix {' or '.join(map(repr, self.select))};"
                f" there are {', '.join(_heads(names)) or 'none at all'}{more}; nothing was written"
            )
        taken: dict[str, str] = {}
        for name, other in chosen.items():
            if taken.setdefault(other, name) != name:
                raise UsageError(
                    f"{taken[other]} and {name} would both be called {other!r}; nothing was"
                    " written; select fewer, or rename one"
                )
        return chosen

    def _selects(self, name: str) -> bool:
        return name not in self.drop and (not self.select or name.startswith(self.select))

    def _renamed(self, name: str) -> str:
        prefix = next((prefix for prefix in self.strip if name.startswith(prefix)), "")
        name = self.add + name.removeprefix(prefix)
        return self.rename.get(name, name)


def divided(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's tensors by name, and the bytes of objects by the name that these had."""
    objects = {
        name.removeprefix(OBJECT): tensor
        for name, tensor in tensors.items()
        if name.startswith(OBJECT)
    }
    return {n: t for n, t in tensors.items() if not n.startswith(OBJECT)}, objects


def _heads(names: list[str]) -> list[str]:
    """Some of the names, of each first part one before a second."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(name.partition(".")[0], name)
    return [*first.values(), *(name for name in names if name not in first.values())][:_SHOWN_MAX]
