"""A rank's time as few columns, for figures and pages, and the colours of buckets."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.telemetry.time_accounting import Bucket, Span, merge

COLUMNS = 1500  # a lane is drawn in so many columns at most, each in its main bucket's colour
# Okabe and Ito's colours: work in blues, costs of failures in vermilion and yellow.
COLOUR: dict[Bucket, str] = {
    "start": "#aaaaaa",
    "step": "#0072b2",
    "eval": "#56b4e9",
    "checkpoint": "#cc79a7",
    "script": "#b3d4e8",
    "lost": "#d55e00",
    "recovery": "#f0e442",
    "absent": "#f7f7f7",
    "stop": "#dddddd",
    "down": "#333333",
}
_FAILED: frozenset[Bucket] = frozenset(("lost", "recovery", "down"))
_FAILED_WEIGHT = 3  # a short recovery stays visible in a long run


def columns(spans: Sequence[Span], begin_ns: int, wall_ns: int, count: int = COLUMNS) -> list[Span]:
    """Return a lane's spans as at most `count` columns, equal neighbours joined.

    Each has the bucket that fills most of it; costs of failures count threefold.
    """
    width_ns = max(1, -(-wall_ns // count))
    weights: dict[int, dict[Bucket, int]] = {}
    for span in spans:
        at_ns = span.begin_ns - begin_ns
        end_ns = span.end_ns - begin_ns
        weight = _FAILED_WEIGHT if span.bucket in _FAILED else 1
        while at_ns < end_ns:
            index = at_ns // width_ns
            until_ns = min(end_ns, width_ns * (index + 1))
            column = weights.setdefault(index, {})
            column[span.bucket] = column.get(span.bucket, 0) + weight * (until_ns - at_ns)
            at_ns = until_ns
    return merge(
        Span(begin_ns + index * width_ns, begin_ns + (index + 1) * width_ns, _heaviest(column))
        for index, column in weights.items()
    )


def _heaviest(weights: dict[Bucket, int]) -> Bucket:
    return max(weights, key=lambda bucket: weights[bucket])
