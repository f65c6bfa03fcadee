"""A verdict in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from outlast.fleet.trace.near import Near
from outlast.fleet.trace.stuck import Stuck, named

SURE = {
    "sure": "the dumps leave no other reading",
    "likely": "likely: the dumps do not show all of it",
    "unsure": "uncertain: the dumps do not decide it",
}


def verdict(found: Sequence[Stuck], *, circle: bool, last: str, near: Sequence[Near]) -> str:
    """One paragraph. `last`: what the culprit did last."""
    if not found:
        return (
            "Nothing stands still in these dumps: whatever their ranks entered, all of them"
            " entered, the same on all, and nothing shows that it did not end."
        )
    root = found[0]
    said = [sentence(root.said)]
    if circle:
        others = "; ".join(one.said for one in found[1:4])
        said.append(f"It is a circle, in which nobody is first: {others}.")
    if root.since_ns:
        since = datetime.fromtimestamp(root.since_ns / 1e9, tz=UTC)
        at = f", at {root.where}" if root.where else ""
        said.append(f"The first of them entered it at {since:%Y-%m-%d %H:%M:%S.%f} UTC{at}.")
    if last:
        said.append(last)
    if near:
        said.append(health(near[0]))
    elif root.confidence != "sure":
        said.append(sentence(SURE[root.confidence]))
    return " ".join(said)


def health(near: Near) -> str:
    """The node of rank 2, node17, had XID 79 (gpu-unavailable) 4.0 seconds before."""
    what = near.code or near.check
    detail = f"{near.symptom}, {near.device}" if near.device else near.symptom
    side = "before" if near.before_s >= 0 else "after"
    return (
        f"The node of {named(near.ranks)}, {near.node}, had {what} ({detail}) {_span(near)} {side}."
    )


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _span(near: Near) -> str:
    apart_s = abs(near.before_s)
    return f"{apart_s / 60:.1f} minutes" if apart_s >= 120 else f"{apart_s:.1f} seconds"
