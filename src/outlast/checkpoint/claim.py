"""A job's claim to a directory, before its first save: the lock is taken, and the line is chosen.

Rank 0 does it, and tells all; the others look whether they see the same directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from outlast.checkpoint import ownership
from outlast.checkpoint.catalog import clean, open_checkpoint, places, uncommitted
from outlast.checkpoint.folder import Folder
from outlast.checkpoint.lineage import Lineage, resumed
from outlast.checkpoint.ownership import Ownership
from outlast.checkpoint.patience import Patience
from outlast.checkpoint.ranks import Ranks
from outlast.checkpoint.record import Place
from outlast.checkpoint.storage import Source
from outlast.errors import (
    CorruptionError,
    InUseError,
    OutlastError,
    StalledError,
    StorageError,
    UsageError,
)


class Loaded(NamedTuple):
    """The checkpoint that a run began from. `base`: where its line began, "" for nowhere."""

    place: Place
    base: str


class Claim(NamedTuple):
    """`owned`: on rank 0. `token`: what the directory's owner is known by."""

    lineage: Lineage
    token: str
    owned: Ownership | None


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's word, then each rank's. `refused`: whether the script must be changed."""

    error: str = ""
    refused: bool = False
    token: str = ""
    lineage: Lineage | None = None


class Claiming:
    """`sources`: the directory first, then what is carried on to. `save_s`: for the keeper of a
    trainer that has died, and for what it was writing."""

    def __init__(
        self, root: Folder, sources: Sequence[Source], ranks: Ranks, *, job: str, save_s: float,
        answer_s: float,
    ) -> None:  # fmt: skip
        self._root, self._sources, self._ranks = root, sources, ranks
        self._job, self._save_s = job, save_s
        self._patience = Patience(answer_s)

    def make(self, loaded: Loaded | None, branch: bool) -> Claim:
        """All ranks call it together. `branch`: begin a line without having loaded anything.

        Raises on all of them: UsageError where the directory is another's, or holds what this run
        did not load, or is not the same on all ranks; StorageError where it cannot be written.
        """
        owned, mine = None, _Said()
        if self._ranks.rank == 0:
            owned, mine = self._examine(loaded, branch)
        said = self._exchange(mine)[0]
        _raise(said)
        assert said.lineage is not None
        why = ""
        if self._ranks.rank:
            why = ownership.sees(self._root.root, said.token, self._patience)
        try:
            for rank, each in enumerate(self._exchange(_Said(why, refused=True))):
                if each.error:
                    raise UsageError(f"rank {rank}: {each.error}; nothing was saved")
        except BaseException:  # a rank that is gone as well: nobody saves here
            if owned:
                owned.close()
            raise
        return Claim(said.lineage, said.token, owned)

    def _examine(self, loaded: Loaded | None, branch: bool) -> tuple[Ownership | None, _Said]:
        owned = None
        try:
            root = self._root.root
            owned = ownership.take(root, self._job, self._save_s, self._patience)
            clean(self._root, self._may_be_written)
            lineage = self._line(loaded, branch)
        except OutlastError as error:
            if owned:
                owned.close()
            refused = isinstance(error, UsageError | InUseError)
            return None, _Said(str(error), refused=refused)
        return owned, _Said(token=owned.token, lineage=lineage)

    def _line(self, loaded: Loaded | None, branch: bool) -> Lineage:
        found: list[Place] = []
        for source in self._sources:
            try:
                there = places(source)
            except StorageError:
                if source is self._root:
                    raise
                continue  # told when it was opened; it is tried again
            refuse_others(source, there, self._job)
            found += there[:1]
        newest = max(found, key=lambda place: place.position, default=None)
        if newest and loaded is None and not branch:
            raise UsageError(
                f"{self._root.where} holds checkpoints, the newest of step {newest.step}, and this"
                " run has loaded none of them; nothing was saved; call load() first, or say"
                " Checkpointer(..., branch=True) to begin a line of its own beside them, or use"
                " another directory"
            )
        left = uncommitted(self._root)
        tip = max([*found, *left], key=lambda place: place.position, default=None)
        place, base = loaded or (None, "")
        return resumed(place, base, newest, tip)

    def _may_be_written(self, place: Place) -> bool:
        """Return whether an earlier run's keeper may still write it."""
        return self._root.quiet_s(place.directory) < self._save_s

    def _exchange(self, said: _Said) -> list[_Said]:
        answers = self._ranks.exchange(msgspec.msgpack.encode(said))
        return [msgspec.msgpack.decode(each, type=_Said) for each in answers]


def refuse_others(store: Source, newest_first: Sequence[Place], job: str) -> None:
    """Raises UsageError where the newest checkpoint whose commit record can be read is not of
    `job`."""
    for place in newest_first:
        try:
            known = open_checkpoint(store, place).job
        except StalledError:
            raise
        except (CorruptionError, StorageError):
            continue
        if known != job:
            raise UsageError(
                f"{store.where} holds checkpoints of job {known!r}, and this is {job!r}: they would"
                " be taken for this one's, and deleted; use a place of its own"
            )
        return


def _raise(said: _Said) -> None:
    if said.error and said.refused:
        raise UsageError(said.error)
    if said.error:
        raise StorageError(said.error)
