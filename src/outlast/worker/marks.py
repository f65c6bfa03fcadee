"""Whether an object has changed, without a copy of it."""

from __future__ import annotations

from typing import Any

import torch

from outlast.checkpoint import tree


class Mark:
    """What an object with a `state_dict` looks like now: its plain values, and where its tensors
    lie and how often they were written. An object that makes its tensors anew each time that it is
    asked says nothing by that, and counts as unchanged. Tensors at the addresses `apart_from`
    (others put those back) do not count."""

    def __init__(self, target: Any, apart_from: set[int]) -> None:
        self._target, self._apart_from = target, apart_from
        self._look, held = _look(target, apart_from)
        again, _also_held = _look(target, apart_from)
        self._telling = again == self._look
        del held  # until here, so that new tensors could not lie where these did

    def has_moved(self) -> bool:
        return self._telling and _look(self._target, self._apart_from)[0] != self._look


def _look(
    target: Any, apart_from: set[int]
) -> tuple[tuple[bytes, list[tuple[int, int]]], list[torch.Tensor]]:
    schema, tensors = tree.flatten(target.state_dict())
    places = [(t.data_ptr(), t._version) for t in tensors if t.data_ptr() not in apart_from]  # noqa: SLF001 - torch's own counter of changes
    return (schema, places), tensors
