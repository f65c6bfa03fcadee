"""Detection of gradients that are not finite, and of the rank that brought them.

The check is one norm of each gradient, fused where torch can (`_foreach_norm`), and one number for
the host: on CUDA it waits where the vote would wait next. A norm may overflow where all elements
are finite, so that only what it suspects is looked at element by element.

Replicas whose votes have found their gradients equal divide the pass: each of N looks at an N-th of
the elements, and one that finds something lets all of them look at all (nonfinite_sentinel.py).

Behind a reduction all ranks have the same gradients. A rank's own contribution is summed by a hook
on one early parameter, which backward reaches last: what is not finite anywhere on its way is not
finite there. Its copies are summed up once a gradient is suspected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from outlast.worker.groups.work_handles import opaque
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import local_shard

_EARLY = 8  # parameters from which the one with the hook is chosen
_HALF = (torch.float16, torch.bfloat16)
_MODULES_MAX = 4096  # watched in an attempt that is run again
WHOLE = 0, 1  # share of a rank that looks at all gradients
_COPIES_MAX = 64  # of contributions, before they are summed up: one for each backward


class GradientPart(NamedTuple):
    """The elements from `start` to `end` of a parameter's gradient."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int
    is_whole: bool

    def elements(self) -> torch.Tensor | None:
        """Return these elements; all that this rank has, where they are not one dense tensor."""
        gradient = self.parameter.grad
        if gradient is None or self.is_whole or not _is_dense(gradient):
            return gradient
        if not gradient.is_contiguous():
            return gradient
        return gradient.view(-1)[self.start : self.end] if self.start < self.end else None


def divide(
    named: Sequence[tuple[str, nn.Parameter]], alike: Collection[int], index: int, count: int
) -> list[GradientPart]:
    """Return what replica `index` of `count` looks at: of parameters whose `id` is in `alike` an
    equal share of all elements, the others whole. All replicas divide alike, whatever has a
    gradient."""
    total = sum(parameter.numel() for _, parameter in named if id(parameter) in alike)
    low, high, at = total * index // count, total * (index + 1) // count, 0
    parts = []
    for name, parameter in named:
        size = parameter.numel()
        start, end = 0, size
        if id(parameter) in alike:
            start = min(max(low - at, 0), size)
            end = min(max(high - at, start), size)
            at += size
        parts.append(GradientPart(name, parameter, start, end, end - start == size))
    return parts


def _is_dense(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is a plain tensor of real numbers: most are."""
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.is_floating_point()
        and not gradient.is_meta
    )


def _values(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return the elements that this rank holds of a gradient; None if there are none to look at."""
    if _is_dense(gradient):
        return gradient
    gradient = local_shard(gradient.detach())
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()  # noqa: SLF001 - uncoalesced: no sort only to look
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    is_number = gradient.is_floating_point() or gradient.is_complex()
    return gradient if is_number and gradient.numel() and gradient.device.type != "meta" else None


@torch.no_grad()
def nonfinite_gradient(named: Iterable[tuple[str, torch.Tensor]], what: str = "gradient of") -> str:
    """Return "gradient of NAME (3 of 256 elements)" of the first of these gradients, or of `what`
    else they are, that is not finite; "" if all are. Raises what torch raises for a type without
    norms."""
    alike: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for name, gradient in named:
        values = _values(gradient)
        if values is not None:
            alike.setdefault((values.dtype, values.device), []).append((name, values))
    for (dtype, device), gradients in alike.items():
        tensors = [values for _, values in gradients]
        wide = torch.float32 if dtype in _HALF else None
        # As clip_grad_norm_ does:
        norms = torch._foreach_norm(tensors, 2, dtype=wide)  # noqa: SLF001  # pyright: ignore[reportPrivateImportUsage]
        if not _are_finite(norms, device):
            for name, values in gradients:
                count = int(values.numel() - torch.isfinite(values).sum())
                if count:
                    return f"{what} {name} ({count} of {values.numel()} elements)"
    return ""


def _are_finite(norms: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Return whether norms are finite; by one wait for a device, and by fewer operations on the
    CPU, since each costs a tenth of a millisecond where its code is in no cache."""
    if device.type == "cpu":
        return all(map(math.isfinite, norms))
    return math.isfinite(torch.stack([*norms]).sum().item())


class GradientLook:
    """Looks at the gradients that step behind one vote, of each function of phases."""

    def __init__(self) -> None:
        self._plans: dict[str, tuple[object, list[GradientPart]]] = {}
        self._stepping: Sequence[Optimizer] = ()
        self.is_partial = False  # this rank has looked at its share only

    def forget(self) -> None:
        """An attempt begins."""
        self.is_partial = False

    def first(
        self,
        key: str,
        stepping: Mapping[int, Optimizer],
        share: tuple[int, int],
        protected: ProtectedState,
    ) -> str:
        """Look at this rank's share of the gradients of the optimizers `stepping`, by `id`; return
        the result of `nonfinite_gradient`. Optimizers keep their parameters (`check_groups`)."""
        sizes = [len(g["params"]) for each in stepping.values() for g in each.param_groups]
        mark = share, (*stepping,), sizes
        known, parts = self._plans.get(key, (None, []))
        if known != mark:
            parts = _plan(stepping.values(), share, protected)
            self._plans[key] = mark, parts
        self._stepping, self.is_partial = [*stepping.values()], share != WHOLE
        return nonfinite_gradient(_elements(parts))

    def again(self, protected: ProtectedState) -> str:
        """Look at all gradients, since another replica may have found what is in its share."""
        return nonfinite_gradient(_elements(_plan(self._stepping, WHOLE, protected)))


def _plan(
    stepping: Iterable[Optimizer], share: tuple[int, int], protected: ProtectedState
) -> list[GradientPart]:
    wanted = {id(p) for each in stepping for g in each.param_groups for p in g["params"]}
    alike = {id(parameter) for _, parameter in protected.audited}
    parts = divide([*protected.tree.named_parameters()], alike, *share)
    return [part for part in parts if id(part.parameter) in wanted]


def _elements(parts: Iterable[GradientPart]) -> Iterator[tuple[str, torch.Tensor]]:
    for part in parts:
        elements = part.elements()
        if elements is not None:
            yield part.name, elements


def nonfinite_weight(protected: ProtectedState, before: Mapping[str, torch.Tensor]) -> str:
    """Return "parameter NAME (3 of 256 elements)" of the first trained parameter that is not finite
    and was `before`, as `nonfinite_gradient` does."""
    optimizers = protected.optimizers.values()
    trained = {id(p) for each in optimizers for g in each.param_groups for p in g["params"]}
    named = [(n, p.data) for n, p in protected.tree.named_parameters() if id(p) in trained]
    if not nonfinite_gradient(named, "parameter"):
        return ""
    new = [(n, p) for n, p in named if n in before and not nonfinite_gradient([(n, before[n])])]
    return nonfinite_gradient(new, "parameter")


class OwnContribution:
    """This rank's own share of a gradient, before it is reduced over ranks."""

    def __init__(self, on_backward: Callable[[], None] = lambda: None) -> None:
        self._on_backward = on_backward  # called in each backward, inside of it
        self._handles: list[RemovableHandle] = []
        self._copies: list[torch.Tensor] = []
        self.has_run = False  # since `clear`

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Add a hook to an early parameter of each module; a small one, since its copy is cheap."""
        for module in modules.values():
            trained = (p for p in module.parameters() if p.requires_grad and p.numel())
            early = [p for p, _ in zip(trained, range(_EARLY), strict=False)]
            if early:
                chosen = min(early, key=lambda p: p.numel())
                self._handles.append(chosen.register_hook(self._hook()))

    def unwatch(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Forget the contributions: an attempt begins."""
        self._copies, self.has_run = [], False

    def is_finite(self) -> bool:
        """Return whether the contributions since `clear` are finite, as far as hooks have run."""
        return not nonfinite_gradient(("", each) for each in self._copies)

    def first_nonfinite(self) -> int:
        """Return the number of the first contribution that is not finite, -1 if all are."""
        finite = (bool(torch.isfinite(each).all()) for each in self._copies)
        return next((number for number, is_finite in enumerate(finite) if not is_finite), -1)

    @torch.no_grad()
    def _sum_up(self) -> None:
        if self._copies:
            sums = [each.abs().sum(dtype=torch.float32) for each in self._copies]
            self._copies = [torch.stack([each.to(sums[0].device) for each in sums]).sum()]

    def _hook(self) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            self.has_run = True
            self._on_backward()
            values = _values(gradient)
            if values is None:
                return
            self._copies.append(values.detach().clone())  # itself may become `.grad`
            if len(self._copies) > _COPIES_MAX:
                self._sum_up()

        return unserializable_hook(opaque(add))


def takes_hooks(module: nn.Module) -> bool:
    """Return whether hooks can be registered on a module: TorchScript's modules refuse them."""
    return not isinstance(module, torch.jit.ScriptModule)


class ModuleOutputs:
    """Outputs of modules in one attempt, to name the first one that is not finite."""

    def __init__(self) -> None:
        self._sums: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def watched(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Look at the outputs of the innermost modules that take hooks."""
        self._sums.clear()
        handles = [
            part.register_forward_hook(opaque(self._look(name)))
            for root, module in modules.items()
            for (name, part), _ in zip(
                module.named_modules(prefix=root), range(_MODULES_MAX), strict=False
            )
            if takes_hooks(part) and not any(map(takes_hooks, part.children()))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first_nonfinite(self) -> str:
        """Return "output of NAME" of the first module whose output was not finite, or ""."""
        return next((f"output of {name}" for name, s in self._sums if not torch.isfinite(s)), "")

    def _look(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        @torch.no_grad()
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and (values := _values(output)) is not None:
                self._sums.append((name, values.abs().sum(dtype=torch.float32)))

        return look


def has_own_step(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's `step` is not torch's, and may handle such gradients itself."""
    module = getattr(type(optimizer).step, "__module__", "")
    return not module.startswith("torch.")
