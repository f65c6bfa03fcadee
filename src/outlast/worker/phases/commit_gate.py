"""Gate before the first parameter changes: all ranks vote, and rules of that commit point.

One hook runs before every optimizer step of the process and before any other hook. The first step
of a protected optimizer inside a phase causes the vote; later steps of the same phase proceed. In a
phase with an undo copy all steps proceed. The rules: permanent changes of a phase follow its vote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from outlast.errors import PhaseError
from outlast.worker.groups.work_handles import opaque, opaque_class
from outlast.worker.phases.phase_attempt import PhaseAttempt
from outlast.worker.script.carried_variables import differing
from outlast.worker.state.optimizer_state import describe_foreign_optimizers
from outlast.worker.state.protected_state import ProtectedState

VoteHook = Callable[[Optimizer], None]
OR_WITH_UNDO = "or run the function by session.run_with_undo, which copies the state first"


@opaque_class
class CommitGate:
    """Hook that calls `vote` before a protected optimizer's step inside a phase.

    `vote`: None outside a phase; it returns if the optimizer may step and raises otherwise.
    """

    def __init__(self, is_protected: Callable[[Optimizer], bool]) -> None:
        self._is_protected = is_protected
        self.vote: VoteHook | None = None
        self.is_undoable = False  # all changes of the phase can be undone: steps need no vote
        self.guarding = False  # True from the first phase on: steps outside phases are errors
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hooks."""
        self._handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        vote = self.vote
        if vote is None:
            if self.guarding and self._is_protected(optimizer):
                raise PhaseError(
                    f"{type(optimizer).__name__}.step() outside session.run(): the other ranks"
                    " could not agree on it; call it inside the function that you give to run()"
                )
            return None
        if not self._is_protected(optimizer):
            raise PhaseError(
                f"{type(optimizer).__name__} steps inside a phase but is not protected:"
                " name it in session.protect(...)"
            )
        if not self.is_undoable and torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - the only way to ask
            raise PhaseError(
                f"{type(optimizer).__name__}.step() inside backward (optimizer-in-backward): other"
                f" parameters would change before all ranks have voted; step after backward,"
                f" {OR_WITH_UNDO}"
            )
        # Optimizer.step is wrapped as a function, so the optimizer itself is args[0].
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            vote(optimizer)
            return None
        gated = _gate_closure(closure, lambda: vote(optimizer), once=not self.is_undoable)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": gated}
        return (optimizer, gated, *args[2:]), kwargs


def _gate_closure(
    closure: Callable[[], Any], vote: Callable[[], None], *, once: bool
) -> Callable[[], Any]:
    calls = 0

    def gated() -> Any:
        nonlocal calls
        calls += 1
        if once and calls > 1:
            raise PhaseError(
                "the optimizer calls its closure more than once a step (LBFGS does): parameters"
                " change between the calls, so the step has no single commit point; take another"
                f" optimizer, {OR_WITH_UNDO}"
            )
        result = closure()
        vote()
        return result

    return opaque(gated)


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
            f"{describe_foreign_optimizers(protected.own)}"
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
