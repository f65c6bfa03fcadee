"""Identities of incidents in traces, the same for every launcher of a run."""

from __future__ import annotations

import xxhash


def trace_id(run: str, number: int) -> int:
    """Return the id of an incident's trace: 128 bits, not 0."""
    return xxhash.xxh3_128_intdigest(f"{run} {number}".encode()) or 1


def span_id(run: str, number: int, phase: str = "") -> int:
    """Return the id of an incident's span, or of a phase of it: 64 bits, not 0."""
    return xxhash.xxh3_64_intdigest(f"{run} {number} {phase}".encode()) or 1
