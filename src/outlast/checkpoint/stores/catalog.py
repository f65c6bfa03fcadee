"""The checkpoints of a store and their contents, each verified by digest.

The newest checkpoint has the greatest position (line, step, n); among equals, the latest commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from threading import Lock
from typing import NamedTuple

from outlast.checkpoint.format.manifest_checks import (
    check_commit,
    check_files,
    check_manifest,
    check_part,
    merge_manifests,
    uncovered_elements,
)
from outlast.checkpoint.format.manifests import (
    COMMIT,
    Commit,
    Lineage,
    Manifest,
    ManifestEntry,
    SavePoint,
    Tensor,
    resume_lineage,
    unseal,
)
from outlast.checkpoint.format.tensor_boxes import Box
from outlast.checkpoint.stores.chunk_reader import Chunk, chunks_of, fetch, tensors_in, walk
from outlast.checkpoint.stores.store_interfaces import ListedSource, Store, StoreSource
from outlast.errors import CorruptionError, StalledError, StorageError

_GETS = 8  # parallel requests: a bucket has high latency


class CheckpointDamage(NamedTuple):
    """Damage of a file, or of one of its chunks, with the affected tensors."""

    file: str
    chunk: int | None
    what: str
    tensors: tuple[str, ...]
    is_unreadable: bool = False  # a fault of the storage: the bytes may be whole


class Checkpoint:
    """A committed checkpoint: its commit record, and its manifests on first use."""

    def __init__(self, store: StoreSource, commit: Commit) -> None:
        self.store = store
        self.commit = commit

    @property
    def place(self) -> SavePoint:
        """Return the position and attempt of the checkpoint."""
        return self.commit.place

    @property
    def job(self) -> str:
        """Return the name of the job that saved it; may be empty."""
        return self.commit.job

    @property
    def size_bytes(self) -> int:
        """Return the size of all shards in bytes."""
        return self.commit.size_bytes

    @property
    def where(self) -> str:
        """Return its directory, for messages."""
        return f"{self.store.where}/{self.place.directory}"

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """Return the manifests of all ranks, in order, verified by the commit record.

        Raises CorruptionError or StorageError naming the file.
        """
        entries = self.commit.manifests
        with ThreadPoolExecutor(min(_GETS, len(entries))) as pool:
            return self._whole(tuple(pool.map(self.manifest, entries)))

    def adopt(self, records: Sequence[bytes]) -> None:
        """Take over the manifests' bytes, in order of rank, read elsewhere.

        They are verified as if read from the store; raises CorruptionError.
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

    def manifest(self, entry: ManifestEntry) -> Manifest:
        """Return the manifest of one rank.

        Raises CorruptionError or StorageError naming the file.
        """
        return self._parsed(entry, self.record(entry))

    def record(self, entry: ManifestEntry) -> bytes:
        """Return the bytes of a manifest.

        Raises CorruptionError or StorageError naming the file.
        """
        data = self.store.get(self.place.directory, entry.name)
        _refuse(f"{self.where}/{entry.name}", check_manifest(data, entry))
        return data

    def _parsed(self, entry: ManifestEntry, data: bytes) -> Manifest:
        file = f"{self.where}/{entry.name}"
        _refuse(file, check_manifest(data, entry))
        manifest = unseal(data, Manifest, file)
        _refuse(file, check_part(manifest, entry.rank, self.commit))
        return manifest

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name.

        Raises as `manifests`, and CorruptionError where ranks contradict each other.
        """
        manifests = self.manifests
        try:
            return merge_manifests(manifests)
        except CorruptionError as error:
            raise CorruptionError(f"{self.where}: {error}") from error

    def check(self) -> None:
        """Check manifests and sizes of shards, without reading a shard.

        Raises CorruptionError or StorageError naming the file.
        """
        wanted = {name: size for each in self.manifests for name, size in each.files.items()}
        faults = check_files(self.store.files(self.place.directory), wanted)
        _refuse(self.where, (f"{name} {fault}" for name, fault in faults.items()))


def open_checkpoint(store: StoreSource, place: SavePoint) -> Checkpoint:
    """Return a checkpoint by its place; only the commit record is read.

    Raises CorruptionError or StorageError naming the file.
    """
    file = f"{store.where}/{place.directory}/{COMMIT}"
    commit = unseal(store.get(place.directory, COMMIT), Commit, file)
    _refuse(file, check_commit(commit, place.directory))
    return Checkpoint(store, commit)


def checkpoint_places(store: StoreSource) -> list[SavePoint]:
    """Return the places with a commit record, valid or not, newest first. Raises StorageError."""
    places = sorted(_committed(store), key=_by_position, reverse=True)
    return [
        place
        for _, rivals in groupby(places, lambda place: place.position)
        for place in _latest_first(store, list(rivals))
    ]


def uncommitted(store: StoreSource) -> list[SavePoint]:
    """Return the places without a commit record, newest first.

    Such a save is in progress, was abandoned, or has lost its record. Raises StorageError.
    """
    committed = set(_committed(store))
    places = [place for place in _places(store) if place not in committed]
    return sorted(places, key=_by_position, reverse=True)


def lineage_of(store: StoreSource, origin: SavePoint | None = None) -> Lineage:
    """Return the lineage of saves after `origin`, or else after the newest checkpoint.

    Raises StorageError.
    """
    committed, abandoned = checkpoint_places(store)[:1], uncommitted(store)[:1]
    newest = committed[0] if committed else None
    tip = max([*committed, *abandoned], key=lambda place: place.position, default=None)
    base = ""
    with suppress(CorruptionError, StorageError):  # it began nowhere, as far as is known
        base = open_checkpoint(store, newest).commit.base if newest else ""
    return resume_lineage(origin or newest, base, newest, tip)


class UnreadableCheckpointError(StorageError):
    """The newest checkpoint, at `place`, cannot be read, and is not known to be damaged."""

    def __init__(self, place: SavePoint, error: StorageError) -> None:
        super().__init__(
            f"checkpoint {place.directory} cannot be read, and is not known to be damaged: {error};"
            " no older one was taken; try again, or move its directory away to continue from the"
            " one before it"
        )
        self.place = place


def newest_checkpoint(
    store: StoreSource,
    on_damage: Callable[[str], None],
    verify: bool = False,
    job: str | None = None,
    barred: Callable[[SavePoint], bool] = lambda _: False,
) -> Checkpoint | None:
    """Return the newest checkpoint with valid records and files of the right sizes, or None.

    `verify`: read each of its bytes, too. `job`: accept only checkpoints of this job. `on_damage`
    gets a message for each damaged checkpoint, which is passed over; `barred` ones are no
    candidates. Raises StorageError when the store cannot be listed, UnreadableCheckpointError when
    the newest one cannot be read, StalledError when the store does not answer.
    """
    for place in checkpoint_places(store):
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
            raise  # an older checkpoint would lose steps
        except StorageError as error:  # the same: it may be whole
            raise UnreadableCheckpointError(place, error) from error
        except CorruptionError as error:
            on_damage(f"checkpoint {place.directory} is skipped: {error}")
            continue
        return checkpoint
    return None


def verify(
    checkpoint: Checkpoint, on_progress: Callable[[int, int], None] = lambda *_: None
) -> list[CheckpointDamage]:
    """Read every byte of every file; return the damage by file and chunk.

    `on_progress` gets the bytes of shards that are done, and their total, from any thread. Raises
    StorageError when the directory cannot be listed, StalledError when its file system does not
    answer.
    """
    damages, manifests = _look_at_manifests(checkpoint)
    files = checkpoint.store.files(checkpoint.place.directory)
    chunks: list[Chunk] = []
    for manifest in manifests:
        faults = check_files(files, manifest.files)
        missing = {name for name in faults if files.get(name, -1) < 0}
        for name, fault in faults.items():
            file = f"{checkpoint.where}/{name}"
            tensors = tensors_in(manifest, name) if name in missing else ()
            damages.append(CheckpointDamage(file, None, f"{file}: {fault}", tensors))
        chunks += [chunk for chunk in chunks_of(manifest) if chunk.file not in missing]
    adding, done = Lock(), 0

    def look(chunk: Chunk, buffer: memoryview) -> None:
        nonlocal done
        try:
            fetch(checkpoint.store, chunk, buffer)
        except StalledError:
            raise
        except (CorruptionError, StorageError) as error:
            file = f"{checkpoint.where}/{chunk.file}"
            is_unreadable = isinstance(error, StorageError)
            damages.append(
                CheckpointDamage(file, chunk.number, str(error), chunk.tensors, is_unreadable)
            )
        with adding:
            done += chunk.size_bytes
            on_progress(done, checkpoint.size_bytes)

    walk(chunks, look)
    return sorted(damages, key=lambda damage: (damage.file, damage.chunk or 0))


def remove_uncommitted(
    store: Store, spare: Callable[[SavePoint], bool] = lambda _: False
) -> list[str]:
    """Remove directories of attempts that were never committed; return their names.

    Only valid while no process writes: before the first worker starts. `spare`: places that stay.
    Directories that cannot be read or removed stay as well; they do no harm.
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


def _look_at_manifests(checkpoint: Checkpoint) -> tuple[list[CheckpointDamage], list[Manifest]]:
    """Return the damage of manifests, and the undamaged manifests."""
    damages, manifests = list[CheckpointDamage](), list[Manifest]()
    for entry in checkpoint.commit.manifests:
        try:
            manifests.append(checkpoint.manifest(entry))
        except StalledError:
            raise
        except (CorruptionError, StorageError) as error:
            file, is_unreadable = (
                f"{checkpoint.where}/{entry.name}",
                isinstance(error, StorageError),
            )
            damages.append(CheckpointDamage(file, None, str(error), (), is_unreadable))
    if damages:
        return damages, manifests  # their coverage is unknown
    try:
        for name in _uncovered(checkpoint.manifests, checkpoint.tensors):
            what = f"{checkpoint.where}: its pieces of {name} do not cover it"
            damages.append(CheckpointDamage(checkpoint.where, None, what, (name,)))
    except CorruptionError as error:
        damages.append(CheckpointDamage(checkpoint.where, None, str(error), ()))
    return damages, manifests


def _uncovered(manifests: Sequence[Manifest], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors with elements that lie in no piece."""
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for manifest in manifests:
        for piece in manifest.pieces:
            boxes[piece.name].append(Box(piece.start, piece.size))
    return [
        name for name in boxes if uncovered_elements(Box.whole(tensors[name].shape), boxes[name])
    ]


def _check_every_byte(checkpoint: Checkpoint) -> None:
    if damages := verify(checkpoint):
        more = f" (and {len(damages) - 1} more damages)" if damages[1:] else ""
        is_unreadable = all(damage.is_unreadable for damage in damages)
        first = next(d for d in damages if d.is_unreadable == is_unreadable)
        raise (StorageError if is_unreadable else CorruptionError)(f"{first.what}{more}")


def _by_position(place: SavePoint) -> tuple[tuple[int, int, int], str]:
    return place.position, place.attempt


def _places(store: StoreSource) -> Iterator[SavePoint]:
    for name in store.directories():
        if place := SavePoint.parse(name):
            yield place


def _committed(store: StoreSource) -> list[SavePoint]:
    names = store.directories()
    places = [place for name in names if (place := SavePoint.parse(name))]
    # A bucket with other objects may have any number of them to list.
    if isinstance(store, ListedSource) and len(places) == len(names) and places:
        committed = store.holding(COMMIT)
        return [place for place in places if place.directory in committed]
    return [place for place in places if _has_commit(store, place)]


def _has_commit(store: StoreSource, place: SavePoint) -> bool:
    try:
        return COMMIT in store.files(place.directory)
    except (CorruptionError, StorageError):
        return True  # opening it reports the error


def _latest_first(store: StoreSource, rivals: list[SavePoint]) -> list[SavePoint]:
    """Sort attempts at the same step by commit time, newest first; damaged ones last."""
    if len(rivals) == 1:
        return rivals
    times: dict[SavePoint, int] = {}
    for place in rivals:
        try:
            times[place] = open_checkpoint(store, place).commit.time_ns
        except (CorruptionError, StorageError):
            times[place] = -1
    return sorted(rivals, key=lambda place: times[place], reverse=True)


def _refuse(file: str, faults: Iterable[str]) -> None:
    for fault in faults:
        raise CorruptionError(f"{file}: {fault}; an older checkpoint must be used")
