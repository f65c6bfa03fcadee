"""What the logs of a lake hide, said once for all logs that hide the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outlast.fleet.lake import Source


def hidden(sources: Sequence[Source]) -> list[str]:
    """Notes, records that were kept although they are odd, and how many rows could not be read."""
    noted: dict[str, list[str]] = defaultdict(list)
    odd: dict[str, int] = defaultdict(int)
    for one in sources:
        for note in dict.fromkeys(one.notes):
            noted[note].append(one.name)
        for what, rows in one.odd.items():
            odd[what] += rows
    said = [f"{_logs(names)}: {note}" for note, names in noted.items()]
    said += [f"{rows:,} records are odd, but kept: {what}" for what, rows in odd.items()]
    rejected = sum(sum(one.rejects.values()) for one in sources)
    if rejected:
        said.append(f"{rejected:,} rows could not be read: rejects/ of the lake has them")
    return said


def _logs(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
