"""Versions in keepers' memory, read like checkpoints in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from outlast.checkpoint.format.manifest_checks import find_disagreements
from outlast.checkpoint.format.manifests import (
    COMMIT,
    FORMAT,
    Commit,
    Manifest,
    ManifestEntry,
    SavePoint,
    digest_of,
    manifest_name,
    seal,
)
from outlast.checkpoint.keeper.arena import Unmapped
from outlast.checkpoint.keeper.copy_readers import SUFFIX
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.replicas.group_parity import HeldParity, HeldPart, rebuild_part
from outlast.checkpoint.replicas.keeper_links import DOOR
from outlast.checkpoint.replicas.remote_copies import RemoteKeeper, RemoteMemory
from outlast.checkpoint.stores.store_interfaces import MemoryFile
from outlast.errors import CorruptionError, StorageError

OpenMemory = Unmapped | RemoteMemory
KEEPER_DOORS = "keepers"  # folder of a run directory, with a file for each rank
REACH_S = 5.0  # for one keeper
_DIGEST_BYTES_PER_S = 0.5e9  # at least; versions that were never written are digested on request
_THREADS = 32


def door_of(folder: Path, rank: int) -> str:
    """Return the address of a rank's keeper on any host of a run."""
    return f"{DOOR}{folder / str(rank)}"


class MemoryCopies:
    """A source in memory: versions of which keepers or parity have every rank's part.

    Its commit records are generated here, from manifests with digests of every chunk. Where several
    keepers hold a part, a damaged chunk is read from another, and as a last resort computed from
    parity. The `memories` are held until `close`.
    """

    where = "memory"

    def __init__(
        self,
        parts: Iterable[HeldPart],
        parities: Iterable[HeldParity] = (),
        memories: Iterable[OpenMemory] = (),
    ) -> None:
        self._memories = list(memories)
        self._records: dict[str, dict[str, bytes]] = {}
        self._shards: dict[str, dict[str, list[HeldPart]]] = {}
        by_place: dict[SavePoint, dict[int, list[HeldPart]]] = {}
        for part in map(_as_single_file, parts):
            ranks = by_place.setdefault(part.manifest.place, {})
            ranks.setdefault(part.manifest.rank, []).append(part)
        parities_by_place: dict[SavePoint, list[HeldParity]] = {}
        for each in parities:
            parities_by_place.setdefault(each.parity.manifests[0].place, []).append(each)
        for place, place_parities in parities_by_place.items():
            ranks = by_place.setdefault(place, {})
            there = {rank: parts[0] for rank, parts in ranks.items()}
            for rank, part in rebuild_part(there, place_parities).items():
                ranks.setdefault(rank, []).append(_as_single_file(part))
        for place, ranks in by_place.items():
            first = [ranks[rank][0].manifest for rank in sorted(ranks)]
            if first and _is_complete(first):
                self._records[place.directory] = _records(first)
                self._shards[place.directory] = {
                    parts[0].manifest.shard: parts for parts in ranks.values()
                }

    @classmethod
    def reach(
        cls,
        addresses: Sequence[str],
        token: str,
        name: str,
        on_silent: Callable[[str], None] = lambda _: None,
        *,
        beside_trainers: bool = False,
    ) -> MemoryCopies:
        """Return the contents of the keepers at `addresses`: on this host, or behind doors.

        An unreachable keeper is left out; for one that accepts the connection and does not answer,
        `on_silent` gets the error, from any thread. `beside_trainers`: keepers
        serve trainers meanwhile.
        """

        def read_contents(address: str) -> _KeeperContents:
            if address.startswith(DOOR):
                return _KeeperContents.of_remote(address, token)
            address += SUFFIX if beside_trainers else ""
            return _KeeperContents.of(address, token, name, on_silent)

        with ThreadPoolExecutor(_THREADS) as pool:
            contents = list(pool.map(read_contents, addresses))
        return cls(
            [part for each in contents for part in each.parts],
            [parity for each in contents for parity in each.parities],
            [memory for each in contents for memory in each.memories.values()],
        )

    def directories(self) -> list[str]:
        """See StoreSource.directories."""
        return list(self._records)

    def files(self, directory: str) -> dict[str, int]:
        """See StoreSource.files."""
        records = self._records.get(directory, {})
        shards = self._shards.get(directory, {})
        return {name: len(data) for name, data in records.items()} | {
            name: parts[0].manifest.size_bytes for name, parts in shards.items()
        }

    def get(self, directory: str, name: str) -> bytes:
        """See StoreSource.get."""
        if name in self._shards.get(directory, {}):
            data = bytearray(self.files(directory)[name])
            self.read(directory, name, 0, memoryview(data))
            return bytes(data)
        return _find(self._records, directory, name)

    def read(self, directory: str, name: str, at: int, into: memoryview) -> None:
        """See StoreSource.read."""
        if name in self._records.get(directory, {}):
            content = self._records[directory][name][at : at + len(into)]
            if len(content) < len(into):
                raise CorruptionError(f"memory/{directory}/{name} ends before {at + len(into)}")
            into[:] = content
            return
        part = _find(self._shards, directory, name)[0]
        if at + len(into) > part.manifest.size_bytes:
            raise CorruptionError(f"memory/{directory}/{name} ends before {at + len(into)}")
        part.memory.read(at, into)

    def holders(self, directory: str, name: str) -> Sequence[MemoryFile]:
        """Return the holders of a file, the rank's own keeper first, parity last."""
        return [part.memory for part in _find(self._shards, directory, name)]

    def close(self) -> None:
        """Release the memory."""
        self._records.clear()
        self._shards.clear()
        for memory in self._memories:
            memory.close()


_File = TypeVar("_File")


def _find(files: Mapping[str, Mapping[str, _File]], directory: str, name: str) -> _File:
    try:
        return files[directory][name]
    except KeyError:
        raise CorruptionError(f"memory/{directory}/{name} is missing") from None


@dataclass
class _KeeperContents:
    """The contents of one keeper."""

    parts: list[HeldPart] = field(default_factory=list[HeldPart])
    parities: list[HeldParity] = field(default_factory=list[HeldParity])
    memories: dict[int, OpenMemory] = field(default_factory=dict[int, OpenMemory])

    @classmethod
    def of_remote(cls, address: str, token: str) -> _KeeperContents:
        """Return the contents of a keeper behind a door; empty if it cannot be reached."""
        contents, keeper = cls(), RemoteKeeper(address, token)
        try:
            listed = keeper.contents()
        except StorageError:
            return contents
        contents.memories = {number: RemoteMemory(keeper, number) for number, _ in listed.arenas}
        memories = contents.memories
        contents.parts = [
            HeldPart(each.manifest, memories[each.arena])
            for each in listed.versions
            if each.arena in memories
        ]
        contents.parities = [
            HeldParity(each, memories[each.arena])
            for each in listed.parities
            if each.arena in memories
        ]
        return contents

    @classmethod
    def of(
        cls, address: str, token: str, name: str, on_silent: Callable[[str], None]
    ) -> _KeeperContents:
        """Return the contents of the keeper there; empty if it is missing or silent."""
        contents = cls()
        try:
            keeper = KeeperClient.connect(address, token, name, REACH_S)
        except StorageError:
            return contents
        try:
            older_bytes = sum(each.size_bytes for each in keeper.older)
            frame = keeper.contents(REACH_S + older_bytes / _DIGEST_BYTES_PER_S)
        except StorageError as error:
            on_silent(str(error))
            return contents
        else:
            for version in frame.versions:
                memory = contents.memories[version.arena] = keeper.take(version.arena)
                contents.parts.append(HeldPart(version.manifest, memory))
            for parity in frame.parities:
                memory = contents.memories[parity.arena] = keeper.take(parity.arena)
                contents.parities.append(HeldParity(parity, memory))
            return contents
        finally:
            keeper.close(0)


def _as_single_file(part: HeldPart) -> HeldPart:
    """Return the part as one file: parts in memory have no separate frozen file."""
    if not part.manifest.frozen_bytes:
        return part
    manifest = msgspec.structs.replace(part.manifest, format=FORMAT, frozen=msgspec.UNSET)
    return part._replace(manifest=manifest)


def _is_complete(manifests: list[Manifest]) -> bool:
    """Return whether these are all parts of one version, with one plan and equal replicas."""
    first = manifests[0]
    agreed = {(each.job, each.world, each.plan) for each in manifests}
    if len(agreed) > 1 or {each.rank for each in manifests} != set(range(first.world)):
        return False
    return not find_disagreements({each.rank: each.samples for each in manifests})


def _records(manifests: list[Manifest]) -> dict[str, bytes]:
    """Return the files beside the shards, in order of ranks."""
    first = manifests[0]
    files = {manifest_name(each.rank): seal(each) for each in manifests}
    commit = Commit(
        job=first.job,
        place=first.place,
        world=first.world,
        time_ns=0,
        plan=first.plan,
        size_bytes=sum(each.size_bytes for each in manifests),
        manifests=tuple(
            ManifestEntry(rank, name, len(data), digest_of(data))
            for rank, (name, data) in enumerate(files.items())
        ),
        origin={},
    )
    return files | {COMMIT: seal(commit)}
