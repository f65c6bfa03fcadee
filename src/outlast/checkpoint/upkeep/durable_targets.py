"""Durable targets: rules, choice of checkpoints, opening and checks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.retention_policy import Keep, KnownCheckpoint, apply_policy
from outlast.checkpoint.upkeep.retention_policy import parse_policy as parse_keep
from outlast.errors import ConfigError, RefusedError, StorageError
from outlast.quantities import SECONDS, measured, rate

_OPTIONS = re.compile(r"(?<!,)\s+(?=[A-Za-z_-]+=)")  # keep=last=2, every=1000 is one option
_EXAMPLE = "s3://bucket/run every=6h keep=last=2,every=1000 rate=200MB/s"


class SaveInterval(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of each span of a number of steps, or else of seconds of Unix time."""

    steps: int = 0
    seconds: float = 0.0

    def span(self, known: KnownCheckpoint) -> int:
        """Return the number of the span that contains a checkpoint."""
        if self.steps:
            return known.place.step // self.steps
        return int(known.time_ns / 1e9 // self.seconds)


class DurableRule(msgspec.Struct, frozen=True, kw_only=True):
    """A target with its options.

    `every`: None for each checkpoint; `keep`: None for the run's own policy; `rate_bytes_per_s`: to
    and from it, None for no limit.
    """

    address: str
    every: SaveInterval | None = None
    keep: Keep | None = None
    rate_bytes_per_s: int | None = None


class DurableTarget(NamedTuple):
    """A durable target that was opened, with its rule."""

    rule: DurableRule
    store: Store


def parse_durable(text: str) -> DurableRule:
    """Parse a target of the command line: `s3://bucket/run every=6h keep=last=2 rate=1GB/s`.

    Raises ConfigError, which names the part that is wrong.
    """
    address, *options = _OPTIONS.split(text.strip())
    values: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("every", "keep", "rate"):
            raise ConfigError(
                f"cannot read {option!r} of {address}: known are every, keep and rate, as in"
                f" {_EXAMPLE!r}"
            )
        if name in values:
            raise ConfigError(f"{name} is given twice for {address}")
        values[name] = value
    if not address or re.match(r"(every|keep|rate)=", address):
        raise ConfigError(f"{text!r} names no target; it comes first, as in {_EXAMPLE!r}")
    return DurableRule(
        address=address,
        every=_every(values["every"]) if "every" in values else None,
        keep=parse_keep(values["keep"]) if "keep" in values else None,
        rate_bytes_per_s=rate(f"rate={values['rate']}", values["rate"])
        if "rate" in values
        else None,
    )


def _every(text: str) -> SaveInterval:
    what = f"every={text}"
    every = (
        SaveInterval(steps=int(text))
        if re.fullmatch(r"[0-9]{1,18}", text)
        else SaveInterval(seconds=measured(SECONDS, what, text, "every=6h, or a number of steps"))
    )
    if not every.steps and every.seconds < 1:
        raise ConfigError(f"{what!r} is no interval: give at least 1 step or 1s")
    return every


def wanted_checkpoints(
    offered: Sequence[KnownCheckpoint],
    there: Sequence[KnownCheckpoint],
    keep: Keep | None,
    every: SaveInterval | None,
    now_ns: int,
    *,
    last: bool = False,
) -> list[SavePoint]:
    """Return the offered checkpoints that a target should get, newest first.

    Those are due, and would be kept there. `last`: the newest offered one is due whatever the
    interval is.
    """
    due = list(offered) if every is None else _due(offered, there, every, keep)
    if last and offered and (newest := max(offered, key=_order)) not in due:
        due.append(newest)
    after = [known._replace(verified=True) for known in (*due, *there)]
    places = {known.place for known in due}
    chosen = apply_policy(after, keep or Keep(last=len(after) or 1), now_ns)
    return [verdict.place for verdict in chosen if verdict.keep and verdict.place in places]


def _due(
    offered: Sequence[KnownCheckpoint],
    there: Sequence[KnownCheckpoint],
    every: SaveInterval,
    keep: Keep | None,
) -> list[KnownCheckpoint]:
    """Return the first checkpoint of each uncovered span, and milestones.

    A span is a run of neighbours in the order of positions: a job that goes back, or a clock that
    was set back, begins a new one, and delays no copy.
    """
    covered = {known.place for known in there}
    milestones = keep.milestones if keep else frozenset[int]()
    due: list[KnownCheckpoint] = []
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


def _order(known: KnownCheckpoint) -> tuple[tuple[int, int, int], int]:
    return known.place.position, known.time_ns


REQUEST_S = 30.0  # draining tries again by itself


def open_targets(
    rules: Sequence[DurableRule], root: Path, request_s: float = REQUEST_S
) -> tuple[list[DurableTarget], list[StorageError]]:
    """Return the targets of checkpoints in `root`, and the errors of those that do not answer.

    Raises ConfigError for an address that cannot be a target, RefusedError where it denies access.
    """
    targets: list[DurableTarget] = []
    silent: list[StorageError] = []
    for one in rules:
        store = _folder_or_bucket(one.address, root, request_s)
        silent += _silence(store)
        if any(_is_same(store, other.store) for other in targets):
            raise ConfigError(f"{store.where} is given twice")
        targets.append(DurableTarget(one, store))
    return targets, silent


def open_target(address: str, request_s: float = REQUEST_S) -> Store:
    """Return the store of a target, not accessed yet, with few retries. Raises ConfigError."""
    return open_store(address, request_s=request_s, retries=4, retry_s=request_s, ask=False)


def _silence(store: Store) -> list[StorageError]:
    try:
        store.directories()
    except RefusedError:
        raise
    except StorageError as error:
        return [error]
    return []


def _is_same(one: Store, other: Store) -> bool:
    if isinstance(one, Folder) and isinstance(other, Folder):
        return one.root.resolve() == other.root.resolve()
    return one.where == other.where


def _folder_or_bucket(address: str, root: Path, request_s: float) -> Store:
    store = open_target(address, request_s)
    if not isinstance(store, Folder):
        return store
    path = store.root.absolute()
    if path.resolve() == root.resolve():
        raise ConfigError(
            f"{path} is where this run already saves; name storage that outlives this host"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made ({error.strerror}); name a directory that can be written"
        ) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written; check its permissions")
    return Folder(path)
