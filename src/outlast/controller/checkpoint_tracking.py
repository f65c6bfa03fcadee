"""Checkpoints of the run: saves on request, failed saves, and the copy that a restart loads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from outlast import events
from outlast.controller.controller_state import ControllerTurn, WorkerRecord
from outlast.controller.inputs import Verify
from outlast.controller.lifecycle import run_ending
from outlast.controller.recovery import incident_response
from outlast.controller.recovery.deputies import deputies_of
from outlast.transport import messages

DURATIONS_MAX = 4


def request_save(turn: ControllerTurn, reason: str) -> None:
    """Close the generation and make the next one save first.

    No-op if a save is pending or the run is ending (it saves at its end).
    """
    state = turn.state
    draining = state.ending.drain_ns
    if state.saves.is_requested or draining or state.mode in ("stopping", "ended"):
        return
    state.saves.is_requested = True
    if state.mode == "open":
        incident_response.record_fault(
            turn, events.Fault(kind="save", detail=reason, t_ns=turn.now_ns), "report"
        )


def pending_request(turn: ControllerTurn) -> Literal["", "save", "drain"]:
    """Return the request that an opening generation makes of its ranks. A save is requested until
    its phase is complete, so that a joiner stands before the same phase as the others."""
    state = turn.state
    if state.ending.drain_ns:
        return "drain"
    if state.saves.is_requested:
        state.saves.is_requested = False
        state.saves.requested_n = state.progress.n
    return "save" if state.progress.n == state.saves.requested_n else ""


def on_save_failed(turn: ControllerTurn, body: messages.SaveFailed) -> None:
    """Note a failed save, or end the run if the save policy requires that."""
    state = turn.state
    if state.mode in ("stopping", "ended"):
        return
    failure = f"the checkpoint of step {body.step} failed: {body.error}"
    is_refused = len(deputies_of(state)) < len(state.progress.absent)  # the storage is well
    if not state.policy.stop or is_refused:
        copy = state.saves.on_disk
        resumes = f"from the checkpoint of step {copy.step}" if copy is not None else "anew"
        then = f"the run ends, and resumes {resumes}"
        then = then if state.ending.drain_ns else "training continues"
        turn.note(f"{failure}; older ones are kept, and {then}")
        return
    detail = (
        f"{failure}; the run ends (--on-save-failure stop); older checkpoints are kept: fix the"
        " storage, then resume with: outlast run --run-dir RUN_DIR ..."
    )
    fault = events.Fault(kind="storage", detail=detail, n=body.n, step=body.step, t_ns=turn.now_ns)
    run_ending.stop(turn, "gave_up", fault, detail)


def record_duration(turn: ControllerTurn, body: messages.Checkpointed) -> None:
    """Record how long a save to disk took, from its copy until it was durable."""
    saves = turn.state.saves
    saves.step_s = body.step_s or saves.step_s
    if body.tier == "disk" and body.flush_s > 0:
        taken_s = body.blocking_s + body.flush_s
        saves.durations_s = (*saves.durations_s, taken_s)[-DURATIONS_MAX:]


def on_checkpointed(turn: ControllerTurn, body: messages.Checkpointed) -> None:
    """Keep the newest complete copy; for equal phases the one in memory.

    In a run of several nodes keepers are reached on their own host only, unless they have doors.
    """
    saves, placement = turn.state.saves, turn.state.placement
    known = saves.checkpoint
    if body.tier == "memory" and placement.agents and not placement.shares_keepers:
        return
    if body.tier == "disk" and (saves.on_disk is None or body.n >= saves.on_disk.n):
        saves.on_disk = body
    if body.tier == "memory" and saves.is_from_disk:
        return
    if known is None or (body.n, body.tier == "memory") >= (known.n, known.tier == "memory"):
        turn.state.saves.checkpoint = body


def learn_copies(turn: ControllerTurn, workers: Iterable[WorkerRecord], n: int) -> None:
    """Take up copies in memory, up to phase n, that survivors on several hosts report: a later term
    has not received rank 0's reports of them."""
    if turn.state.placement.shares_keepers:
        for worker in workers:
            copy = worker.status.copy if worker.status else None
            if copy is not None and copy.n <= n:
                on_checkpointed(turn, copy)


def set_checkpoint(turn: ControllerTurn, checkpoint: messages.Checkpointed | None) -> None:
    """Replace the copy that a restart loads."""
    saves = turn.state.saves
    saves.checkpoint = checkpoint
    saves.is_from_disk = False
    if checkpoint is None or checkpoint.tier == "disk":
        saves.on_disk = checkpoint


def bar_copies(
    turn: ControllerTurn,
    newest: messages.Checkpointed | None,
    on_disk: messages.Checkpointed | None,
) -> None:
    """Keep the newest copies that are not barred: of any place, and on disk."""
    set_checkpoint(turn, newest)
    turn.state.saves.on_disk = on_disk


def on_host_lost(turn: ControllerTurn) -> None:
    """Record that copies in memory may be lost and must be searched again."""
    turn.state.saves.is_searched = False


def begin_searches(turn: ControllerTurn, *, from_disk: bool = False) -> None:
    """Reset the count of searches for a new restart. `from_disk`: it leaves out copies in
    memory."""
    saves = turn.state.saves
    saves.searches = 0
    if from_disk:
        set_checkpoint(turn, saves.on_disk)
    saves.is_from_disk = from_disk


def end_searches(turn: ControllerTurn) -> None:
    """End the search of a restart: later copies count, wherever they are."""
    turn.state.saves.is_from_disk = False


def search_checkpoint(turn: ControllerTurn) -> None:
    """Request the newest whole copy: CheckpointFound answers."""
    state = turn.state
    state.saves.is_searched = True
    state.saves.searches += 1
    turn.enter("verifying")
    turn.actions.append(
        Verify(
            generation=state.generation,
            bars=state.audit.bars,
            from_disk=state.saves.is_from_disk,
        )
    )


def search_checkpoint_again(turn: ControllerTurn) -> bool:
    """Search again, before any worker starts, if a host was lost since the copy was found.

    Copies in memory end with their hosts. Returns whether a search has begun.
    """
    state = turn.state
    copy = state.saves.checkpoint if state.progress.n else None
    if state.saves.is_searched or copy is None or copy.tier != "memory":
        return False
    if state.saves.searches > state.limits.attempts_max:
        return False  # a worker that cannot start from it fails, and its restart searches again
    turn.note(
        f"an agent was lost since the copy in memory at phase {copy.n} was found: searching again",
        level="info",
    )
    search_checkpoint(turn)
    return True
