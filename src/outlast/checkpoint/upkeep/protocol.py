"""What a trainer says to the process behind its saves, and hears from it: JSON, a line each."""

from __future__ import annotations

import msgspec

from outlast.checkpoint.durable import Durable
from outlast.checkpoint.retention import Keep


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line. `keep`: None to delete nothing. `save_s`: how long a save may take."""

    root: str
    keep: Keep | None
    durable: tuple[Durable, ...]
    save_s: float


class Saving(msgspec.Struct, frozen=True, tag=True):
    """A save begins, which this keeper commits; it ends once that is done, or has failed."""

    keeper_pid: int


class Committed(msgspec.Struct, frozen=True, tag=True):
    """There is a new checkpoint."""


class Mend(msgspec.Struct, frozen=True, tag=True):
    """This checkpoint is damaged in the root, and a target has what is missing."""

    directory: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Nothing is saved any more: one more look, then the end, after so long at the latest."""

    timeout_s: float


class Failed(msgspec.Struct, frozen=True):
    """Said to the trainer, as a sentence."""

    error: str


Order = Saving | Committed | Mend | Finish
