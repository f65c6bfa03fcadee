"""Digests of what a rank ended with, by name, so that a difference says where it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

READABLE = 600  # characters up to which a value is written out instead of hashed


def write_digests(session: Any, **parts: Any) -> None:
    """Write a digest of each part, and of torch's generator, for this rank."""
    parts |= {"steps": session.step_index, "random": torch.get_rng_state()}
    digests = {name: _digest(part) for name, part in parts.items()}
    path = Path(os.environ["DIGESTS"]) / f"{session.rank}.json"
    path.write_text(json.dumps(digests))


def _digest(part: Any) -> str:
    found = hashlib.sha256()
    text = _plain(part, found)
    if len(text) <= READABLE and "tensor" not in text:
        return text
    return hashlib.sha256(text.encode() + found.digest()).hexdigest()[:16]


def _plain(part: Any, found: Any) -> str:
    """The part in words; the bytes of its tensors go to `found`."""
    if isinstance(part, torch.nn.Module):
        return _plain(dict(part.state_dict()), found)
    if isinstance(part, torch.optim.Optimizer):
        return _plain(part.state_dict(), found)
    if isinstance(part, torch.Tensor):
        to_local = getattr(part, "to_local", None)  # a DTensor: what this rank holds of it
        data = (to_local() if to_local else part).detach().cpu().contiguous()
        found.update(data.flatten().view(torch.uint8).numpy().tobytes())
        return f"tensor {tuple(data.shape)} {data.dtype}"
    if type(part).__module__ == "numpy":
        found.update(part.tobytes())
        return f"array {part.shape} {part.dtype}" if part.shape else repr(part)
    if dataclasses.is_dataclass(part):
        return _plain(vars(part), found)
    if isinstance(part, Mapping):
        items = sorted(part.items(), key=lambda item: repr(item[0]))  # state has no order
        return "{" + ", ".join(f"{k!r}: {_plain(v, found)}" for k, v in items) + "}"
    if isinstance(part, (list, tuple)):
        return "[" + ", ".join(_plain(item, found) for item in part) + "]"
    return repr(part)
