"""Where a Checkpointer's checkpoints lie: its directory, and what they are carried on to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from outlast.checkpoint.catalog import places
from outlast.checkpoint.claim import refuse_others
from outlast.checkpoint.durable import Durable, parse
from outlast.checkpoint.folder import Folder
from outlast.checkpoint.retention import Keep
from outlast.checkpoint.retention import parse as parse_keep
from outlast.checkpoint.storage import Source
from outlast.checkpoint.targets import open_target, open_targets
from outlast.checkpoint.upkeep.protocol import Setup
from outlast.errors import StorageError, UsageError

Address: TypeAlias = str | Path


class Tiers:
    """A directory, and durable targets behind it.

    Raises UsageError for a root that is no path, ConfigError for rules and targets that cannot be
    read. Nothing is opened yet.
    """

    def __init__(
        self, root: Address, keep: str, durable: Address | Sequence[Address], answer_s: float
    ) -> None:
        if "://" in str(root):
            raise UsageError(
                f"{root} cannot be saved to: a save is durable at the speed of a disk, or holds"
                f" memory for as long as the network takes; say Checkpointer('some/directory',"
                f" durable='{root}'), which carries each checkpoint there, and loads from there"
                " what the directory lacks"
            )
        self.root = Folder(Path(root), answer_s)
        self._keep: Keep | None = parse_keep(keep) if keep else None
        given = [durable] if isinstance(durable, str | Path) else durable
        self._durable = tuple(_asked(each) for each in given)

    @property
    def plain(self) -> bool:
        """Whether nothing is to be done behind saves."""
        return not (self._keep or self._durable)

    def check(self, job: str) -> list[str]:
        """Make sure of what would be written to and deleted from; why some targets do not answer.

        Raises ConfigError or RefusedError for a target that cannot be one, UsageError where
        checkpoints of another job lie.
        """
        targets, silent = open_targets(self._durable, self.root.root)
        answering = [target.store for target in targets]
        told = [str(error) for error in silent]
        for store in [] if self.plain else [self.root, *answering]:
            try:
                refuse_others(store, places(store), job)
            except StorageError as error:
                told.append(str(error))
        return list(dict.fromkeys(told))

    def sources(self) -> list[Source]:
        """To load from: first the directory. None of them is asked anything."""
        return [self.root, *(open_target(each.address) for each in self._durable)]

    def setup(self, save_s: float) -> Setup:
        root = str(self.root.root.absolute())
        return Setup(root=root, keep=self._keep, durable=self._durable, save_s=save_s)


def _asked(address: Address) -> Durable:
    """Paths absolute: who carries there later has another working directory."""
    asked = Durable(address=str(address)) if isinstance(address, Path) else parse(address)
    if "://" in asked.address:
        return asked
    return msgspec.structs.replace(asked, address=str(Path(asked.address).absolute()))
