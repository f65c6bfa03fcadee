"""What there is to load, newest first, in a directory and in durable storage behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from outlast.checkpoint.catalog import open_checkpoint, places
from outlast.checkpoint.record import Place
from outlast.checkpoint.storage import Source
from outlast.errors import CorruptionError, StalledError, StorageError


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint whose records are whole, by its directory, in `sources[at]`; or, without one,
    why there is none. `spoilt`: the first source has it as well, and damaged. `notes`: what was
    passed over on the way."""

    directory: str = ""
    at: int = 0
    spoilt: bool = False
    notes: tuple[str, ...] = ()
    unusable: str = ""
    unreachable: str = ""


def candidates(sources: Sequence[Source], job: str, step: int | None) -> Iterator[Candidate]:
    """Those of `job` (any, where that is empty) and `step` (any, where that is None), the newest
    first, and of each the first of `sources` that has it; at last one without a directory.

    The first source must answer; where another does not, that is a note, unless nothing is found
    elsewhere: then it may hold what is looked for.
    """
    try:
        there, silent = _listed(sources)
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
                continue
            if job and checkpoint.job != job:
                yield Candidate(
                    unusable=f"{checkpoint.where} is of job {checkpoint.job!r}, and this is"
                    f" {job!r}; nothing was touched; use a directory of its own"
                )
                return
            whole = True
            yield Candidate(place.directory, at, at > held[0] == 0, tuple(notes))
            notes.clear()
    if silent and not whole:
        yield Candidate(unreachable="; ".join(notes))
    else:
        yield Candidate(notes=tuple(notes))


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
    newest_first = sorted(held, key=lambda place: (place.step, place.n), reverse=True)
    return {place: held[place] for place in newest_first}, silent
