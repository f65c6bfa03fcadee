"""Gate before the first parameter changes: all ranks vote.

One hook sees every optimizer of the process before any other hook does. The first protected one
that wants to step inside a phase brings the vote; the others of the same phase go through. In a
phase with an undo copy all do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from outlast.errors import PhaseError
from outlast.worker.groups.dynamo_opaque import opaque, opaque_class

Ask = Callable[[Optimizer], None]
OR_WITH_UNDO = "or run the function by session.run_with_undo, which copies the state first"


@opaque_class
class CommitGate:
    """Calls `ask` before a protected optimizer changes anything inside a phase.

    `ask`: None outside a phase, else what returns when the vote is won and
    raises otherwise.
    """

    def __init__(self, is_protected: Callable[[Optimizer], bool]) -> None:
        self._is_protected = is_protected
        self.ask: Ask | None = None
        self.is_free = False  # inside a phase, whatever it changes can be put back
        self.guarding = False  # True from the first phase on: steps outside phases are errors
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hooks."""
        self._handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        ask = self.ask
        if ask is None:
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
        if not self.is_free and torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - the only way to ask
            raise PhaseError(
                f"{type(optimizer).__name__}.step() inside backward (optimizer-in-backward): other"
                f" parameters would change before all ranks have voted; step after backward,"
                f" {OR_WITH_UNDO}"
            )
        # Optimizer.step is wrapped as a function, so the optimizer itself is args[0].
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            ask(optimizer)
            return None
        gated = _gate_closure(closure, lambda: ask(optimizer), once=not self.is_free)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": gated}
        return (optimizer, gated, *args[2:]), kwargs


def _gate_closure(
    closure: Callable[[], Any], ask: Callable[[], None], *, once: bool
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
        ask()
        return result

    return opaque(gated)
