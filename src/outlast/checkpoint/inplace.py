"""Saved values put back into the live ones, so that whoever holds a part of them sees it."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outlast.checkpoint import tree
from outlast.errors import CodecError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)


def same(live: Any, saved: Any) -> bool:
    """Whether both are written with the same bytes."""
    try:
        return tree.encode(live) == tree.encode(saved)
    except CodecError:  # a refused attempt left there what could never be saved
        return False


def settle(live: Any, saved: Any) -> Any:
    """`saved`, in the containers, arrays and tensors of `live` wherever their types agree.

    Both are values that `checkpoint.tree` can encode. Returns `live` itself where it could be made
    equal; what it no longer holds is left as it was.
    """
    if type(live) is not type(saved):
        return saved
    if type(live) in _MAPPINGS:
        kept = {key: settle(live[key], v) if key in live else v for key, v in saved.items()}
        live.clear()
        live.update(kept)
        return live
    if type(live) is list:
        pairs = zip(live, saved, strict=False)
        kept = [b if type(b) in _PLAIN else settle(a, b) for a, b in pairs]
        live[:] = kept + saved[len(live) :]
        return live
    if type(live) is tuple:
        parts = tuple(settle(a, b) for a, b in zip(live, saved, strict=False))
        parts += saved[len(live) :]
        whole = len(parts) == len(live) and all(a is b for a, b in zip(parts, live, strict=True))
        return live if whole else parts
    if type(live) is set:
        live.clear()
        live.update(saved)
        return live
    if isinstance(live, torch.Tensor):
        return _tensor(live, saved)
    if isinstance(live, np.ndarray) and _alike(live, saved) and live.flags.writeable:
        live[...] = saved
        return live
    return saved


def put_in_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Hyperparameters; a learning rate that is a tensor stays that tensor, where it is."""
    for name, value in values.items():
        live = group.get(name)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
            live.copy_(value)
        else:
            group[name] = copy.deepcopy(value)


@torch.no_grad()
def _tensor(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    # Neither memory that several elements share nor an inference tensor may be written to.
    if not _alike(live, saved) or not live.is_contiguous() or live.is_inference():
        return saved.to(live.device)
    return live.copy_(saved)


def _alike(live: Any, saved: Any) -> bool:
    return live.shape == saved.shape and live.dtype == saved.dtype
