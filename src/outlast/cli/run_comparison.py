"""Comparison of two runs of one training, bit by bit."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from outlast.events import FaultInjected, Metrics
from outlast.telemetry.event_store import read_events
from outlast.telemetry.run_summary import summarise

DIGEST = re.compile(r"^parameters sha256 ([0-9a-f]{64})$", re.MULTILINE)

Losses = dict[tuple[int, int, str], float]  # (seat, step, name)


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a disturbed run with its twin; pairs are (disturbed, undisturbed).

    `loss_difference_max` is infinite where a loss is missing on one side.
    """

    steps: tuple[int, int]
    losses: tuple[int, int]
    loss_difference_max: float
    losses_equal: bool
    digests: tuple[str, str]
    faults_asked: int
    faults_struck: int
    twin_struck: int  # must be 0, or it is no undisturbed twin
    committed_steps_lost: int

    @property
    def steps_equal(self) -> bool:
        """True if both runs committed the same number of steps."""
        return self.steps[0] == self.steps[1]

    @property
    def digests_equal(self) -> bool:
        """True if both runs printed the same digest."""
        return self.digests[0] == self.digests[1] != ""

    @property
    def all_struck(self) -> bool:
        """True if every injected fault struck the run, and none the twin."""
        return self.faults_struck == self.faults_asked and not self.twin_struck

    @property
    def none_lost(self) -> bool:
        """True if no committed step was lost."""
        return self.committed_steps_lost == 0

    @property
    def equal(self) -> bool:
        """True if nothing differs, nothing was lost, and at least one fault was survived."""
        same = self.steps_equal and self.losses_equal and self.digests_equal
        return same and self.none_lost and self.all_struck


def compare(disturbed: Path, undisturbed: Path, *, faults: int) -> RunComparison:
    """Compare the run in `disturbed`, in which `faults` were injected, with its twin."""
    ours, theirs = losses(disturbed), losses(undisturbed)
    summaries = summarise(disturbed), summarise(undisturbed)
    return RunComparison(
        steps=(summaries[0].steps or 0, summaries[1].steps or 0),
        losses=(len(ours), len(theirs)),
        loss_difference_max=difference_max(ours, theirs),
        losses_equal=bool(theirs) and bits(ours) == bits(theirs),
        digests=(_digest(disturbed), _digest(undisturbed)),
        faults_asked=faults,
        faults_struck=len(_injected_faults(disturbed)),
        twin_struck=len(_injected_faults(undisturbed)),
        committed_steps_lost=summaries[0].committed_steps_lost or 0,
    )


def bits(losses: Losses) -> dict[tuple[int, int, str], str]:
    """Replace each number by its bits, so that -0.0 is not 0.0 and NaN equals itself."""
    return {key: value.hex() for key, value in losses.items()}


def difference_max(ours: Losses, theirs: Losses) -> float:
    """Return the largest |left - right|; infinite where one side has a number that the other has
    not."""
    if ours.keys() != theirs.keys():
        return math.inf
    return max((abs(ours[key] - theirs[key]) for key in ours), default=0.0)


def _injected_faults(run_dir: Path) -> set[str]:
    return {event.spec for event in read_events(run_dir) if isinstance(event, FaultInjected)}


def losses(run_dir: Path) -> Losses:
    """Return every loss that the script reported; of a repeated step, the last one."""
    numbers: Losses = {}
    for event in read_events(run_dir):
        if isinstance(event, Metrics):
            for name, value in event.values.items():
                numbers[event.seat, event.step, name] = value
    return numbers


def _digest(run_dir: Path) -> str:
    """Return the digest that rank 0 printed at its end, from whichever worker held rank 0 then."""
    printed = [
        digest
        for log in (run_dir / "logs" / "0").glob("*/stdout.log")
        for digest in DIGEST.findall(log.read_text(errors="replace"))
    ]
    return printed[-1] if printed else ""
