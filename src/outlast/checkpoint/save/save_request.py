"""Values that describe a rank's saves: settings of all of them, and one save's request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_disk import DiskFault

WhenBusy: TypeAlias = Literal["wait", "skip"]


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """Settings of all saves of one rank.

    `root`: the directory of checkpoints. `save_s`: deadline of a save in seconds. `arenas`: saves
    in flight at most. `when_busy`: policy for a save while all arenas are being written. `owner`:
    the token of `root`'s owner, "" where the caller checks that.
    """

    root: Path
    rank: int
    world: int
    job: str
    save_s: float = 1800.0
    arenas: int = 2
    when_busy: WhenBusy = "wait"
    owner: str = ""


@dataclass(frozen=True)
class SaveRequest:
    """One rank's part of a save.

    `shared`: encoded values that are equal on all ranks; `own`: this rank's alone. `shared`,
    `origin`, `parent` and `base` count on rank 0. `rank_specific`: names of tensors that may
    differ by rank, since each rank saves its own as well. `values`: digests of values that are no
    tensors. Without `to_disk` the copy stays in memory. `overlap`: a device's copies continue when
    `save` has returned, until `fence`. `faults` strike the keeper's disk (tests).
    """

    place: SavePoint
    tensors: Mapping[str, torch.Tensor]
    shared: bytes = b""
    own: bytes = b""
    origin: dict[str, str] = field(default_factory=dict)
    parent: str = ""
    base: str = ""
    rank_specific: Collection[str] = ()
    values: Mapping[str, bytes] = field(default_factory=dict)
    to_disk: bool = True
    overlap: bool = False
    faults: tuple[DiskFault, ...] = ()
