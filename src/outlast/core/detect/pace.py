"""How long a kind of phase takes in one process: what the watch may expect of the next one.

A *key* stands for a kind of phase: a step's function, an evaluation's, one of ours. Pure; the
worker measures (exactly, however short its phases are) and the watch on its host reads.
"""

from __future__ import annotations

import xxhash

from outlast.page import Pace

WARM_PHASES = 2  # kernels, allocators and compilers: they say nothing about those to come
_FADES = 16  # a slow one is forgotten by a sixteenth with each phase that is faster
_KEY_BITS = 63

UNSEEN = Pace(0, 0)


def key_of(name: str) -> int:
    """The number, never 0, that stands for phases of this name."""
    return (xxhash.xxh3_64_intdigest(name.encode()) & ((1 << _KEY_BITS) - 1)) or 1


def after(pace: Pace, took_ns: int) -> Pace:
    """The pace once another phase has taken `took_ns`."""
    if pace.seen < WARM_PHASES:
        return Pace(pace.seen + 1, 0)
    return Pace(pace.seen + 1, max(took_ns, pace.slowest_ns - pace.slowest_ns // _FADES, 1))
