"""What a reader of symptoms could not read, and why."""

from __future__ import annotations

import msgspec

from outlast.log_records import Finding

TEXT_MAX = 400  # characters of a line that are kept


class Unread(msgspec.Struct, frozen=True):
    """`line` counts from 1; 0 where the whole text is meant."""

    line: int
    reason: str
    text: str


Reading = Finding | Unread


def cut(text: str) -> str:
    """As much of a text as is kept."""
    text = text.strip()
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"
