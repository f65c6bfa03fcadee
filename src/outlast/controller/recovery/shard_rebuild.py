"""Place from which a lost shard without a replica can be rebuilt, from keepers' memory.

| phase n+1 | newest copy, of which every rank has copied its part | the ranks are before |
|---|---|---|
| not applied | state after step s, and s steps are committed | phase n+1 |
| applied, and it can be taken back | state before that step | phase n+1, redone |
| anything else | | no place: all ranks go back to a copy |

Nobody has committed a phase that a rank cannot reach: a phase is taken back only where all ranks
that have completed it can do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outlast.controller import shared_values
from outlast.controller.controller_state import ControllerState, WorkerRecord
from outlast.transport import messages


class RebuildPlace(NamedTuple):
    """The ranks stand before phase n+1, and shards without a replica come from `copy`."""

    n: int
    step: int
    copy: messages.Checkpointed


def find_place(
    state: ControllerState, survivors: Sequence[WorkerRecord], n: int, step: int
) -> tuple[RebuildPlace | None, str]:
    """Return the place, or None and the reason. `n`, `step`: the farthest that a survivor has come.

    A decision to rebuild stands until its generation was open, since ranks may have taken a phase
    back.
    """
    progress = state.progress
    if not survivors or not shared_values.without_donor(state, [w.seat for w in survivors]):
        return None, ""
    if progress.rebuilds and progress.base is not None:
        return RebuildPlace(progress.n, progress.step, progress.base), ""
    known = [w.status.copy for w in survivors if w.status] + [state.saves.checkpoint]
    copies = [
        copy
        for copy in known
        if copy is not None and copy.tier == "memory" and not state.audit.is_barred(copy)
    ]
    if not copies:
        return None, ""
    newest = max(copies, key=lambda copy: copy.n)
    if newest.step == step and newest.n <= n:
        return RebuildPlace(n, step, newest), ""
    why = f"the newest copy in memory is of step {newest.step}, and step {step} is committed"
    ahead = [w.status for w in survivors if w.status is not None and w.status.n == n]
    is_base = newest.step == step - 1 and newest.n < n and n > progress.n
    if not is_base:
        return None, why
    if all(s.redoable and s.copy is not None and s.copy.path == newest.path for s in ahead):
        return RebuildPlace(n - 1, step - 1, newest), ""
    return None, f"{why} on a rank that cannot take it back"
