"""Decisions of a run's earlier terms, read from its journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.controller.audit.audit_records import CopyBar
from outlast.controller.inputs import AnyEntry, CopiesBarred
from outlast.errors import RunDirError
from outlast.telemetry.segment_files import read_records

_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def read_journal(directory: Path, damaged: Callable[[str], None]) -> tuple[AnyEntry, ...]:
    """Return what earlier terms decided, oldest first.

    A launcher that was killed leaves a torn tail, on which nobody has acted: it goes to `damaged`,
    like any other damage. Raises RunDirError when a whole record is no entry that this version
    knows.
    """
    entries = []
    for record in read_records(directory, lambda damage: damaged(str(damage))):
        try:
            entries.append(_decoder.decode(record.payload))
        except msgspec.DecodeError as error:
            raise RunDirError(
                f"the journal in {directory} holds an entry that cannot be read ({error});"
                " nothing was changed; resume with the version that wrote it"
            ) from error
    return tuple(entries)


def bars_of(run_dir: Path) -> tuple[CopyBar, ...]:
    """Return which copies a run's audits have put out of use. Raises as `read_journal` does."""
    entries = read_journal(run_dir / "journal", lambda _: None)
    return tuple(
        CopyBar(one.after_n, one.generation) for one in entries if isinstance(one, CopiesBarred)
    )
