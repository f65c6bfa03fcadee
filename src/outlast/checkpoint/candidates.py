"""What there is to load, newest first, in a directory and in durable storage behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from outlast.checkpoint.catalog import open_checkpoint, places, uncommitted
from outlast.checkpoint.record import Manifest, Place, manifest_name, unseal
from outlast.checkpoint.storage import Source
from outlast.errors import CorruptionError, StalledError, StorageError

OLDER = (
    "it is not known to be damaged, and may be read again later; say on_unreadable='older' to begin"
    " from an older one"
)


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint whose records are whole, by its directory, in `sources[at]`; or, without one,
    why there is none. `spoilt`: the first source has it as well, and damaged. `notes`: what was
    passed over on the way. `begun`: newer saves without a commit record, in words; `lost`: whether
    one of them has all its parts."""

    directory: str = ""
    at: int = 0
    spoilt: bool = False
    notes: tuple[str, ...] = ()
    begun: str = ""
    lost: bool = False
    unusable: str = ""
    unreachable: str = ""


def candidates(
    sources: Sequence[Source], job: str, step: int | None, *, older: bool = False
) -> Iterator[Candidate]:
    """Those of `job` (any, where that is empty) and `step` (any, where that is None), the newest
    first, and of each the first of `sources` that has it; at last one without a directory.

    The first source must answer; where another does not, that is a note, unless nothing is found
    elsewhere: then it may hold what is looked for. A checkpoint that no source can read, and not
    because it is damaged, ends it as well, unless `older` ones are as good.
    """
    try:
        there, silent = _listed(sources)
        newest = next(iter(there), None)
        begun, lost = _begun(sources[0], newest) if step is None else ("", False)
    except StorageError as error:
        yield Candidate(unreachable=str(error))
        return
    known = [(place, held) for place, held in there.items() if step in (None, place.step)]
    if step is not None and not known and not silent:
        steps = ", ".join(map(str, sorted({place.step for place in there}))) or "none"
        yield Candidate(unusable=f"{sources[0].where} has no checkpoint of step {step}; it has"
                        f" {steps}")  # fmt: skip
        return
    notes, whole = list(silent), False
    for place, held in known:
        unread = ""
        for at in held:
            try:
                checkpoint = open_checkpoint(sources[at], place)
                checkpoint.check()
            except StalledError as error:
                if at == 0:
                    yield Candidate(notes=tuple(notes), unreachable=str(error))
                    return
                notes.append(str(error))
                continue
            except (CorruptionError, StorageError) as error:
                notes.append(f"checkpoint {place.directory} is passed over: {error}")
                unread = unread or ("" if isinstance(error, CorruptionError) else str(error))
                continue
            if job and checkpoint.job != job:
                yield Candidate(
                    unusable=f"{checkpoint.where} is of job {checkpoint.job!r}, and this is"
                    f" {job!r}; nothing was touched; use a directory of its own"
                )
                return
            whole = True
            yield Candidate(place.directory, at, at > held[0] == 0, tuple(notes), begun, lost)
            notes.clear()
        if unread and not older:
            yield Candidate(notes=tuple(notes), unreachable=f"{unread}; {OLDER}")
            return
    if silent and not whole:
        yield Candidate(unreachable="; ".join(notes))
    else:
        yield Candidate(notes=tuple(notes), begun=begun, lost=lost)


def _begun(source: Source, newest: Place | None) -> tuple[str, bool]:
    """Return what is newer than `newest` and has no commit record, in words, and whether it lacks
    nothing else. Raises StorageError."""
    bound = newest.position if newest else (-1, -1, -1)
    found = [place for place in uncommitted(source) if place.position > bound]
    if not found:
        return "", False
    lost = [place for place in found if _has_all_parts(source, place)]
    first = (lost or found)[0].directory
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    why = (
        "has all its parts and no commit record: it lost it, or was not committed in time"
        if lost
        else "has no commit record: it is being written, or was never completed"
    )
    return f"{first}{more} in {source.where} {why}", bool(lost)


def _has_all_parts(source: Source, place: Place) -> bool:
    try:
        files = source.files(place.directory)
        data = source.get(place.directory, manifest_name(0)) if manifest_name(0) in files else b""
        world = unseal(data, Manifest, place.directory).world if data else 0
    except (CorruptionError, StorageError):
        return False
    return world > 0 and all(manifest_name(rank) in files for rank in range(world))


def _listed(sources: Sequence[Source]) -> tuple[dict[Place, list[int]], list[str]]:
    """Who holds which, newest first, and why some do not answer. Raises StorageError for the
    first."""
    held: dict[Place, list[int]] = {}
    silent: list[str] = []
    for at, source in enumerate(sources):
        try:
            found = places(source)
        except StorageError as error:
            if at == 0:
                raise
            silent.append(str(error))
            continue
        for place in found:
            held.setdefault(place, []).append(at)
    newest_first = sorted(held, key=lambda place: place.position, reverse=True)
    return {place: held[place] for place in newest_first}, silent
