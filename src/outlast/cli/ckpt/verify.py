"""`outlast ckpt verify`: comparison of every byte with its digest."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from cyclopts import Parameter

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores.catalog import CheckpointDamage, checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.catalog import verify as read_all
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.cli.ckpt.target_argument import open_target
from outlast.cli.output_stream import byte_progress, echo, print_json
from outlast.errors import EXIT_DONE, EXIT_USER_ERROR, CorruptionError, StorageError, UsageError
from outlast.text_formatting import duration, plural, size

_NAMED_MAX = 8


class DamagedPart(msgspec.Struct, frozen=True):
    """A damaged file, or chunk of a file, and the tensors stored there."""

    file: str
    chunk: int | None
    what: str
    tensors: tuple[str, ...]
    is_unreadable: bool = False  # a fault of the storage: the bytes may be whole


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one checkpoint; it is undamaged where `damages` is empty."""

    directory: str
    size_bytes: int
    seconds: float
    damages: list[DamagedPart]


def verify(
    target: str,
    *,
    step: int | None = None,
    every: Annotated[bool, Parameter(name="--all", negative=())] = False,
    json: bool = False,
) -> int:
    """Read every byte and report damage.

    Damage is reported by file, chunk and tensor.

    Exit code 0: no damage. 1: a checkpoint is damaged or cannot be read.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    step
        Step of the checkpoint (default: the newest).
    every
        Verify all checkpoints with a commit record, the newest first.
    json
        Print one JSON array.
    """
    chosen = open_target(target)
    if every and step is not None:
        raise UsageError("--all and --step exclude each other; give one of them")
    places = checkpoint_places(chosen.all_of_it()) if every else [chosen.choose(step)]
    if not places:  # not checked is not whole
        raise UsageError(f"{chosen.store.where} holds no checkpoints; nothing was verified")
    verdicts: list[VerifyReport] = []
    for place in places:
        verdicts.append(_verified(chosen.store, place))
        if not json:
            _print(verdicts[-1])
    if json:
        print_json(verdicts)
    return EXIT_USER_ERROR if any(verdict.damages for verdict in verdicts) else EXIT_DONE


def _verified(store: Store, place: SavePoint) -> VerifyReport:
    began = time.monotonic()
    size_bytes = 0
    try:
        checkpoint = open_checkpoint(store, place)
        size_bytes = checkpoint.size_bytes
        with byte_progress(f"step {place.step}") as advance:
            damages = read_all(checkpoint, advance)
    except (CorruptionError, StorageError) as error:
        damages = [
            CheckpointDamage(f"{store.where}/{place.directory}/{COMMIT}", None, str(error), ())
        ]
    return VerifyReport(
        directory=place.directory,
        size_bytes=size_bytes,
        seconds=time.monotonic() - began,
        damages=[DamagedPart(*damage) for damage in damages],
    )


def _print(verdict: VerifyReport) -> None:
    if not verdict.damages:
        rate = f"{size(round(verdict.size_bytes / verdict.seconds))}/s"
        read = f"{size(verdict.size_bytes)} in {duration(verdict.seconds)}, {rate}"
        echo(f"{verdict.directory}: whole ({read})")
        return
    echo(f"{verdict.directory}: {plural(len(verdict.damages), 'damage')}")
    for damage in verdict.damages:
        echo(f"  {damage.what}")
    lost = sorted({name for damage in verdict.damages for name in damage.tensors})
    if lost and len(verdict.damages) > 1:
        more = f" and {len(lost) - _NAMED_MAX} more" if lost[_NAMED_MAX:] else ""
        echo(f"  damaged in all: {', '.join(lost[:_NAMED_MAX])}{more}")
