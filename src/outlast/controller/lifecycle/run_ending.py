"""End of a run: done, drained, stopped on request, or failed with one cause."""

from __future__ import annotations

from functools import partial

from outlast import events
from outlast.controller.controller_state import S_NS, ControllerState, ControllerTurn
from outlast.controller.inputs import DrainRequested, EndDecided, EndRun
from outlast.controller.recovery import incident_response
from outlast.controller.recovery.root_fault import is_user_error
from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, EXIT_INTERRUPTED, EXIT_USER_ERROR
from outlast.transport import messages

_EXIT_CODES = {
    "done": EXIT_DONE,
    "user_error": EXIT_USER_ERROR,
    "gave_up": EXIT_GAVE_UP,
    "interrupted": EXIT_INTERRUPTED,
}
_NOTHING_TO_SAVE = ("clearing", "verifying")


def stop(turn: ControllerTurn, outcome: str, cause: events.Fault | None, reason: str) -> None:
    """Begin the end. A run that is done lets its workers leave; any other kills them now."""
    state = turn.state
    if state.mode in ("stopping", "ended"):
        return
    state.ending.result = EndRun(outcome=outcome, exit_code=_EXIT_CODES[outcome], cause=cause)
    if state.placement.agents:  # another node may have to end it
        n, step = _reached(state)
        turn.journal(EndDecided(outcome=outcome, n=n, step=step, cause=cause))
    turn.enter("stopping")
    workers = tuple(state.members.workers.values())
    for worker in workers:
        if worker.hello is None:
            turn.kill(worker.name, turn.blame(worker, "requested", reason))
    turn.send_all(
        (worker for worker in workers if worker.hello is not None and not worker.killed_ns),
        messages.Stop(ok=outcome == "done", reason=reason),
    )
    if outcome != "done":
        kill_all(turn, reason)


def _reached(state: ControllerState) -> tuple[int, int]:
    """Return the phases and steps that the run is known to have completed."""
    return max(state.progress.reached, (state.progress.n, state.progress.step))


def fail(turn: ControllerTurn, cause: events.Fault) -> None:
    """Stop with this cause, as a user error if it is one."""
    stop(turn, "user_error" if is_user_error(cause) else "gave_up", cause, cause.detail)


def kill_all(turn: ControllerTurn, reason: str) -> None:
    """Kill every worker, with one reason."""
    for worker in tuple(turn.state.members.workers.values()):
        turn.kill(worker.name, turn.blame(worker, "requested", reason))


def on_stop_requested(turn: ControllerTurn, reason: str, limit_s: float = 0.0) -> None:
    """End the run on request: drain at the first request, kill at the second. `limit_s`: of the
    drain, where it is not that of all runs."""
    state = turn.state
    ending = state.ending
    if state.mode in ("stopping", "ended"):
        kill_all(turn, reason)
    elif (
        ending.drain_ns
        or (state.progress.first and not state.progress.opened)
        or state.mode in _NOTHING_TO_SAVE
    ):
        interrupt(turn, reason)
    else:
        turn.journal(DrainRequested(reason=reason))
        restore_drain(turn, reason, limit_s)
        # All ranks must stop at one place: close the generation and make the next one drain.
        if state.mode == "open":
            fault = events.Fault(kind="requested", detail=reason, t_ns=turn.now_ns)
            incident_response.record_fault(turn, fault, "report")


def restore_drain(turn: ControllerTurn, reason: str, limit_s: float = 0.0) -> None:
    """Drain for this reason; the time limit begins now."""
    turn.state.ending.drain_reason = reason
    limit_s = limit_s or turn.state.limits.stop_s
    turn.state.ending.drain_ns = turn.now_ns + int(limit_s * S_NS)


def excuse(turn: ControllerTurn, gap_ns: int) -> None:
    """Extend the deadline of a drain by the launcher's stall."""
    if turn.state.ending.drain_ns:
        turn.state.ending.drain_ns += gap_ns


def interrupt(turn: ControllerTurn, reason: str) -> None:
    """End the run as interrupted: stop every worker."""
    cause = events.Fault(kind="requested", detail=reason, t_ns=turn.now_ns)
    stop(turn, "interrupted", cause, reason)


def finish_when_finished(turn: ControllerTurn) -> None:
    """End the run once every seat's script has ended in an open generation."""
    state = turn.state
    if state.audit.is_disputed:
        return
    if not state.progress.have_all(state.world, partial(_has_finished, state)):
        return
    if state.ending.drain_ns:
        interrupt(turn, state.ending.drain_reason)
    else:
        stop(turn, "done", None, "the run is done")


def _has_finished(state: ControllerState, seat: int) -> bool:
    worker = state.occupant(seat)
    return worker is not None and worker.finished


def lost_while_stopping(
    turn: ControllerTurn, fault: events.Fault, *, seated: bool, ours: bool
) -> None:
    """Record a worker's failure after the end of its run as the user's error."""
    ending = turn.state.ending
    end = ending.result
    assert end is not None
    bad = fault.kind == "killed" or (fault.kind == "exited" and fault.exit_code != 0)
    if end.outcome == "done" and seated and bad and not ours:
        ending.result = EndRun(outcome="user_error", exit_code=EXIT_USER_ERROR, cause=fault)


def end_when_empty(turn: ControllerTurn) -> None:
    """End the run once no worker is left."""
    if not turn.state.members.workers:
        end_now(turn)


def end_now(turn: ControllerTurn) -> None:
    """End the run at once, with its outcome."""
    state = turn.state
    end = state.ending.result
    assert end is not None
    n, step = _reached(state)
    turn.enter("ended")
    turn.actions.append(
        EndRun(outcome=end.outcome, exit_code=end.exit_code, cause=end.cause, n=n, step=step)
    )
