"""Search for a complete checkpoint before a start."""

from __future__ import annotations

from outlast.controller.controller_state import ControllerTurn
from outlast.controller.inputs import Verify


def search_checkpoint(turn: ControllerTurn) -> None:
    """Ask for the newest that is whole: CheckpointFound answers."""
    state = turn.state
    state.looked = True
    state.looks += 1
    turn.enter("verifying")
    turn.actions.append(Verify(generation=state.generation, bars=state.audit.bars))


def search_checkpoint_again(turn: ControllerTurn) -> bool:
    """Before anybody is told to start. Copies in memory end with their hosts: what was found may be
    gone where an agent was lost since. Returns whether it must be looked for again."""
    state = turn.state
    copy = state.checkpoint if state.n else None
    if state.looked or copy is None or copy.tier != "memory":
        return False
    if state.looks > state.limits.attempts_max:
        return False  # whoever cannot start from it fails, and its restart looks again
    turn.note(
        f"an agent was lost since the copy in memory at phase {copy.n} was found: it is looked for"
        " again",
        level="info",
    )
    search_checkpoint(turn)
    return True
