"""Exceptions of the script behind numbers that are not finite.

Many scripts look for themselves (`clip_grad_norm_(..., error_if_nonfinite=True)`, torch's anomaly
detection, `if not math.isfinite(loss): raise`), and raise before the vote that would tell all ranks
of it. The controller answers as to any exception; the ranks exchange what they know with the words
that each new generation begins with, and try another device before the attempts are used up.

| attempts at the phase that an exception ended | next |
|---|---|
| 1 | again in place, watched closely |
| 2, and some but not all ranks brought what is not finite | these ask for other devices, once |
| others | as the policy says |
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

from outlast import events
from outlast.controller.sentinels.nonfinite_rule import NonFiniteWord, ranks
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

CHECK = "nonfinite"


class ExceptionWord(msgspec.Struct, frozen=True, array_like=True):
    """Knowledge of one rank about exceptions at phase n+1. `brought`: ranks whose own contributions
    were not finite. `has_asked`: they have asked for other devices."""

    n: int = -1
    failures: int = 0
    has_asked: bool = False
    brought: dict[int, NonFiniteWord] = {}


class NonFiniteExceptions:
    """Attempts at one phase that exceptions have ended, as this rank knows them."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._known = ExceptionWord()
        self._is_due = False
        self._moved: set[int] = set()

    @property
    def failures(self) -> int:
        """Return the attempts at the next phase that an exception has ended, on the rank that has
        counted most."""
        return self._known.failures if self._known.n == self._status.n else 0

    def add(self, seat: int, mine: NonFiniteWord, error: Exception) -> str:
        """Count an exception of this rank; `mine`: what was not finite, if anything. Return what is
        known of that, "" if nothing was."""
        if "returned nan values in its" in str(error):  # torch's anomaly detection
            evidence = "torch's anomaly detection"
            mine = replace(mine, found="gradient in backward", is_own=True, evidence=evidence)
        whose = f", by this rank's own contribution ({mine.evidence})" if mine.is_own else ""
        parts = [f"the {mine.found} is not finite{whose}", self._history()]
        brought = self._known.brought if self.failures else {}
        if mine.is_own:
            brought = brought | {seat: mine}
        self._keep(self.failures + 1, brought)
        return "; ".join(filter(None, parts)) if mine.found else ""

    def _keep(
        self, failures: int, brought: dict[int, NonFiniteWord], *, has_asked: bool = False
    ) -> None:
        if not self.failures:
            self._moved = set()
        has_asked = has_asked or (self.failures > 0 and self._known.has_asked)
        self._known = ExceptionWord(self._status.n, failures, has_asked, brought)

    def word(self) -> ExceptionWord:
        """Return this rank's word for the ranks of a new generation."""
        return self._known

    def learn(self, words: Sequence[ExceptionWord]) -> None:
        """Take the words of the present ranks, whose new generation begins before phase n+1."""
        here = [word for word in words if word.n == self._status.n]
        if not here:
            return
        brought = {seat: word for each in here for seat, word in each.brought.items()}
        failures = max(word.failures for word in here)
        has_asked = any(word.has_asked for word in here)
        self._is_due = failures > 1 and not has_asked and 0 < len(brought) < len(words)
        self._keep(failures, brought, has_asked=has_asked or self._is_due)

    def request(self, seat: int) -> str:
        """Return why this rank asks for another device now; "" if it does not."""
        is_due, self._is_due = self._is_due and self.failures > 0, False
        if not is_due or seat not in self._known.brought:
            return ""
        return (
            f"the script raised an exception twice, where the {self._known.brought[seat].found} is"
            f" not finite; {self._culprits()} brought it: the same again, so that another device is"
            " tried"
        )

    def _culprits(self) -> str:
        evidence = next(iter(self._known.brought.values())).evidence
        return f"{ranks(self._known.brought)}{f' ({evidence})' if evidence else ''}"

    def connected(self, joiners: Collection[int]) -> None:
        """Note which of the ranks that have asked go on elsewhere."""
        if self.failures and self._known.has_asked:
            self._moved |= set(joiners).intersection(self._known.brought)

    def _history(self) -> str:
        """Return what earlier attempts at the phase have shown; "" for the first."""
        if not self.failures or not self._known.brought:
            return ""
        places = ", ".join(word.place for word in self._known.brought.values())
        return f"before, {self._culprits()} brought it, on {places}"

    def report_cure(self, timeline: WorkerEvents, step: int, seats: Sequence[int]) -> None:
        """Write the findings for a phase that is complete at last, and forget it. `seats`: the
        present ranks."""
        brought, moved = self._known.brought, self._moved
        self._known, self._moved = ExceptionWord(), set()
        writer = min(set(seats) - moved, default=seats[0])
        for seat, word in brought.items():
            text = f"step {step}: the script raised an exception, as the {word.found} is not finite"
            if seat in moved and timeline.seat == writer:
                text += (
                    f"; rank {seat} brought it on {word.place}, and is finite elsewhere: that"
                    " device is at fault"
                )
                write_finding(timeline, word, "drain", text)
            elif not moved and seat == timeline.seat:
                text += (
                    f"; rank {seat} brought it; run again from the same state in the same place, it"
                    " is finite: a transient error there"
                )
                write_finding(timeline, word, "warn", text)


def write_finding(timeline: WorkerEvents, word: NonFiniteWord, severity: str, text: str) -> None:
    """Write a finding on the device of a rank."""
    timeline.emit(
        events.Warned(
            t_ns=timeline.now_ns(),
            host=word.host or platform.node(),
            check=CHECK,
            symptom="other",
            severity=severity,
            code="gradient not finite",
            device=word.device,
            detail=text,
            worker=word.worker,
        )
    )
