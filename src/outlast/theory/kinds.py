"""Several kinds of failures at once: GPU, host, link, rack, software."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from outlast.errors import UsageError
from outlast.theory.checks import not_negative, whole


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Failures with one cause: `units` things, each failing at `rate_per_unit_s`, independently.

    `devices_killed`: what one failure takes out of the job until it is repaired, counted in what a
    spare replaces (say nodes); 0 for software, which leaves every device whole.
    """

    name: str
    rate_per_unit_s: float
    units: int = 1
    devices_killed: int = 1

    @property
    def rate_per_s(self) -> float:
        """Failures of this kind a second. Exact: rates of independent Poisson processes add up."""
        return self.rate_per_unit_s * self.units


def rate_per_s(kinds: Sequence[Kind]) -> float:
    """Failures a second of a job that each of `kinds` stops. Exact (superposition)."""
    _check(kinds)
    return math.fsum(kind.rate_per_s for kind in kinds)


def mtbf_s(kinds: Sequence[Kind]) -> float:
    """Mean seconds between failures of any kind; infinity where nothing fails. Exact."""
    rate = rate_per_s(kinds)
    return 1 / rate if rate else math.inf


def shares(kinds: Sequence[Kind]) -> dict[str, float]:
    """The share of failures that each kind causes, by name; they sum to 1. Exact (thinning).
    Raises UsageError where nothing fails."""
    rate = rate_per_s(kinds)
    if not rate:
        raise UsageError(f"none of {', '.join(kind.name for kind in kinds)} ever fails: no shares")
    return {kind.name: kind.rate_per_s / rate for kind in kinds}


def devices_killed_per_s(kinds: Sequence[Kind]) -> float:
    """Devices that go into repair a second: the sum of rates times what each failure takes."""
    _check(kinds)
    return math.fsum(kind.rate_per_s * kind.devices_killed for kind in kinds)


def burstiness(kinds: Sequence[Kind]) -> float:
    """Variance over mean of the number of devices killed in any time: E[K^2]/E[K], 1 where each
    failure takes one. Exact for a compound Poisson process. Raises UsageError where none is."""
    killed = devices_killed_per_s(kinds)
    if not killed:
        raise UsageError("no kind of failure takes a device")
    return math.fsum(one.rate_per_s * one.devices_killed**2 for one in kinds) / killed


def _check(kinds: Sequence[Kind]) -> None:
    if not kinds:
        raise UsageError("at least one kind of failure is needed")
    names = [kind.name for kind in kinds]
    for kind in kinds:
        not_negative(f"{kind.name}: rate_per_unit_s", kind.rate_per_unit_s)
        not_negative(f"{kind.name}: units", kind.units)
        whole(f"{kind.name}: devices_killed", kind.devices_killed)
        if names.count(kind.name) > 1:
            raise UsageError(f"two kinds of failure are called {kind.name!r}")
