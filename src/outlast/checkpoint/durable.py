"""What a durable target is to get of a run's checkpoints: as it is asked for, and as a choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from outlast.checkpoint.record import Place
from outlast.checkpoint.retention import Keep, Known, choose
from outlast.checkpoint.retention import parse as parse_keep
from outlast.checkpoint.storage import Store
from outlast.errors import ConfigError
from outlast.quantities import SECONDS, measured, rate

_OPTIONS = re.compile(r"(?<!,)\s+(?=[A-Za-z_-]+=)")  # keep=last=2, every=1000 is one option
_EXAMPLE = "s3://bucket/run every=6h keep=last=2,every=1000 rate=200MB/s"


class Every(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of each span of so many steps, or else seconds of Unix time."""

    steps: int = 0
    seconds: float = 0.0

    def span(self, known: Known) -> int:
        """The number of the span that it lies in."""
        if self.steps:
            return known.place.step // self.steps
        return int(known.time_ns / 1e9 // self.seconds)


class Durable(msgspec.Struct, frozen=True, kw_only=True):
    """A target as it was asked for. `every`: None for each checkpoint; `keep`: None for the run's
    own rules; `rate_bytes_per_s`: to and from it, None for as fast as it goes."""

    address: str
    every: Every | None = None
    keep: Keep | None = None
    rate_bytes_per_s: int | None = None


class Target(NamedTuple):
    """A durable target that was opened."""

    asked: Durable
    store: Store


def parse(text: str) -> Durable:
    """A target as it stands on a command line: `s3://bucket/run every=6h keep=last=2 rate=1GB/s`.

    Raises ConfigError, which names the part that is wrong.
    """
    address, *options = _OPTIONS.split(text.strip())
    said: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("every", "keep", "rate"):
            raise ConfigError(
                f"cannot read {option!r} of {address}: known are every, keep and rate, as in"
                f" {_EXAMPLE!r}"
            )
        if name in said:
            raise ConfigError(f"{name} is said twice of {address}")
        said[name] = value
    if not address or re.match(r"(every|keep|rate)=", address):
        raise ConfigError(f"{text!r} names no place; it comes first, as in {_EXAMPLE!r}")
    return Durable(
        address=address,
        every=_every(said["every"]) if "every" in said else None,
        keep=parse_keep(said["keep"]) if "keep" in said else None,
        rate_bytes_per_s=rate(f"rate={said['rate']}", said["rate"]) if "rate" in said else None,
    )


def _every(text: str) -> Every:
    what = f"every={text}"
    every = (
        Every(steps=int(text))
        if re.fullmatch(r"[0-9]{1,18}", text)
        else Every(seconds=measured(SECONDS, what, text, "every=6h, or a number of steps"))
    )
    if not every.steps and every.seconds < 1:
        raise ConfigError(f"{what!r} is no interval: say at least 1 step or 1s")
    return every


def wanted(
    offered: Sequence[Known],
    there: Sequence[Known],
    keep: Keep | None,
    every: Every | None,
    now_ns: int,
    *,
    last: bool = False,
) -> list[Place]:
    """What a target is to get of what it lacks, newest first: what is due, and would stay there.

    `last`: the newest that is offered is due whatever the interval says.
    """
    due = list(offered) if every is None else _due(offered, there, every, keep)
    if last and offered and (newest := max(offered, key=_order)) not in due:
        due.append(newest)
    after = [known._replace(verified=True) for known in (*due, *there)]
    places = {known.place for known in due}
    chosen = choose(after, keep or Keep(last=len(after) or 1), now_ns)
    return [verdict.place for verdict in chosen if verdict.keep and verdict.place in places]


def _due(
    offered: Sequence[Known], there: Sequence[Known], every: Every, keep: Keep | None
) -> list[Known]:
    """The first of each span of which nothing is there, and milestones.

    A span is what lies side by side in the order of positions: a job that goes back, or a clock
    that was set back, begins a new one, and keeps nothing from being carried.
    """
    covered = {known.place for known in there}
    milestones = keep.milestones if keep else frozenset[int]()
    due: list[Known] = []
    for _, group in groupby(sorted((*offered, *there), key=_order), every.span):
        members = list(group)
        if covered.isdisjoint(known.place for known in members):
            due.append(members[0])
            members = members[1:]
        due += [
            known
            for known in members
            if known.place.step in milestones and known.place not in covered
        ]
    return due


def _order(known: Known) -> tuple[tuple[int, int, int], int]:
    return known.place.position, known.time_ns
