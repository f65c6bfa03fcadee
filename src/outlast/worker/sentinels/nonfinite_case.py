"""A phase with a gradient that is not finite, and reports on it."""

from __future__ import annotations

import dataclasses
import platform

from outlast.controller.sentinels.nonfinite_rule import (
    NanPolicy,
    NonFiniteDecision,
    NonFiniteWord,
)
from outlast.worker.sentinels.nonfinite_exceptions import write_finding
from outlast.worker.worker_events import WorkerEvents


@dataclasses.dataclass
class NonFiniteCase:
    """A phase with a gradient that is not finite, before it is complete. `n`: phases before it."""

    n: int = -1
    tries: int = 0
    course: str = ""  # "skip" or "apply", once decided
    decision: NonFiniteDecision | None = None  # the newest
    words: dict[int, NonFiniteWord] = dataclasses.field(default_factory=dict)
    places: dict[str, None] = dataclasses.field(default_factory=dict)  # where it was computed
    moved: set[int] = dataclasses.field(default_factory=set)  # ranks that went on elsewhere

    def cause(self, decision: NonFiniteDecision, policy: NanPolicy) -> str:
        """Return what attempts have shown about the cause."""
        if decision.skipped and decision.course == "stop":
            return f"{decision.skipped} batches in a row were skipped before it"
        if not policy.reruns:
            return "nothing was tried (--nan stop)"
        where = f"{decision.tries} attempts from the same state, on {', '.join(self.places)}"
        if self.moved:
            return f"{where}, gave the same: the data or the model, not a device"
        if len(decision.culprits) == len(self.words):
            return f"{where}, gave the same: the data or the model"
        return f"{where}, gave the same, and no other device was tried"

    def report_cure(
        self, timeline: WorkerEvents, decision: NonFiniteDecision, step: int, *, is_first: bool
    ) -> None:
        """Report a step that was not finite, and then was. `is_first`: this rank is the first that
        has not moved."""
        text = f"step {step}: {decision.detail}"
        for seat in sorted(self.moved) if is_first else ():
            word = self.words[seat]
            write_finding(
                timeline,
                word,
                "drain",
                f"{text}; {decision.tries} attempts on {word.place} gave the same, and rank"
                f" {seat} is finite elsewhere: that device is at fault",
            )
        if self.moved:
            return
        again = f"{text}; run again from the same state in the same place, it is finite"
        is_known = 0 < len(decision.culprits) < len(self.words)
        if is_known and timeline.seat in decision.culprits:
            word = self.words[timeline.seat]
            write_finding(timeline, word, "warn", f"{again}: a transient error there")
        elif not is_known and is_first:
            places = ", ".join(self.places)
            nowhere = NonFiniteWord(host=platform.node())
            again += f": a transient error on one of {places}"
            write_finding(timeline, nowhere, "warn", again)
