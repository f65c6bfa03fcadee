"""Comparison of a step's results in repeated attempts from one state (rehearsals).

DDP reorders its buckets at the beginning of the second attempt, and the order of summation changes
bits. Gradients are therefore compared from the second attempt on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

import torch

from outlast.checkpoint.format import codec
from outlast.errors import PhaseError
from outlast.worker.script.carried_variables import ADVICE, differing_names
from outlast.worker.script.value_caches import WatchedCaches
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
