"""Checkpoints on request, and failed checkpoints."""

from __future__ import annotations

from typing import Literal

from outlast import events
from outlast.controller.controller_state import ControllerTurn
from outlast.controller.lifecycle import run_ending
from outlast.controller.recovery import incident_response
from outlast.transport import messages


def request_save(turn: ControllerTurn, reason: str) -> None:
    """The generation closes like any other, and the next one opens with the word to save. While
    one is asked for already, or the run is ending (and saves at its end), this changes nothing."""
    state = turn.state
    if state.save_wanted or state.drain_ns or state.mode in ("stopping", "ended"):
        return
    state.save_wanted = True
    if state.mode == "open":
        incident_response.notice(
            turn, events.Fault(kind="save", detail=reason, t_ns=turn.now_ns), "report"
        )


def pending_request(turn: ControllerTurn) -> Literal["", "save", "drain"]:
    """Return the request that an opening generation makes of its ranks. A save is requested until
    its phase is complete, so that a joiner stands before the same phase as the others."""
    state = turn.state
    if state.drain_ns:
        return "drain"
    if state.save_wanted:
        state.save_wanted, state.save_n = False, state.n
    return "save" if state.n == state.save_n else ""


def on_save_failed(turn: ControllerTurn, body: messages.SaveFailed) -> None:
    """A checkpoint could not be made: said, or the run's one cause to end, as its owner wants."""
    state = turn.state
    if state.mode in ("stopping", "ended"):
        return
    failure = f"the checkpoint of step {body.step} failed: {body.error}"
    if not state.policy.stop:
        turn.note(f"{failure}; older ones are kept, and training goes on")
        return
    detail = (
        f"{failure}; the run ends, as --on-save-failure stop asks for; older checkpoints are kept:"
        " fix the storage, then resume with: outlast run --run-dir RUN_DIR ..."
    )
    fault = events.Fault(kind="storage", detail=detail, n=body.n, step=body.step, t_ns=turn.now_ns)
    run_ending.stop(turn, "gave_up", fault, detail)
