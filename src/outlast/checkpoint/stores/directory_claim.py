"""A job's claim to its checkpoint directory, and the durable targets behind it.

Rank 0 makes the claim and informs all ranks; they check that they see the same directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from outlast.checkpoint.format.manifests import Lineage, SavePoint, resume_lineage
from outlast.checkpoint.rank_group import RankGroup
from outlast.checkpoint.stores import directory_ownership
from outlast.checkpoint.stores.catalog import (
    checkpoint_places,
    open_checkpoint,
    remove_uncommitted,
    uncommitted,
)
from outlast.checkpoint.stores.chunk_reader import IoTimeout
from outlast.checkpoint.stores.directory_ownership import Ownership
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.object_store import refuse_mistyped_url
from outlast.checkpoint.stores.store_interfaces import StoreSource
from outlast.checkpoint.upkeep.durable_targets import (
    DurableRule,
    open_target,
    open_targets,
    parse_durable,
)
from outlast.checkpoint.upkeep.retention_policy import Keep
from outlast.checkpoint.upkeep.retention_policy import parse_policy as parse_keep
from outlast.checkpoint.upkeep.upkeep_client import UpkeepSetup
from outlast.errors import (
    CorruptionError,
    InUseError,
    OutlastError,
    StalledError,
    StorageError,
    UsageError,
)


class LoadOrigin(NamedTuple):
    """The checkpoint that a run began from. `base`: origin of its line, "" for none."""

    place: SavePoint
    base: str


class Claim(NamedTuple):
    """A granted claim. `owned`: on rank 0 only. `token`: identifies the directory's owner."""

    lineage: Lineage
    token: str
    owned: Ownership | None


class _ClaimStatement(msgspec.Struct, frozen=True, array_like=True):
    """A statement of rank 0, then of each rank. `refused`: the script must be changed."""

    error: str = ""
    refused: bool = False
    token: str = ""
    lineage: Lineage | None = None


class Claimer:
    """Claims a checkpoint directory for the ranks of a job.

    `sources`: the directory first, then the durable targets. `save_s`: how long to wait for the
    keeper of a dead trainer and its writes.
    """

    def __init__(
        self,
        root: Folder,
        sources: Sequence[StoreSource],
        ranks: RankGroup,
        *,
        job: str,
        save_s: float,
        answer_s: float,
    ) -> None:
        self._root, self._sources, self._ranks = root, sources, ranks
        self._job, self._save_s = job, save_s
        self._patience = IoTimeout(answer_s)

    def make(self, loaded: LoadOrigin | None, branch: bool) -> Claim:
        """Claim the directory; all ranks call it together.

        `branch`: begin a line without having loaded anything. Raises on all ranks: UsageError where
        the directory belongs to another job, holds checkpoints that this run did not load, or
        differs between ranks; StorageError where it cannot be written.
        """
        owned, mine = None, _ClaimStatement()
        if self._ranks.rank == 0:
            owned, mine = self._examine(loaded, branch)
        claim_statement = self._exchange(mine)[0]
        _raise(claim_statement)
        assert claim_statement.lineage is not None
        why = ""
        if self._ranks.rank:
            why = directory_ownership.wait_until_visible(
                self._root.root, claim_statement.token, self._patience
            )
        try:
            for rank, each in enumerate(self._exchange(_ClaimStatement(why, refused=True))):
                if each.error:
                    raise UsageError(f"rank {rank}: {each.error}; nothing was saved")
        except BaseException:  # also if a rank died: then no rank saves here
            if owned:
                owned.close()
            raise
        return Claim(claim_statement.lineage, claim_statement.token, owned)

    def _examine(
        self, loaded: LoadOrigin | None, branch: bool
    ) -> tuple[Ownership | None, _ClaimStatement]:
        owned = None
        try:
            root = self._root.root
            owned = directory_ownership.take_ownership(
                root, self._job, self._save_s, self._patience
            )
            remove_uncommitted(self._root, self._may_be_written)
            lineage = self._line(loaded, branch)
        except OutlastError as error:
            if owned:
                owned.close()
            refused = isinstance(error, UsageError | InUseError)
            return None, _ClaimStatement(str(error), refused=refused)
        return owned, _ClaimStatement(token=owned.token, lineage=lineage)

    def _line(self, loaded: LoadOrigin | None, branch: bool) -> Lineage:
        newest_places: list[SavePoint] = []
        for source in self._sources:
            try:
                places = checkpoint_places(source)
            except StorageError:
                if source is self._root:
                    raise
                continue  # reported when it was opened; retried later
            refuse_others(source, places, self._job)
            newest_places += places[:1]
        newest = max(newest_places, key=lambda place: place.position, default=None)
        if newest and loaded is None and not branch:
            raise UsageError(
                f"{self._root.where} holds checkpoints, the newest of step {newest.step}, and this"
                " run has loaded none of them; nothing was saved; call load() first, or use"
                " Checkpointer(..., branch=True) to begin a line of its own beside them, or use"
                " another directory"
            )
        abandoned = uncommitted(self._root)
        tip = max([*newest_places, *abandoned], key=lambda place: place.position, default=None)
        place, base = loaded or (None, "")
        return resume_lineage(place, base, newest, tip)

    def _may_be_written(self, place: SavePoint) -> bool:
        """Return whether an earlier run's keeper may still write it."""
        return self._root.quiet_s(place.directory) < self._save_s

    def _exchange(self, statement: _ClaimStatement) -> list[_ClaimStatement]:
        answers = self._ranks.exchange(msgspec.msgpack.encode(statement))
        return [msgspec.msgpack.decode(each, type=_ClaimStatement) for each in answers]


def refuse_others(store: StoreSource, newest_first: Sequence[SavePoint], job: str) -> None:
    """Raise UsageError where the newest readable commit record is not of `job`."""
    for place in newest_first:
        try:
            found_job = open_checkpoint(store, place).job
        except StalledError:
            raise
        except (CorruptionError, StorageError):
            continue
        if found_job != job:
            raise UsageError(
                f"{store.where} holds checkpoints of job {found_job!r}, and this is {job!r}, which"
                " would load and delete them; use another directory"
            )
        return


def _raise(statement: _ClaimStatement) -> None:
    if statement.error and statement.refused:
        raise UsageError(statement.error)
    if statement.error:
        raise StorageError(statement.error)


Address: TypeAlias = str | Path


class Tiers:
    """A checkpoint directory, and durable targets behind it.

    Raises UsageError for a root that is no path, ConfigError for rules and targets that cannot be
    parsed. Opens nothing yet.
    """

    def __init__(
        self, root: Address, keep: str, durable: Address | Sequence[Address], answer_s: float
    ) -> None:
        if not str(root):
            raise UsageError(
                "the directory of checkpoints is '': nothing was started; give a path ('.' for the"
                " working directory)"
            )
        if "://" in str(root):
            raise UsageError(
                f"{root} cannot be saved to: a save is durable at the speed of a disk, or holds"
                f" memory for as long as the network takes; use Checkpointer('some/directory',"
                f" durable='{root}'), which carries each checkpoint there, and loads from there"
                " what the directory lacks"
            )
        refuse_mistyped_url(str(root))
        self.root = Folder(Path(root).absolute(), answer_s)  # also after an os.chdir
        self._keep: Keep | None = parse_keep(keep) if keep else None
        addresses = [durable] if isinstance(durable, str | Path) else durable
        self._durable = tuple(_parse_targets(each) for each in addresses)

    @property
    def plain(self) -> bool:
        """Return whether there is neither retention policy nor durable target."""
        return not (self._keep or self._durable)

    def check(self, job: str) -> list[str]:
        """Check the places to be written to; return the errors of targets that do not answer.

        Raises ConfigError or RefusedError for a target that cannot be one, UsageError where
        checkpoints of another job lie.
        """
        targets, silent = open_targets(self._durable, self.root.root)
        answering = [target.store for target in targets]
        errors = [str(error) for error in silent]
        for store in [] if self.plain else [self.root, *answering]:
            try:
                refuse_others(store, checkpoint_places(store), job)
            except StorageError as error:
                errors.append(str(error))
        return list(dict.fromkeys(errors))

    def sources(self) -> list[StoreSource]:
        """Return the sources to load from, the directory first; none is accessed yet."""
        return [self.root, *(open_target(each.address) for each in self._durable)]

    def setup(self, save_s: float) -> UpkeepSetup:
        """Return the first message of the upkeep process. `save_s`: deadline of a save."""
        root = str(self.root.root)
        return UpkeepSetup(root=root, keep=self._keep, durable=self._durable, save_s=save_s)


def _parse_targets(address: Address) -> DurableRule:
    """Return a target's rule with an absolute path: the copier has another working directory."""
    rule = (
        DurableRule(address=str(address)) if isinstance(address, Path) else parse_durable(address)
    )
    refuse_mistyped_url(rule.address)
    if "://" in rule.address:
        return rule
    return msgspec.structs.replace(rule, address=str(Path(rule.address).absolute()))
