"""Vote before the first parameter changes, and rules of that commit point.

One hook runs before every optimizer step of the process and before any other hook. The first step
of a protected optimizer inside a phase causes the vote; later steps of the same phase proceed. In a
phase with an undo copy all steps proceed. The rules ensure that permanent changes follow the vote.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from outlast.errors import PhaseError
from outlast.worker.groups.work_handles import opaque, opaque_class
from outlast.worker.phases.phase_attempt import PhaseAttempt
from outlast.worker.script.carried_variables import differing_names
from outlast.worker.state.optimizer_state import describe_foreign_optimizers
from outlast.worker.state.protected_modules import ProtectedModules
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import local_shard

_WHOLE_GRADIENTS = (type(None), torch.Tensor)  # no DTensors
VoteHook = Callable[[Optimizer], None]
OR_WITH_UNDO = "or run the function by session.run_with_undo, which copies the state first"


@opaque_class
class CommitGate:
    """Hook that calls `vote` before a protected optimizer's step inside a phase.

    `vote`: None outside a phase; it returns if the optimizer may step and raises otherwise.
    """

    def __init__(
        self,
        is_protected: Callable[[Optimizer], bool],
        refuse_child: Callable[[], None] = lambda: None,
    ) -> None:
        """`refuse_child`: called in a forked child before its step is refused, so that the worker
        ends with an error as well."""
        self._is_protected, self._refuse_child = is_protected, refuse_child
        self.vote: VoteHook | None = None
        self.is_undoable = False  # all changes of the phase can be undone: steps need no vote
        self.guarding = False  # True from the first phase on: steps outside phases are errors
        self._pid = os.getpid()
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hooks."""
        self._handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        vote = self.vote
        if os.getpid() != self._pid:
            if not self._is_protected(optimizer):
                return None  # what it changes in shared memory is found at the vote
            self._refuse_child()
            raise PhaseError(
                f"{type(optimizer).__name__}.step() in a process that the script has forked: the"
                " job would not get what it trains; step in the script's own process, inside"
                " session.run()"
            )
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
                " change between the calls, so the step has no single commit point; use another"
                f" optimizer, {OR_WITH_UNDO}"
            )
        result = closure()
        vote()
        return result

    return opaque(gated)


def must_not_nest(what: str, attempt: PhaseAttempt | None) -> None:
    """Check that no phase of the script is under way. Raises PhaseError."""
    if attempt is not None:
        raise PhaseError(
            f"{what} inside session.run ({attempt.key}): a second attempt at that phase would begin"
            " it, or draw its batches, a second time; call the functions of a phase themselves, and"
            " loop outside: for batch in session.batches(loader): session.run(step, batch)"
        )


def prepare_vote(attempt: PhaseAttempt, protected: ProtectedState) -> None:
    """End pending work of DDP and FSDP2, and check that weights are unchanged."""
    protected.settle()  # first: gathered parameters hide the shards
    must_not_have_written(attempt)
    if not attempt.has_copy:
        must_have_reduced(protected)


def must_have_reduced(protected: ProtectedState) -> None:
    """Check before the vote that no gradient is a partial sum over ranks, as a DTensor may be."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    sharded = (p for p in protected.tree.parameters() if type(p.grad) not in _WHOLE_GRADIENTS)
    for parameter in sharded:
        if any(each.is_partial() for each in getattr(parameter.grad, "placements", ())):
            named = protected.tree.named_parameters()
            name = next(name for name, each in named if each is parameter)
            raise PhaseError(
                f"the gradient of {name} is a partial sum (DTensor's Partial, as SequenceParallel"
                " leaves it): optimizer.step would sum it over the ranks after the vote; do it"
                " before the step, parameter.grad ="
                f" parameter.grad.redistribute(placements=parameter.placements), {OR_WITH_UNDO}"
            )


def must_not_have_written(attempt: PhaseAttempt) -> None:
    """Check before the vote that weights and moments are unchanged, or an undo copy is kept."""
    attempt.undo.mark_written()
    if attempt.has_copy:
        return
    written = attempt.weights.changed() if attempt.weights is not None else ""
    if name := attempt.undo.changed_parameter() or written:
        raise PhaseError(
            f"{attempt.key} changed {name} before the vote: a redo would change it twice; change"
            " parameters in a protected optimizer's step, after it, or between phases (for"
            " gradients at other weights, as in SAM, use copies:"
            f" torch.func.functional_call), {OR_WITH_UNDO}"
        )


def must_leave_no_gradient(attempt: PhaseAttempt, protected: ProtectedState) -> None:
    """Check at the end of a phase without a step that it leaves no gradients to the next one."""
    if not attempt.has_copy and attempt.undo.leaves_gradients():
        raise PhaseError(
            f"{attempt.key} computed gradients and no protected optimizer stepped: they would leak"
            " into the next phase; step, or clear them before the function returns (a step over"
            " several batches: session.batches(loader, batches_per_step=N) yields lists of them)"
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
    """Check at the end that `choices` (drawn numbers, own objects) are unchanged since the vote."""
    if choices != attempt.choices:
        raise PhaseError(
            f"{attempt.key} drew random numbers or changed"
            f" {differing_names(attempt.choices, choices)} after optimizer.step: a replacement"
            " worker does not repeat that; do it before the step or between phases (or wrap an"
            f" object that is equal on all ranks in outlast.Replicated), {OR_WITH_UNDO}"
        )


STEPS_WATCHED = 3  # of each function
PHASES_WATCHED = 64  # of each function, where none of them steps


class _Found(NamedTuple):
    """Gradient at the start of a phase."""

    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    gradient: weakref.ref[torch.Tensor]
    version: int
    was_zero: bool = False  # of a shard, to which FSDP2 adds without autograd's hooks

    def has_grown(self) -> bool:
        """Return whether FSDP2 has added to this gradient, and it was not cleared before."""
        parameter = self.parameter()
        now = None if parameter is None else parameter.grad
        if now is None or now is not self.gradient() or self.was_zero:
            return False
        return now._version == self.version  # noqa: SLF001 - FSDP2 adds to the shard, others to the DTensor

    def is_left(self, *, unchanged: bool = False) -> bool:
        """Return whether its parameter still has this gradient and it is not zero."""
        parameter = self.parameter()
        now = None if parameter is None else parameter.grad
        if now is None or now is not self.gradient():
            return False
        if unchanged and now._version != self.version:  # noqa: SLF001 - torch's own counter of changes
            return False
        now = local_shard(now)
        return bool((now.coalesce().values() if now.is_sparse else now).any())


class LeftoverGradients:
    """Gradients that a phase finds, does not clear, and steps with; such a step is refused.

    A redo and a successor begin with zero gradients, so that such a step would differ after a
    failure. Hooks in the first phases of each function detect whether backward adds to gradients
    that were present. They cannot detect uses where the script's code reads `.grad`: the second
    step of such a function is rehearsed once, and its results from zero gradients are compared.

    `reads`: whether a function's own code reads gradients.
    """

    def __init__(self, reads: Callable[[str], bool] = lambda _key: False) -> None:
        self._reads = functools.cache(reads)
        self._steps = Counter[str]()
        self._phases = Counter[str]()
        self._found: dict[int, _Found] = {}
        self._had: set[int] = set()  # gradient present when backward reached the parameter
        self._reached: set[int] = set()  # parameters with a gradient from backward
        self._used: dict[int, str] = {}  # parameters whose old gradient backward added to
        self._by_hand: dict[str, tuple[int, int]] = {}  # the generation and phase of a rehearsal

    def rehearsed(self, key: str, flags: Iterable[bytes], place: tuple[int, int]) -> None:
        """Record a rehearsal of function `key` in this generation and phase; `flags`: by rank,
        whether its code reads gradients."""
        if any(flags):
            self._by_hand[key] = place

    def is_due(self, key: str, place: tuple[int, int]) -> bool:
        """Return whether the next step must be rehearsed, once and equally on all ranks. False in
        another generation, since its new ranks lack the record."""
        before = self._by_hand.get(key, place)
        if before == place:
            return False
        del self._by_hand[key]
        return before[0] == place[0]

    @contextmanager
    def watched(self, key: str, modules: ProtectedModules) -> Iterator[None]:
        """Watch one attempt of function `key`."""
        handles: list[torch.utils.hooks.RemovableHandle] = []
        if self._steps[key] < STEPS_WATCHED and self._phases[key] < PHASES_WATCHED:
            for name, parameter in modules.named_parameters():
                if parameter.grad is not None and parameter.requires_grad:
                    handles += self._watch(name, parameter, parameter.grad)
        self._phases[key] += bool(handles)
        self._had.clear()
        self._reached.clear()
        self._used.clear()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._found.clear()

    def _watch(
        self, name: str, parameter: torch.nn.Parameter, gradient: torch.Tensor
    ) -> list[torch.utils.hooks.RemovableHandle]:
        number = id(parameter)
        shard = local_shard(gradient)
        is_shard = shard is not gradient
        was_zero = is_shard and not shard.any()
        references = weakref.ref(parameter), weakref.ref(gradient)
        stale = _Found(name, *references, gradient._version, was_zero)  # noqa: SLF001 - torch's own counter of changes
        self._found[number] = stale

        def reached(_new: torch.Tensor) -> None:
            self._had.discard(number)
            if stale.is_left(unchanged=True):
                self._had.add(number)

        def added(_parameter: torch.Tensor) -> None:  # not called by autograd.grad
            has_grown = is_shard and stale.has_grown()
            if (number in self._had or has_grown) and number not in self._reached:
                self._used[number] = name
            self._reached.add(number)

        return [
            parameter.register_hook(reached),
            parameter.register_post_accumulate_grad_hook(added),
        ]

    def must_not_be_used(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        """Raise PhaseError if `optimizer` is about to step with a leftover gradient."""
        if not self._found:
            return
        self._steps[key] += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                stale = self._found.get(id(parameter))
                if stale is None:
                    continue
                # A gradient written by hand may be new: the second step's rehearsal decides.
                is_stale = id(parameter) not in self._reached and stale.is_left(
                    unchanged=self._reads(key)
                )
                if is_stale or id(parameter) in self._used:
                    raise PhaseError(
                        f"{key} steps with a gradient of {stale.name} from before the phase: a"
                        " redo, or a replacement worker, starts with zeros there; compute all"
                        " gradients of a step in its own phase, and first clear the old ones"
                        " (optimizer.zero_grad())"
                    )

    def must_not_be_read(self, key: str, refuse: Callable[[str, str], None]) -> None:
        """Call `refuse` if a phase that does not step may have read a leftover gradient."""
        if not (self._found and self._reads(key)):
            return
        for stale in self._found.values():
            if stale.is_left(unchanged=True):
                refuse(
                    f"{key} reads .grad while {stale.name} has a gradient of another phase, which"
                    " a redo, or a replacement worker, does not have",
                    "read gradients in the phase that computes them, and clear them there",
                )
                return


def note_uncounted_step(
    attempt: PhaseAttempt, steps: int, note_once: Callable[[str, str], None]
) -> None:
    """Note an optimizer's step that counts as none of the run's, before its first one."""
    if attempt.kind == "eval" and not steps:
        note_once(
            f"optimizer steps in {attempt.key} are not counted, since no batch was drawn from"
            " session.batches before it: session.step_index stays 0, and checkpoints and faults of"
            " a step do not occur; loop over session.batches(loader, ...), or without a loader over"
            " session.batches(None, until=STEPS)",
            "uncounted steps",
        )
