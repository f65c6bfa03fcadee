"""Retention: policies that choose the checkpoints to keep, and the deletion of all others.

The choice is pure and gives a reason for each checkpoint. Nothing is deleted before a newer
checkpoint has been read back, and the newest never is. Beyond that a policy keeps the last n, one
in every k steps, milestones, young ones, and those within a size. Checkpoints of a later line are
newer (format/manifests.py): a job that went back keeps its new checkpoints, and the end of the line
that it abandoned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import SavePoint, ancestry, line_ends
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.catalog import verify as verify_checkpoint
from outlast.checkpoint.stores.store_interfaces import LinkingStore, Store, StoreSource
from outlast.errors import ConfigError, CorruptionError, InUseError, StalledError, StorageError
from outlast.quantities import BYTES, SECONDS, measured

_EXAMPLE = "last=3,every=1000,milestone=5000,age=7d,size=10TB"


class KnownCheckpoint(NamedTuple):
    """A complete checkpoint.

    `verified`: every byte of it has been read back and was right. `base`: the directory that its
    line began from, "" for none. `linked`: its files that other checkpoints share, by inode number,
    with their sizes.
    """

    place: SavePoint
    time_ns: int
    size_bytes: int
    verified: bool
    base: str = ""
    linked: tuple[tuple[tuple[int, int], int], ...] = ()


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """A retention policy.

    `last`: so many of the newest. `every`: of each span of so many steps, the first one in it; both
    count the newest and its ancestors. `lines`: the last checkpoint of so many of the newest
    abandoned lines; None for all. `milestones`: these steps, for ever. `age_s`, `size_bytes`: of
    the rest, the younger ones, and those within this total size of all that is kept, newest first;
    with neither, the rest is deleted.
    """

    last: int = 2
    every: int | None = None
    milestones: frozenset[int] = frozenset()
    age_s: float | None = None
    size_bytes: int | None = None
    lines: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ConfigError(
                f"last={self.last}: the newest checkpoint is always kept; give last=1"
            )
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every={self.every}: a number of steps is at least 1")
        for name, value in (("age", self.age_s), ("size", self.size_bytes)):
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}, and must not be negative")


class RetentionVerdict(NamedTuple):
    """The decision to keep or delete a checkpoint, with its reason for people."""

    place: SavePoint
    keep: bool
    why: str


def apply_policy(
    known: Sequence[KnownCheckpoint], keep: Keep, now_ns: int
) -> list[RetentionVerdict]:
    """Return a verdict on each complete checkpoint of a store, newest first.

    Until one has been verified, all stay; then all from the newest verified one on. `now_ns`: Unix
    time; a checkpoint from the future counts as young.
    """
    newest_first = sorted(
        known, key=lambda k: (k.place.position, k.time_ns, k.place.attempt), reverse=True
    )
    reasons = _reasons(newest_first, keep)
    there: set[tuple[int, int]] = set()  # files that stay
    stays = [item for item in newest_first if item.place in reasons]
    room_bytes = (keep.size_bytes or 0) - sum(_needed(item, there) for item in stays)
    verdicts: list[RetentionVerdict] = []
    for item in newest_first:
        why = reasons.get(item.place)
        needed_bytes = _needed(item, set(there))
        if why is None and (why_not := _trimmed(item, keep, now_ns, room_bytes - needed_bytes)):
            verdicts.append(RetentionVerdict(item.place, False, why_not))
            continue
        if why is None:
            room_bytes -= _needed(item, there)
        verdicts.append(RetentionVerdict(item.place, True, why or "within age and size"))
    return verdicts


def _needed(item: KnownCheckpoint, there: set[tuple[int, int]]) -> int:
    """Return the bytes that a checkpoint takes beside the files in `there`; add its own to it."""
    needed_bytes = item.size_bytes - sum(size for number, size in item.linked if number in there)
    there.update(number for number, _ in item.linked)
    return needed_bytes


def _reasons(newest_first: Sequence[KnownCheckpoint], keep: Keep) -> dict[SavePoint, str]:
    """Return the places kept whatever their age and size, each with its strongest reason."""
    verified = next((i for i, item in enumerate(newest_first) if item.verified), None)
    places = [item.place for item in newest_first]
    ancestors = ancestry(places, {item.place: item.base for item in newest_first})
    own = [item for item in newest_first if item.place in ancestors]
    firsts = set(_firsts(own, keep.every)) if keep.every else set[SavePoint]()
    last = {item.place for item in own[: keep.last]}
    ends = set(line_ends(places, ancestors)[: keep.lines])
    reasons: dict[SavePoint, str] = {}
    for i, item in enumerate(newest_first):
        if i == verified:
            why = "the last verified one"
        elif verified is None or i < verified:
            why = "the newest" if i == 0 else "no newer one has been verified"
        elif item.place.step in keep.milestones:
            why = "a milestone"
        elif item.place in last:
            why = f"one of the last {keep.last}"
        elif item.place in firsts:
            why = f"the first of its {keep.every} steps"
        elif item.place in ends:
            why = "the end of a line that the job has left"
        else:
            continue
        reasons[item.place] = why
    return reasons


def _firsts(newest_first: Sequence[KnownCheckpoint], every: int) -> Iterator[SavePoint]:
    """Return the first step in each span from k * every on, k >= 1; of attempts, the newest."""
    firsts: dict[int, SavePoint] = {}
    for item in newest_first:
        span, before = item.place.step // every, firsts.get(item.place.step // every)
        if before is None or item.place.step < before.step:
            firsts[span] = item.place
    return (place for span, place in firsts.items() if span)


def _trimmed(item: KnownCheckpoint, keep: Keep, now_ns: int, room_bytes: int) -> str:
    """Return why an item that no rule keeps is deleted; "" when it may stay.

    `room_bytes`: remaining room, including the item.
    """
    if keep.age_s is None and keep.size_bytes is None:
        return "no rule keeps it"
    if keep.age_s is not None and now_ns - item.time_ns > keep.age_s * 1e9:
        return "too old"
    if keep.size_bytes is not None and room_bytes < 0:
        return "no room for it"
    return ""


def parse_policy(text: str) -> Keep:
    """Parse a policy of the command line: `last=3,every=1000,age=7d,size=10TB`.

    `milestone` may occur several times. Raises ConfigError, which names the part that is wrong.
    """
    values: dict[str, float | int] = {}
    milestones: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not equals or name not in _READ:
            raise ConfigError(
                f"cannot read {part!r} in a retention policy: it is made of"
                f" {', '.join(sorted(_READ))}, as in {_EXAMPLE}"
            )
        if name in values:
            raise ConfigError(f"{name} is given twice in the retention policy {text!r}")
        number = _READ[name](part, value)
        if name == "milestone":
            milestones.add(int(number))
        else:
            values[name] = number
    if not values and not milestones:
        raise ConfigError(f"a retention policy lists the checkpoints to keep, as in {_EXAMPLE}")
    return Keep(
        last=int(values.get("last", 2)),
        every=int(values["every"]) if "every" in values else None,
        milestones=frozenset(milestones),
        age_s=values.get("age"),
        size_bytes=int(values["size"]) if "size" in values else None,
        lines=int(values["lines"]) if "lines" in values else None,
    )


def _whole(part: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise ConfigError(f"{part!r} is no whole number, as in {_EXAMPLE}")
    return int(value)


def _seconds(part: str, value: str) -> float:
    return measured(SECONDS, part, value, _EXAMPLE)


def _bytes(part: str, value: str) -> float:
    return measured(BYTES, part, value, _EXAMPLE)


_READ: dict[str, Callable[[str, str], float]] = {
    "last": _whole,
    "every": _whole,
    "lines": _whole,
    "milestone": _whole,
    "age": _seconds,
    "size": _bytes,
}


def is_whole(checkpoint: Checkpoint) -> bool:
    """Read every byte of a checkpoint; return whether all are right."""
    return not verify_checkpoint(checkpoint)


def prune_store(
    store: Store,
    keep: Keep,
    now_ns: int,
    *,
    verified: Callable[[Checkpoint], bool] = is_whole,
    spare: Callable[[SavePoint], bool] = lambda _: False,
    barred: Callable[[SavePoint], bool] = lambda _: False,
    dry_run: bool = False,
) -> list[RetentionVerdict]:
    """Delete checkpoints that `keep` does not keep, oldest first; return all verdicts.

    Verdicts are sorted newest first. Nothing is deleted before `verified` has found a newer
    checkpoint undamaged: it is called from the newest on, and only where something would be
    deleted. `spare`: places in use, which stay, as do those that a reader holds. `barred`
    checkpoints are never started from: they count for nothing, and are deleted once another one was
    verified. Checkpoints whose commit record cannot be read stay, and count for nothing, too.
    `dry_run`: delete nothing. Raises StorageError where the store fails; each deletion up to then
    is complete.
    """
    opened, damaged = _opened(store)
    checkpoints = [one for one in opened if not barred(one.commit.place)]
    unfit = [one.commit.place for one in opened if barred(one.commit.place)]
    known = [_known(checkpoint, verified=i == 0) for i, checkpoint in enumerate(checkpoints)]
    whole = None
    if unfit or not all(verdict.keep for verdict in apply_policy(known, keep, now_ns)):
        whole = next((i for i, one in enumerate(checkpoints) if verified(one)), None)
        known = [_known(one, verified=i == whole) for i, one in enumerate(checkpoints)]
    verdicts = [
        verdict._replace(keep=True, why="in use")
        if not verdict.keep and spare(verdict.place)
        else verdict
        for verdict in apply_policy(known, keep, now_ns)
        + [RetentionVerdict(place, whole is None, "barred by an audit") for place in unfit]
    ]
    if not dry_run:
        for i, verdict in reversed(list(enumerate(verdicts))):
            verdicts[i] = _removed(store, verdict)
    return verdicts + damaged


def _removed(store: Store, verdict: RetentionVerdict) -> RetentionVerdict:
    try:
        if not verdict.keep:
            store.remove(verdict.place.directory)
    except InUseError:
        return verdict._replace(keep=True, why="in use")
    return verdict


def known_checkpoints(store: Store) -> list[KnownCheckpoint]:
    """Return the checkpoints of a store, newest first, by their commit records, unverified.

    Raises StorageError when the store cannot be listed.
    """
    return [_known(checkpoint, verified=False) for checkpoint in _opened(store)[0]]


def _opened(store: Store) -> tuple[list[Checkpoint], list[RetentionVerdict]]:
    checkpoints, damaged = list[Checkpoint](), list[RetentionVerdict]()
    for place in checkpoint_places(store):
        try:
            checkpoints.append(open_checkpoint(store, place))
        except StalledError:
            raise
        except (CorruptionError, StorageError) as error:
            damaged.append(RetentionVerdict(place, True, f"left alone: {error}"))
    return checkpoints, damaged


def _known(checkpoint: Checkpoint, *, verified: bool) -> KnownCheckpoint:
    commit = checkpoint.commit
    linked = linked_files(checkpoint.store, commit.place)
    return KnownCheckpoint(
        commit.place, commit.time_ns, commit.size_bytes, verified, commit.base, linked
    )


def linked_files(store: StoreSource, place: SavePoint) -> tuple[tuple[tuple[int, int], int], ...]:
    """Return the files of a checkpoint that have other names: inode number and size."""
    if not isinstance(store, LinkingStore):
        return ()
    inodes = store.inodes(place.directory).values()
    return tuple((each.number, each.size_bytes) for each in inodes if each.names > 1)
