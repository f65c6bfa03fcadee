"""Last agreement of the replicas of a run, from its audits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outlast.events import AnyEvent, ReplicasCompared
from outlast.text_formatting import plural


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
    parts: list[ReplicasCompared] = []
    for event in events:
        if not isinstance(event, ReplicasCompared):
            continue
        audits += 1
        if event.minority:
            differed, wrong, parts = differed + 1, event, []
            continue
        newest = event
        parts = [*parts, event][-event.parts :]
        if {one.part for one in parts if one.parts == event.parts} == set(range(event.parts)):
            whole_step = parts[0].step
    return ReplicaAgreement(
        audits=audits,
        step=newest.step if newest else -1,
        whole_step=whole_step,
        ranks=newest.ranks if newest else 0,
        differed=differed,
        differed_step=wrong.step if wrong else -1,
    )
