"""Progress of a job and agreement of its replicas, from its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

import msgspec

from outlast.controller.recovery.recovery_policy import STRAGGLER
from outlast.events import (
    AnyEvent,
    AttemptRefused,
    Decided,
    Fault,
    GenerationOpened,
    PhaseDone,
    ReplicasCompared,
    RunStarted,
    Warned,
)
from outlast.text_formatting import plural


class LoopPlace(NamedTuple):
    """Number of completed phases and of committed steps."""

    n: int = 0
    step: int = 0


class CommittedProgress:
    """Place that every seat has reached, updated from events in order of time.

    `places`: by seat.
    """

    def __init__(self) -> None:
        self.world = 0
        self._absent: tuple[int, ...] = ()
        self.places: dict[int, LoopPlace] = {}
        self._decided = LoopPlace()

    @property
    def place(self) -> LoopPlace:
        """Place that all seats have committed."""
        return min(self.places.values(), default=LoopPlace())

    @property
    def n(self) -> int:
        """Number of phases that all seats have committed."""
        return self.place.n

    @property
    def step(self) -> int:
        """Number of steps that all seats have committed."""
        return self.place.step

    def take(self, event: AnyEvent) -> None:
        """Update the progress with one event."""
        if isinstance(event, RunStarted):
            self._decided = LoopPlace(max(0, event.resumed_n), max(0, event.resumed_step))
            self.world, self._absent = event.world, ()
            self.places = dict.fromkeys(range(event.world), self._decided)
        elif isinstance(event, PhaseDone):
            self.reach(event.seat, LoopPlace(event.n, event.step))
        elif isinstance(event, Decided):
            if event.rung != "stop":  # its place is 0 where no worker survived
                self._decided = LoopPlace(event.n, event.step)
                self._absent = event.absent
        elif isinstance(event, GenerationOpened):
            step = self._decided.step if self._decided.n == event.n else self.step
            here = set(range(self.world)).difference(self._absent)
            self.places = dict.fromkeys(here, LoopPlace(event.n, step))

    def reach(self, seat: int, place: LoopPlace) -> None:
        """Note that a seat has committed a phase."""
        if seat in self.places:
            self.places[seat] = max(self.places[seat], place)

    def copy(self) -> CommittedProgress:
        """Return an independent copy."""
        copied = copy(self)
        copied.places = dict(self.places)
        return copied


REMEMBERED = 16  # phases; a fault is at most one phase before or after the last common one
_DOING = {"sharing": "in the vote of", "voting": "in the vote of", "applying": "while applying"}
_OURS = {
    "eval": "in the evaluation",
    "checkpoint": "while the checkpoint was written,",
    "epoch": "while the ranks agreed on an epoch's length,",
    "draw": "while the ranks agreed on the next batch,",
}
_OUTSIDE = {
    "starting": "before outlast.init()",
    "waiting": "in outlast.init(), without a seat",
    "setup": "in set-up, before its first phase",
}
_BETWEEN = {
    "idle": "between phases,",
    "healing": "while a new generation was formed,",
    "dry": "in a dry step,",
    "checkpoint": "while the checkpoint was written,",
    "finished": "at the script's end,",
}


class VisitedPlace(NamedTuple):
    """Kind of a phase, and the committed steps when it was done."""

    kind: str
    step: int


class ProgressTrail:
    """Newest phases that some rank has completed or attempted, by number."""

    def __init__(self, known: dict[int, VisitedPlace] | None = None) -> None:
        self._phases = known or {}

    def copy(self) -> ProgressTrail:
        """Return an independent copy."""
        return ProgressTrail(dict(self._phases))

    def take(self, event: AnyEvent) -> None:
        """Remember the phase of a PhaseDone or AttemptRefused event."""
        if isinstance(event, PhaseDone | AttemptRefused):
            self.remember(event.n, VisitedPlace(event.kind, event.step))

    def remember(self, n: int, place: VisitedPlace) -> None:
        """Remember phase n, and forget the oldest one."""
        self._phases.pop(n, None)
        self._phases[n] = place
        if len(self._phases) > REMEMBERED:
            del self._phases[next(iter(self._phases))]

    def kind(self, n: int) -> str:
        """Return the kind of phase n; "" if unknown."""
        return self._phases[n].kind if n in self._phases else ""

    def step(self, n: int) -> int | None:
        """Return the committed steps after n phases; None if unknown."""
        if n in self._phases:
            return self._phases[n].step
        after = self._phases.get(n + 1)
        return after.step - (after.kind == "step") if after else None

    def where(self, fault: Fault, step: int) -> str:
        """Describe a worker's place; `step` is the fallback where it is unknown."""
        if fault.state in _OUTSIDE:
            return _OUTSIDE[fault.state]
        done = self.step(fault.n) if fault.n >= 0 else None
        if done is None and fault.step > 0:
            done = fault.step - 1
        if done is None:
            return f"at step {step}"
        after = f"after step {done}" if done else "before step 1"
        if fault.state in _BETWEEN:
            return f"{_BETWEEN[fault.state]} {after}"
        kind = self.kind(fault.n + 1)
        if kind == "step" or (not kind and fault.state in _DOING):
            return f"{_DOING.get(fault.state, 'in')} step {done + 1}"
        return f"{_OURS[kind]} {after}" if kind in _OURS else f"at step {step}"


class ReplicaAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run's audits so far.

    `step`: the last one at which everything compared was equal; -1: never. `whole_step`: the last
    at which all state was proven equal. `ranks`: number of ranks compared. `differed`: audits that
    found a difference; `differed_step`: the last of these.
    """

    audits: int = 0
    step: int = -1
    whole_step: int = -1
    ranks: int = 0
    differed: int = 0
    differed_step: int = -1

    @property
    def sentence(self) -> str:
        """Return the summary as a sentence."""
        if not self.audits:
            return "never compared"
        if self.step < 0:
            return f"never equal in {plural(self.audits, 'audit')}"
        if not self.ranks:
            return "no rank has a replica"
        text = f"last equal at step {self.step}, {self.ranks} ranks"
        if 0 <= self.whole_step < self.step:
            text += f" (in part; all of their state at step {self.whole_step})"
        if self.differed:
            text += f"; different {plural(self.differed, 'time')}, last at {self.differed_step}"
        return text


def replica_agreement(events: Sequence[AnyEvent]) -> ReplicaAgreement:
    """Sum up the audits in `events`, which are ordered by time."""
    audits = differed = 0
    newest: ReplicasCompared | None = None
    wrong: ReplicasCompared | None = None
    whole_step = -1
    for event in events:
        if not isinstance(event, ReplicasCompared):
            continue
        audits += 1
        if event.minority:
            differed, wrong = differed + 1, event
            continue
        newest = event
        whole_step = max(whole_step, event.step if event.parts == 1 else event.since_step)
    return ReplicaAgreement(
        audits=audits,
        step=newest.step if newest else -1,
        whole_step=whole_step,
        ranks=newest.ranks if newest else 0,
        differed=differed,
        differed_step=wrong.step if wrong else -1,
    )


def changed_findings(events: Iterable[AnyEvent]) -> Iterator[Warned]:
    """Yield findings, without those that report no more than that a straggler's loss has grown."""
    known: dict[tuple[str, ...], str] = {}
    for event in events:
        if isinstance(event, Warned):
            key = (event.host, event.check, event.symptom, event.code, event.device)
            if event.check != STRAGGLER or known.get(key) != event.severity:
                known[key] = event.severity
                yield event


def straggler_wait_s(events: Iterable[AnyEvent]) -> float:
    """Return how long all ranks have waited for slow ones, as far as it was found."""
    total_s, open_s = 0.0, dict[tuple[str, str, str], float]()
    for event in events:
        if not isinstance(event, Warned) or event.check != STRAGGLER:
            continue
        key = event.host, event.code, event.device
        if event.severity == "healthy":
            total_s += max(open_s.pop(key, 0.0), event.lost_s)
        else:
            open_s[key] = event.lost_s
    return total_s + sum(open_s.values())
