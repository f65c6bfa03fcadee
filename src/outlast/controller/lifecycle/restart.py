"""Restart of all workers from a complete checkpoint."""

from __future__ import annotations

from outlast import events
from outlast.controller import checkpoint_tracking
from outlast.controller.controller_state import ControllerTurn
from outlast.controller.inputs import CheckpointFound
from outlast.controller.lifecycle import run_ending
from outlast.controller.recovery import reconfiguration, recovery_ladder
from outlast.controller.save_schedule import interval_updates
from outlast.transport import messages


def begin_restart(turn: ControllerTurn, reason: str) -> None:
    """Count the restart, and kill whoever still has a seat."""
    state = turn.state
    farthest = max(state.progress.reached[0], state.progress.n)
    origin = state.saves.checkpoint.n if state.saves.checkpoint else 0
    state.budgets.count_restart(farthest, origin)
    checkpoint_tracking.begin_searches(turn)
    interval_updates.record_restart(turn)
    turn.enter("clearing")
    for worker in tuple(state.members.workers.values()):
        if worker.seat >= 0:
            turn.kill(worker.name, turn.blame(worker, "requested", reason))


def verify_when_clear(turn: ControllerTurn) -> None:
    """Nobody is left who could write or remove a checkpoint: it can be looked at."""
    state = turn.state
    if any(worker.seat >= 0 for worker in state.members.workers.values()):
        return
    checkpoint_tracking.search_checkpoint(turn)


def on_checkpoint_found(turn: ControllerTurn, event: CheckpointFound) -> None:
    """Start from what is whole, which may be older than the newest that was ever complete."""
    state = turn.state
    if state.mode != "verifying" or event.generation != state.generation:
        return
    hoped = state.saves.checkpoint
    found = event.checkpoint
    checkpoint_tracking.set_checkpoint(turn, found)
    n, step = (found.n, found.step) if found else (0, 0)
    in_memory = found is not None and found.tier == "memory"
    if found is None and state.audit.undecided:
        detail = "replicas differ, and no copy from before the last agreement is whole"
        cause = recovery_ladder.root_fault(state.incident.faults)
        run_ending.stop(turn, "gave_up", cause, detail)
        return
    if hoped is not None and (n, in_memory) < (hoped.n, hoped.tier == "memory"):
        _correct(turn, hoped, n, step)
    interval_updates.record_found(turn)
    reconfiguration.start_over(turn, n, step)


def _correct(turn: ControllerTurn, hoped: messages.Checkpointed, n: int, step: int) -> None:
    """Decide again, for the copies that exist: the earlier decision cannot be carried out."""
    state = turn.state
    what = "copy in memory" if hoped.tier == "memory" else "checkpoint"
    origin = f"the checkpoint at phase {n}" if n else "the beginning"
    turn.emit(
        events.Decided(
            t_ns=turn.now_ns,
            incident=state.incident.number,
            generation=state.generation,
            verdict="redo",
            rung="restart",
            n=n,
            step=step,
            replaced=(),
            reason=f"the {what} at phase {hoped.n} (step {hoped.step}) is not whole: everybody"
            f" starts from {origin} (step {step}) instead",
        )
    )


def start_unverified(turn: ControllerTurn) -> None:
    """No answer in time: what was said to be complete is all that is known."""
    state = turn.state
    turn.note(
        f"the checkpoints could not be read within {state.limits.join_s:g} s (limit join_s); the"
        " newest one is taken as it is"
    )
    checkpoint = state.saves.checkpoint
    interval_updates.record_found(turn)
    reconfiguration.start_over(
        turn, checkpoint.n if checkpoint else 0, checkpoint.step if checkpoint else 0
    )
