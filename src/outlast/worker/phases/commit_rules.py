"""Rules of the commit point: all that a phase changes for good happens after one vote."""

from __future__ import annotations

from outlast.errors import PhaseError
from outlast.worker.phases.attempt import PhaseAttempt
from outlast.worker.phases.commit_gate import OR_WITH_UNDO
from outlast.worker.script.carried_variables import differing
from outlast.worker.state.optimizer_state import strangers
from outlast.worker.state.protected_state import ProtectedState


def must_not_have_written(attempt: PhaseAttempt) -> None:
    """Check before the vote that weights and moments are unchanged, or an undo copy is kept."""
    if attempt.has_copy:
        return
    written = attempt.weights.changed() if attempt.weights is not None else ""
    if name := attempt.undo.changed_parameter() or written:
        raise PhaseError(
            f"{attempt.key} changed {name} before the vote: a redo would change it twice; change"
            " parameters in a protected optimizer's step, behind it, or between phases (gradients"
            " at other weights, as SAM takes them, can be had of copies:"
            f" torch.func.functional_call), {OR_WITH_UNDO}"
        )


def must_leave_no_gradient(attempt: PhaseAttempt, protected: ProtectedState) -> None:
    """Check at the end of a phase without a step that it leaves nothing for the next one."""
    if not attempt.has_copy and attempt.undo.leaves_gradients():
        raise PhaseError(
            f"{attempt.key} computed gradients and no protected optimizer stepped: they would leak"
            " into the next phase; step, or clear them before the function returns"
            f"{strangers(protected.own)}"
        )


def must_have_waited(pending: int, attempt: PhaseAttempt) -> None:
    """Check before the vote, and at the end, that no collective is under way."""
    if pending:
        where = "at its end" if attempt.vote_ns else "before the vote (optimizer.step)"
        raise PhaseError(
            f"{pending} asynchronous collectives of {attempt.key} were not waited for {where}:"
            " their results would be applied on some ranks only"
        )


def must_not_have_chosen(attempt: PhaseAttempt, choices: bytes) -> None:
    """Check at the end that `choices` (drawn numbers, own objects) are as they were at the vote."""
    if choices != attempt.choices:
        raise PhaseError(
            f"{attempt.key} drew random numbers or changed {differing(attempt.choices, choices)}"
            " after optimizer.step: a replacement worker could not know it; do it before the step"
            " or between phases (or wrap an object that is equal on all ranks in"
            f" outlast.Replicated), {OR_WITH_UNDO}"
        )
