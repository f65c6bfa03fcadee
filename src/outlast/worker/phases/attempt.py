"""One attempt at a phase."""

from __future__ import annotations

import dataclasses
from typing import Literal

from outlast.worker.phases.undo_copy import UndoCopy
from outlast.worker.phases.written_weights import WrittenWeights

Kind = Literal["step", "eval", "checkpoint", "epoch", "draw"]


@dataclasses.dataclass
class PhaseAttempt:
    """One try at one phase."""

    kind: Kind
    key: str
    undo: UndoCopy
    begin_ns: int
    weights: WrittenWeights | None = None  # where it votes before weights change
    has_copy: bool = False  # weights may change at any time, and it votes at its end
    vote_ns: int = 0
    choices: bytes = b""  # what the script had drawn and changed when it voted
    is_gated: bool = False  # an optimizer's step brought the vote, and not the phase's end
    waits: bool = False  # the slot `after` is written at the phase's end
    buffers: bytes = b""  # of the rank's own, at such a vote
    dry: bool = False
    rehearsed: bool = False  # refused at its gate because this function is new here
    disputed: bool = False  # refused because the ranks have just learned what differs by rank
    reports: dict[str, float] = dataclasses.field(default_factory=dict)


class AttemptUndone(Exception):  # noqa: N818 - control flow of the phase runner
    """The attempt is undone; the membership decides where it is tried again."""
