"""Comparison of a step's results in repeated attempts from one state (rehearsals).

DDP reorders its buckets at the beginning of the second attempt, and the order of summation changes
bits. Gradients are therefore compared from the second attempt on.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch

from outlast.checkpoint.format import codec
from outlast.errors import PhaseError
from outlast.worker.script.carried_variables import ADVICE, differing_names
from outlast.worker.script.reachable_values import ValueSpot
from outlast.worker.script.value_caches import WatchedCaches
from outlast.worker.script.value_paths import (
    Path,
    Step,
    attributes_stored_by,
    is_own_class,
    text,
)
from outlast.worker.state.tensor_digests import local_shard

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDING = 1e-3  # largest relative change of a sum by its order of summation

DRAWS = (
    "draw batches in the loop (for batch in session.batches(loader): session.run(step, batch)), or"
    " keep an index in session.state"
)


class Repetition(NamedTuple):
    """Results of one attempt when it reached its gate."""

    generation: int
    choices: bytes | None  # generators, own objects, variables; None: some are missing
    reports: dict[str, bytes]
    gradients: dict[str, tuple[int, float]]


class RepetitionDifference(NamedTuple):
    """A difference between two attempts. `is_rounding`: on a device and within rounding."""

    what: str
    is_rounding: bool = False


def look(
    generation: int,
    choices: bytes,
    reports: Mapping[str, float],
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> Repetition:
    """Return digests of this attempt's results."""
    named = [(name, _local(p.grad)) for name, p in parameters if p.grad is not None]
    sums = [_bits(gradient) for _, gradient in named]
    sizes = [_size(gradient) for _, gradient in named]
    return Repetition(
        generation,
        choices,
        {name: struct.pack("<d", value) for name, value in reports.items()},
        {
            name: (int(bits), float(size))
            for (name, _), bits, size in zip(named, _fetched(sums), _fetched(sizes), strict=True)
        },
    )


class RepetitionCheck:
    """Comparison of the attempts at each function's first step."""

    def __init__(self) -> None:
        self._last: dict[str, Repetition] = {}
        self._count: dict[str, int] = {}
        self._before: dict[str, Repetition] = {}  # the attempts that are being repeated

    def must_repeat(
        self, key: str, caches: WatchedCaches, look_at: Callable[[], Repetition]
    ) -> bool:
        """Return whether this attempt must be repeated before it counts, since a cache has grown.
        Refuse the cache if the repeated attempt differs from the previous one."""
        if caches.repeated and key in self._before:
            names = caches.repeated
            difference = _difference(self._before.pop(key), look_at(), gradients=True)
            if difference and not difference.is_rounding:
                caches.refuse_repeated(difference.what)
            caches.trust(names)
        if grown := caches.grown():
            now = look_at()
            self._before[key] = now._replace(choices=None) if caches.renew() else now
            caches.repeated = grown
        return bool(grown)

    def widened(self, key: str) -> None:
        """Skip generators and variables at the next comparison: more of them are recorded now."""
        if (last := self._last.get(key)) is not None:
            self._last[key] = last._replace(choices=None)

    def awaits(self, key: str) -> bool:
        """Return whether the function was rehearsed but its first step not yet compared."""
        return key in self._last

    def rehearsed(self, key: str, now: Repetition) -> RepetitionDifference | None:
        """Record a rehearsal; return its difference from the previous one, if any."""
        before, count = self._last.get(key), self._count.get(key, 0)
        self._last[key], self._count[key] = now, count + 1
        return _difference(before, now, gradients=count >= 2) if before is not None else None

    def first_step(self, key: str, now: Repetition) -> RepetitionDifference | None:
        """Return the difference of the attempt that will count from the last rehearsal, if any.
        Later attempts are not compared, unless the function is rehearsed again."""
        return _difference(self._last.pop(key), now, gradients=self._count[key] >= 2)


def is_first_bound(
    path: Path, before: Mapping[Path, ValueSpot], now: Mapping[Path, ValueSpot]
) -> bool:
    """Return whether a phase has bound a plain value to a new name of an object or a module:
    `self.count += 1` where the class has the 0, or `if not hasattr(self, "count")`."""
    if path in before or not now[path].is_plain or path[-1][0] not in ("attr", "name"):
        return False
    if len(path) == 2:
        return path[0][0] == "module"
    owner, same = before.get(path[:-1]), now.get(path[:-1])
    return owner is not None and same is not None and owner.value is same.value


class MadeObjects:
    """Objects that the first attempts at a phase make: `if not hasattr(self, "meter"): self.meter =
    Meter()`. Undoing an attempt leaves them, and what they were when they were made is unknown."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._first: dict[str, frozenset[Path]] = {}  # by phase: paths of the first attempt

    def check(self, key: str, before: Mapping[Path, ValueSpot], now: dict[Path, ValueSpot]) -> None:
        """Refuse, behind the second attempt, the objects that it has changed or that methods of
        their classes change. What a `defaultdict` made is removed: it makes it again."""
        for path in [path for path in now if path not in before]:
            _remove(path, before, now)
        if key not in self._first:
            self._first[key] = frozenset(now.keys() - before.keys())
            return
        first = self._first[key]
        for path in sorted(first & before.keys() & now.keys(), key=str):
            owner, same = before.get(path[:-1]), now.get(path[:-1])
            old, new = before[path], now[path]
            is_kept = new.is_plain or old.value is new.value
            if owner is None or same is None or owner.value is not same.value or not is_kept:
                continue  # each attempt makes another one
            is_inside = path[:-1] in first
            if old.look != new.look or (is_inside and _stores(owner.value, path[-1])):
                place, name = text(path[:-1] if is_inside else path), key.partition(":")[0]
                self._refusals.refuse(
                    f"{name} makes {place} in its first attempt, and can change {text(path)}",
                    f"make {place} before the first phase, in the same way on each rank",
                )


def _remove(path: Path, before: Mapping[Path, ValueSpot], now: dict[Path, ValueSpot]) -> None:
    owner = before.get(path[:-1])
    container = owner.value if owner is not None and path[-1][0] == "key" else None
    if isinstance(container, defaultdict) and container.default_factory and path in now:
        container.pop(path[-1][1], None)
        for inner in [each for each in now if each[: len(path)] == path]:
            del now[inner]


def _stores(owner: Any, step: Step) -> bool:
    of_own_class = step[0] == "attr" and is_own_class(type(owner))
    return of_own_class and step[1] in attributes_stored_by(type(owner))


def _other_choices(before: bytes, now: bytes | None) -> str:
    """Return what an attempt has drawn or changed otherwise than the one before."""
    if now is not None:
        old, new = (codec.decode(each)["random"] for each in (before, now))
        if codec.encode(old) == codec.encode(new):
            return f"changed {differing_names(before, now)} to another value"
    return "drew a different number of random numbers"


def _difference(
    before: Repetition, now: Repetition, *, gradients: bool
) -> RepetitionDifference | None:
    if before.generation != now.generation:
        gradients = False  # DDP may have rebuilt its buckets: only draws compare
    for name, value in before.reports.items():
        if gradients and now.reports.get(name, value) != value:
            old, new = struct.unpack("<d", value)[0], struct.unpack("<d", now.reports[name])[0]
            return RepetitionDifference(f"reported {name}={old!r} and then {new!r}")
    if before.choices is not None and before.choices != now.choices:
        return RepetitionDifference(_other_choices(before.choices, now.choices))
    if not gradients or before.gradients == now.gradients:
        return None
    differing = [
        name
        for name in {**before.gradients, **now.gradients}
        if before.gradients.get(name) != now.gradients.get(name)
    ]
    more = f" (and of {len(differing) - 1} more)" if len(differing) > 1 else ""
    return RepetitionDifference(
        f"computed a different gradient of {differing[0]}{more}",
        all(_is_close(before.gradients.get(n), now.gradients.get(n)) for n in differing),
    )


def _is_close(a: tuple[int, float] | None, b: tuple[int, float] | None) -> bool:
    if a is None or b is None or not a[1]:  # sizes are taken on devices only
        return False
    return abs(a[1] - b[1]) <= _ROUNDING * max(a[1], b[1])


def _local(gradient: torch.Tensor) -> torch.Tensor:
    gradient = local_shard(gradient.detach())
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return gradient.contiguous().view(-1)


def _bits(gradient: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def _size(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.device.type == "cpu":
        return torch.zeros((), dtype=torch.float64)
    return gradient.abs().sum(dtype=torch.float64)


def _fetched(sums: list[torch.Tensor]) -> list[float | int]:
    return torch.stack([each.cpu() for each in sums]).tolist() if sums else []


Unrepeatable = Literal["stop", "warn", ""]  # "": no launcher, hence no redos


class WriteNote(Protocol):
    """Function that adds a note to the run's events."""

    def __call__(self, text: str, *, warning: bool = True) -> None:
        """Write `text`; only warnings are displayed."""


class Refusals:
    """Refuses by name, or reports once (`on_unrepeatable`), what cannot be repeated exactly."""

    def __init__(self, on_unrepeatable: Unrepeatable, note: WriteNote) -> None:
        self._stop, self._alone = on_unrepeatable == "stop", not on_unrepeatable
        self._note = note
        self._reported: set[str] = set()

    def check_hooks(self, module: str) -> None:
        """Refuse a hook that code between phases has registered on a protected `module`."""
        if module and not self._alone:
            self.refuse(
                f"code between phases has registered a hook on the protected module {module}",
                "register hooks before the first phase",
            )

    def refuse(self, what: str, advice: str = ADVICE) -> None:
        """Raise PhaseError; with `--on-unrepeatable warn`, report it once instead."""
        text = f"{what}: a redo or a replacement worker would continue with another value; {advice}"
        if self._stop:
            raise PhaseError(f"{text}; or continue with a warning: --on-unrepeatable warn")
        self._tell_once(text)

    def _tell_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._note(text)
