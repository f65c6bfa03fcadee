"""Modes of the controller, and the transitions between them.

`docs/protocol.md` shows the same table, as `mode_table` prints it; a test holds both equal.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Mode = Literal[
    "unborn",
    "awaiting",
    "gathering",
    "connecting",
    "open",
    "closing",
    "clearing",
    "verifying",
    "stopping",
    "ended",
]


class ModeRow(NamedTuple):
    """Meaning of a mode, its exit condition, and the modes that may follow."""

    meaning: str
    ends: str
    following: tuple[Mode, ...]


MODES: dict[Mode, ModeRow] = {
    "unborn": ModeRow("no term has begun", "BeginTerm", ("awaiting", "gathering")),
    "awaiting": ModeRow(
        "a later term waits for the agents of the old generation",
        "all of them have offered themselves, or their leases have expired",
        ("closing", "gathering", "stopping"),
    ),
    "gathering": ModeRow(
        "seats are filled; workers say Hello and Ready",
        "every seat has a worker that is ready",
        ("connecting", "closing", "verifying", "stopping"),
    ),
    "connecting": ModeRow(
        "workers connect and move state",
        "every worker has said Joined, with equal digests",
        ("open", "closing", "stopping"),
    ),
    "open": ModeRow(
        "phases run",
        "a failure, a request, a planned move, or every script has ended",
        ("closing", "stopping"),
    ),
    "closing": ModeRow(
        "every worker answers with its Status, or is reaped",
        "all have answered; then the recovery ladder decides",
        ("gathering", "clearing", "closing", "stopping"),
    ),
    "clearing": ModeRow(
        "a restart waits until every worker with a seat is reaped",
        "none is left",
        ("verifying", "stopping"),
    ),
    "verifying": ModeRow(
        "a restart waits for the newest complete checkpoint",
        "CheckpointFound, or its deadline",
        ("gathering", "stopping"),
    ),
    "stopping": ModeRow("workers leave or are killed", "every worker is reaped", ("ended",)),
    "ended": ModeRow("the run is over", "", ()),
}


def mode_table() -> str:
    """Return the modes as a Markdown table."""
    rows = ["| mode | meaning | ends when | next |", "|---|---|---|---|"]
    for mode, row in MODES.items():
        following = ", ".join(f"`{each}`" for each in row.following)
        rows.append(f"| `{mode}` | {row.meaning} | {row.ends} | {following} |")
    return "\n".join(rows)
