"""Values that describe a rank's saves: settings of all of them, and one save's request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_disk import DiskFault
from outlast.config import LIMIT_MAX
from outlast.errors import UsageError

OnFailure: TypeAlias = Literal["warn", "raise"]
OnUnreadable: TypeAlias = Literal["raise", "older"]
WhenBusy: TypeAlias = Literal["wait", "skip"]


def check_options(
    save_s: float,
    answer_s: float,
    arenas: int,
    on_failure: str,
    when_busy: str,
    on_unreadable: str,
) -> None:
    """Raise UsageError for an option of a Checkpointer that would mean another one, or nothing."""
    for name, text, kind in (
        ("on_failure", on_failure, OnFailure),
        ("when_busy", when_busy, WhenBusy),
        ("on_unreadable", on_unreadable, OnUnreadable),
    ):
        if text not in (words := get_args(kind)):
            raise UsageError(
                f"{name}={text!r}: nothing was started; give {' or '.join(map(repr, words))}"
            )
    for name, seconds in (("save_s", save_s), ("answer_s", answer_s)):
        if not 0 < seconds <= LIMIT_MAX:
            raise UsageError(
                f"{name}={seconds}: nothing was started; give seconds above 0,"
                f" at most {LIMIT_MAX:g}"
            )
    if arenas < 1:
        raise UsageError(f"arenas={arenas}: nothing was started; give 1 or more")


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
