"""Detection of gradients that are not finite, and of the rank that brought them.

The check is one norm of each gradient, fused where torch can (`_foreach_norm`), and one number for
the host: on CUDA it waits where the vote would wait next. A norm may overflow where all elements
are finite, so that only what it suspects is looked at element by element.

Behind a reduction all ranks have the same gradients. A rank's own contribution is summed by a hook
on one early parameter, which backward reaches last: what is not finite anywhere on its way is not
finite there. Sums stay on the device until a gradient is suspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from outlast.worker.groups.work_handles import opaque
from outlast.worker.state.tensor_digests import local_shard

_EARLY = 8  # parameters from which the one with the hook is chosen
_HALF = (torch.float16, torch.bfloat16)
_MODULES_MAX = 4096  # watched in an attempt that is run again


def _values(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return the elements that this rank holds of a gradient; None if there are none to look at."""
    gradient = local_shard(gradient.detach())
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()  # noqa: SLF001 - uncoalesced: no sort only to look
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    is_number = gradient.is_floating_point() or gradient.is_complex()
    return gradient if is_number and gradient.numel() and gradient.device.type != "meta" else None


@torch.no_grad()
def nonfinite_gradient(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return "gradient of NAME (3 of 256 elements)" of the first of these gradients that is not
    finite; "" if all are. Raises what torch raises for a type without norms."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, gradient in named:
        values = _values(gradient)
        if values is not None:
            alike.setdefault((values.device, values.dtype), []).append((name, values))
    for (_, dtype), gradients in alike.items():
        tensors = [values for _, values in gradients]
        wide = torch.float32 if dtype in _HALF else None
        # As clip_grad_norm_ does:
        norms = torch._foreach_norm(tensors, 2, dtype=wide)  # noqa: SLF001  # pyright: ignore[reportPrivateImportUsage]
        if not bool(torch.isfinite(torch.stack(norms).sum())):
            for name, values in gradients:
                count = int(values.numel() - torch.isfinite(values).sum())
                if count:
                    return f"gradient of {name} ({count} of {values.numel()} elements)"
    return ""


class OwnContribution:
    """This rank's own share of a gradient, before it is reduced over ranks."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._sum: torch.Tensor | None = None
        self.has_run = False  # since `clear`

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Add a hook to an early parameter of each module; a small one, since its sum is cheap."""
        for module in modules.values():
            trained = (p for p in module.parameters() if p.requires_grad and p.numel())
            early = [p for p, _ in zip(trained, range(_EARLY), strict=False)]
            if early:
                chosen = min(early, key=lambda p: p.numel())
                self._handles.append(chosen.register_hook(self._hook()))

    def clear(self) -> None:
        """Forget the sums: an attempt begins."""
        self._sum, self.has_run = None, False

    def is_finite(self) -> bool:
        """Return whether the contributions since `clear` are finite, as far as hooks have run."""
        return self._sum is None or bool(torch.isfinite(self._sum))

    def _hook(self) -> Callable[[torch.Tensor], None]:
        @torch.no_grad()
        def add(gradient: torch.Tensor) -> None:
            self.has_run = True
            values = _values(gradient)
            if values is None:
                return
            total = values.abs().sum(dtype=torch.float32)
            self._sum = total if self._sum is None else self._sum.to(total.device) + total

        return unserializable_hook(opaque(add))


class ModuleOutputs:
    """Outputs of modules in one attempt, to name the first one that is not finite."""

    def __init__(self) -> None:
        self._sums: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def watched(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Look at the outputs of the innermost modules."""
        self._sums.clear()
        handles = [
            part.register_forward_hook(opaque(self._look(name)))
            for root, module in modules.items()
            for (name, part), _ in zip(
                module.named_modules(prefix=root), range(_MODULES_MAX), strict=False
            )
            if not any(True for _ in part.children())
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
