"""Which checkpoints a store has, and what they hold. Nothing is believed without its digest.

The newest is the one at the greatest position (line, step, n), then the one committed last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from threading import Lock
from typing import NamedTuple

from outlast.checkpoint.boxes import Box
from outlast.checkpoint.checking import (
    faults_of_commit,
    faults_of_files,
    faults_of_manifest,
    faults_of_part,
    merged,
    uncovered,
)
from outlast.checkpoint.chunks import Chunk, chunks_of, fetch, tensors_in, walk
from outlast.checkpoint.lineage import Lineage, resumed
from outlast.checkpoint.record import COMMIT, Commit, Entry, Manifest, Place, Tensor, unseal
from outlast.checkpoint.storage import Listed, Source, Store
from outlast.errors import CorruptionError, StalledError, StorageError

_GETS = 8  # manifests asked for at a time: a bucket answers slowly, but many at once


class Damage(NamedTuple):
    """What is wrong with a file, or with one chunk of it, and the tensors that lie there."""

    file: str
    chunk: int | None
    what: str
    tensors: tuple[str, ...]


class Checkpoint:
    """A committed checkpoint: its commit record, and its manifests once they are asked for."""

    def __init__(self, store: Source, commit: Commit) -> None:
        self.store = store
        self.commit = commit

    @property
    def place(self) -> Place:
        return self.commit.place

    @property
    def job(self) -> str:
        return self.commit.job

    @property
    def size_bytes(self) -> int:
        """Of all shards."""
        return self.commit.size_bytes

    @property
    def where(self) -> str:
        """Its directory, for messages."""
        return f"{self.store.where}/{self.place.directory}"

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """Of every rank, in order, each as the commit record has it.

        Raises CorruptionError or StorageError naming the file.
        """
        entries = self.commit.manifests
        with ThreadPoolExecutor(min(_GETS, len(entries))) as pool:
            return self._whole(tuple(pool.map(self.manifest, entries)))

    def adopt(self, records: Sequence[bytes]) -> None:
        """Take over the manifests' bytes, in order of their ranks, wherever they were read.

        They are verified as if they came from the store, and CorruptionError is raised so.
        """
        pairs = zip(self.commit.manifests, records, strict=True)
        self.manifests = self._whole(tuple(self._parsed(entry, data) for entry, data in pairs))

    def _whole(self, manifests: tuple[Manifest, ...]) -> tuple[Manifest, ...]:
        if (size := sum(manifest.size_bytes for manifest in manifests)) != self.size_bytes:
            raise CorruptionError(
                f"{self.where}: shards of {size} bytes where the commit record has"
                f" {self.size_bytes}"
            )
        return manifests

    def manifest(self, entry: Entry) -> Manifest:
        """One rank's. Raises CorruptionError or StorageError naming the file."""
        return self._parsed(entry, self.record(entry))

    def record(self, entry: Entry) -> bytes:
        """The bytes of a manifest. Raises CorruptionError or StorageError naming the file."""
        data = self.store.get(self.place.directory, entry.name)
        _refuse(f"{self.where}/{entry.name}", faults_of_manifest(data, entry))
        return data

    def _parsed(self, entry: Entry, data: bytes) -> Manifest:
        file = f"{self.where}/{entry.name}"
        _refuse(file, faults_of_manifest(data, entry))
        manifest = unseal(data, Manifest, file)
        _refuse(file, faults_of_part(manifest, entry.rank, self.commit))
        return manifest

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name. Raises as `manifests`, and where ranks contradict each other."""
        manifests = self.manifests
        try:
            return merged(manifests)
        except CorruptionError as error:
            raise CorruptionError(f"{self.where}: {error}") from error

    def check(self) -> None:
        """Everything that can be told without reading a shard: manifests, and sizes of shards.

        Raises CorruptionError or StorageError naming the file.
        """
        wanted = {name: size for each in self.manifests for name, size in each.files.items()}
        faults = faults_of_files(self.store.files(self.place.directory), wanted)
        _refuse(self.where, (f"{name} {fault}" for name, fault in faults.items()))


def open_checkpoint(store: Source, place: Place) -> Checkpoint:
    """A checkpoint by its place; only the commit record is read.

    Raises CorruptionError or StorageError naming the file.
    """
    file = f"{store.where}/{place.directory}/{COMMIT}"
    commit = unseal(store.get(place.directory, COMMIT), Commit, file)
    _refuse(file, faults_of_commit(commit, place.directory))
    return Checkpoint(store, commit)


def places(store: Source) -> list[Place]:
    """What has a commit record, good or bad, newest first. Raises StorageError."""
    found = sorted(_committed(store), key=_by_position, reverse=True)
    return [
        place
        for _, rivals in groupby(found, lambda place: place.position)
        for place in _latest_first(store, list(rivals))
    ]


def uncommitted(store: Source) -> list[Place]:
    """Return what has no commit record, newest first: it is being written, was left behind, or has
    lost it. Raises StorageError."""
    committed = set(_committed(store))
    found = [place for place in _places(store) if place not in committed]
    return sorted(found, key=_by_position, reverse=True)


def lineage_of(store: Source, origin: Place | None = None) -> Lineage:
    """The lineage of saves that come after `origin`, or else after the newest checkpoint that is
    there. Raises StorageError."""
    committed, left = places(store)[:1], uncommitted(store)[:1]
    newest = committed[0] if committed else None
    tip = max([*committed, *left], key=lambda place: place.position, default=None)
    base = ""
    with suppress(CorruptionError, StorageError):  # it began nowhere, as far as is known
        base = open_checkpoint(store, newest).commit.base if newest else ""
    return resumed(origin or newest, base, newest, tip)


def newest(
    store: Source,
    on_damage: Callable[[str], None],
    verify: bool = False,
    job: str | None = None,
    barred: Callable[[Place], bool] = lambda _: False,
) -> Checkpoint | None:
    """The newest checkpoint whose records are whole and whose files have their sizes, or None.

    With `verify` each of its bytes is read, too; with `job` that must be whose it is. What is
    passed over is told to `on_damage`; what is `barred` is no candidate at all.
    Raises StorageError when the store cannot be listed, StalledError when it does not answer.
    """
    for place in places(store):
        if barred(place):
            continue
        try:
            checkpoint = open_checkpoint(store, place)
            if job is not None and checkpoint.job != job:
                raise CorruptionError(f"it is of job {checkpoint.job}, and this is job {job}")
            checkpoint.check()
            if verify:
                _check_every_byte(checkpoint)
        except StalledError:
            raise  # an older one would cost what this one may still have
        except (CorruptionError, StorageError) as error:
            on_damage(f"checkpoint {place.directory} is passed over: {error}")
            continue
        return checkpoint
    return None


def verify(
    checkpoint: Checkpoint, on_progress: Callable[[int, int], None] = lambda *_: None
) -> list[Damage]:
    """Read every byte of every file; what is wrong with them, by file and chunk.

    `on_progress` is told the bytes of shards that are done, and their total, from any thread.
    Raises StorageError when the directory cannot be listed, StalledError when its file system
    does not answer.
    """
    damages, manifests = _look_at_manifests(checkpoint)
    files = checkpoint.store.files(checkpoint.place.directory)
    chunks: list[Chunk] = []
    for manifest in manifests:
        faults = faults_of_files(files, manifest.files)
        gone = {name for name in faults if files.get(name, -1) < 0}
        for name, fault in faults.items():
            file = f"{checkpoint.where}/{name}"
            lost = tensors_in(manifest, name) if name in gone else ()
            damages.append(Damage(file, None, f"{file}: {fault}", lost))
        chunks += [chunk for chunk in chunks_of(manifest) if chunk.file not in gone]
    adding, done = Lock(), 0

    def look(chunk: Chunk, buffer: memoryview) -> None:
        nonlocal done
        try:
            fetch(checkpoint.store, chunk, buffer)
        except StalledError:
            raise
        except (CorruptionError, StorageError) as error:
            file = f"{checkpoint.where}/{chunk.file}"
            damages.append(Damage(file, chunk.number, str(error), chunk.tensors))
        with adding:
            done += chunk.size_bytes
            on_progress(done, checkpoint.size_bytes)

    walk(chunks, look)
    return sorted(damages, key=lambda damage: (damage.file, damage.chunk or 0))


def clean(store: Store, spare: Callable[[Place], bool] = lambda _: False) -> list[str]:
    """Remove directories of attempts that were never committed; their names.

    Only where nobody writes: before the first worker starts. `spare` says which stay. What cannot
    be looked at or removed stays, too: it is only in the way, not wrong.
    """
    removed: list[str] = []
    for place in _places(store):
        try:
            if not spare(place) and COMMIT not in store.files(place.directory):
                store.remove(place.directory)
                removed.append(place.directory)
        except (CorruptionError, StorageError):
            continue
    return removed


def _look_at_manifests(checkpoint: Checkpoint) -> tuple[list[Damage], list[Manifest]]:
    """What is wrong with manifests, and those that are whole."""
    damages, manifests = list[Damage](), list[Manifest]()
    for entry in checkpoint.commit.manifests:
        try:
            manifests.append(checkpoint.manifest(entry))
        except StalledError:
            raise
        except (CorruptionError, StorageError) as error:
            damages.append(Damage(f"{checkpoint.where}/{entry.name}", None, str(error), ()))
    if damages:
        return damages, manifests  # what they would have covered is not known
    try:
        for name in _uncovered(checkpoint.manifests, checkpoint.tensors):
            what = f"{checkpoint.where}: its pieces of {name} do not cover it"
            damages.append(Damage(checkpoint.where, None, what, (name,)))
    except CorruptionError as error:
        damages.append(Damage(checkpoint.where, None, str(error), ()))
    return damages, manifests


def _uncovered(manifests: Sequence[Manifest], tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors of which some element lies in no piece."""
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for manifest in manifests:
        for piece in manifest.pieces:
            boxes[piece.name].append(Box(piece.start, piece.size))
    return [name for name in boxes if uncovered(Box.whole(tensors[name].shape), boxes[name])]


def _check_every_byte(checkpoint: Checkpoint) -> None:
    if damages := verify(checkpoint):
        more = f" (and {len(damages) - 1} more damages)" if damages[1:] else ""
        raise CorruptionError(f"{damages[0].what}{more}")


def _by_position(place: Place) -> tuple[tuple[int, int, int], str]:
    return place.position, place.attempt


def _places(store: Source) -> Iterator[Place]:
    for name in store.directories():
        if place := Place.parse(name):
            yield place


def _committed(store: Source) -> list[Place]:
    names = store.directories()
    found = [place for name in names if (place := Place.parse(name))]
    # Of a bucket that holds other things as well, nobody knows how many there are to list.
    if isinstance(store, Listed) and len(found) == len(names) and found:
        committed = store.holding(COMMIT)
        return [place for place in found if place.directory in committed]
    return [place for place in found if _has_commit(store, place)]


def _has_commit(store: Source, place: Place) -> bool:
    try:
        return COMMIT in store.files(place.directory)
    except (CorruptionError, StorageError):
        return True  # whoever opens it is told why it cannot be looked at


def _latest_first(store: Source, rivals: list[Place]) -> list[Place]:
    """Attempts at the same step, by the time of their commit; those that are damaged last."""
    if len(rivals) == 1:
        return rivals
    times: dict[Place, int] = {}
    for place in rivals:
        try:
            times[place] = open_checkpoint(store, place).commit.time_ns
        except (CorruptionError, StorageError):
            times[place] = -1
    return sorted(rivals, key=lambda place: times[place], reverse=True)


def _refuse(file: str, faults: Iterable[str]) -> None:
    for fault in faults:
        raise CorruptionError(f"{file}: {fault}; an older checkpoint must be used")
